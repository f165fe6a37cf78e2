// Memory, streams, contexts and graphs for the examples, straight from the driver: so they build without the CUDA
// toolkit. An engine has its own; tilekernels asks for none of this.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace cuda {

// Every function of libcuda.so.1 that the examples call: symbol and parameters.
#define CUDA_FUNCTIONS(X)                                                          \
  X(cuInit, (unsigned flags))                                                      \
  X(cuDeviceGetCount, (int* count))                                                \
  X(cuCtxCreate_v2, (void** context, unsigned flags, int device))                  \
  X(cuCtxDestroy_v2, (void* context))                                              \
  X(cuMemAlloc_v2, (uint64_t* memory, size_t num_bytes))                           \
  X(cuMemFree_v2, (uint64_t memory))                                               \
  X(cuMemsetD8_v2, (uint64_t memory, unsigned char value, size_t num_bytes))       \
  X(cuMemcpyHtoD_v2, (uint64_t to, const void* from, size_t num_bytes))            \
  X(cuMemcpyDtoH_v2, (void* to, uint64_t from, size_t num_bytes))                  \
  X(cuStreamCreate, (void** stream, unsigned flags))                               \
  X(cuStreamDestroy_v2, (void* stream))                                            \
  X(cuStreamSynchronize, (void* stream))                                           \
  X(cuStreamBeginCapture_v2, (void* stream, int mode))                             \
  X(cuStreamEndCapture, (void* stream, void** graph))                              \
  X(cuGraphInstantiateWithFlags, (void** executable, void* graph, uint64_t flags)) \
  X(cuGraphLaunch, (void* executable, void* stream))                               \
  X(cuGraphDestroy, (void* graph))                                                 \
  X(cuGraphExecDestroy, (void* executable))

struct Driver {
#define CUDA_DECLARE(symbol, parameters) int(*symbol) parameters;
  CUDA_FUNCTIONS(CUDA_DECLARE)
#undef CUDA_DECLARE

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) throw std::runtime_error(std::string("no NVIDIA driver: ") + dlerror());
#define CUDA_FIND(symbol, parameters)                                    \
  symbol = reinterpret_cast<int(*) parameters>(dlsym(library, #symbol)); \
  if (symbol == nullptr) throw std::runtime_error("the NVIDIA driver has no " #symbol);
    CUDA_FUNCTIONS(CUDA_FIND)
#undef CUDA_FIND
    if (const int error = cuInit(0)) throw std::runtime_error("cuInit failed with error " + std::to_string(error));
  }
};

inline const Driver& driver() {
  static const Driver opened;
  return opened;
}

inline void check(int error, const char* call) {
  if (error != 0) throw std::runtime_error(std::string(call) + " failed with CUDA error " + std::to_string(error));
}
#define CUDA_CHECK(call, ...) ::cuda::check(::cuda::driver().call(__VA_ARGS__), #call)

// Device memory of the current context. What is written to it has arrived when a call returns: the driver's own calls
// may return earlier, and a Stream does not wait for the default stream, on which they run.
class Buffer {
 public:
  explicit Buffer(size_t num_bytes) : num_bytes_(num_bytes) {
    if (num_bytes > 0) CUDA_CHECK(cuMemAlloc_v2, &memory_, num_bytes);
  }
  template <typename T>
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size() * sizeof(T)) {
    if (num_bytes_ == 0) return;
    CUDA_CHECK(cuMemcpyHtoD_v2, memory_, values.data(), num_bytes_);
    CUDA_CHECK(cuStreamSynchronize, nullptr);
  }
  ~Buffer() {
    if (memory_ != 0) driver().cuMemFree_v2(memory_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* get() const { return reinterpret_cast<void*>(memory_); }
  size_t num_bytes() const { return num_bytes_; }
  void fill(unsigned char value) {
    if (num_bytes_ == 0) return;
    CUDA_CHECK(cuMemsetD8_v2, memory_, value, num_bytes_);
    CUDA_CHECK(cuStreamSynchronize, nullptr);
  }
  template <typename T>
  std::vector<T> download() const {
    std::vector<T> values(num_bytes_ / sizeof(T));
    if (num_bytes_ > 0) CUDA_CHECK(cuMemcpyDtoH_v2, values.data(), memory_, num_bytes_);
    return values;
  }

 private:
  uint64_t memory_ = 0;
  size_t num_bytes_;
};

// A stream of the current context that does not wait for the default stream.
class Stream {
 public:
  Stream() { CUDA_CHECK(cuStreamCreate, &stream_, 1); }
  ~Stream() { driver().cuStreamDestroy_v2(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void* get() const { return stream_; }
  void synchronize() const { CUDA_CHECK(cuStreamSynchronize, stream_); }

 private:
  void* stream_ = nullptr;
};

// What `work` launches on the stream, captured once and launched as often as wanted.
class Graph {
 public:
  template <typename Work>
  Graph(const Stream& stream, const Work& work) {
    constexpr int kThreadLocal = 1;  // other threads may go on allocating meanwhile
    CUDA_CHECK(cuStreamBeginCapture_v2, stream.get(), kThreadLocal);
    work();
    CUDA_CHECK(cuStreamEndCapture, stream.get(), &graph_);
    CUDA_CHECK(cuGraphInstantiateWithFlags, &executable_, graph_, 0);
  }
  ~Graph() {
    driver().cuGraphExecDestroy(executable_);
    driver().cuGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(const Stream& stream) const { CUDA_CHECK(cuGraphLaunch, executable_, stream.get()); }

 private:
  void *graph_ = nullptr, *executable_ = nullptr;
};

// A context of one's own, current in the thread that makes it.
class Context {
 public:
  explicit Context(int device) { CUDA_CHECK(cuCtxCreate_v2, &context_, 0, device); }
  ~Context() { driver().cuCtxDestroy_v2(context_); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 private:
  void* context_ = nullptr;
};

inline int num_devices() {
  int count = 0;
  CUDA_CHECK(cuDeviceGetCount, &count);
  return count;
}

}  // namespace cuda
