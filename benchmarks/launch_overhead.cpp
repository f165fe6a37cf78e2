// What a typed entry of the library costs on the host over cuLaunchKernelEx of the same kernel, in microseconds.
//
// The raw launch is taken from a captured graph: its kernel node holds the function, the grid and the packed arguments
// that the entry launched. A second raw launch takes the context-independent CUkernel, as the library does: the driver
// looks up its function in each launch, and the difference between the two is the driver's, not ours. Where the node
// has no CUkernel, the cubin inside the library is loaded once more. Bursts of all alternate; medians are printed as
// JSON lines. Built by host_overhead.py.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <vector>

#include "tilekernels/ops.h"
#include "tilekernels/tilekernels.hpp"

namespace {

constexpr int kBurst = 200;  // launches between two synchronisations: the queue never fills
constexpr int kRounds = 300;

template <typename Function>
void load(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) {
    std::fprintf(stderr, "libcuda.so.1 has no %s\n", name);
    std::exit(1);
  }
}

struct Driver {
  decltype(&cuInit) init;
  decltype(&cuDevicePrimaryCtxRetain) retain;
  decltype(&cuCtxSetCurrent) set_current;
  decltype(&cuMemAlloc) allocate;
  decltype(&cuMemsetD8) fill;
  decltype(&cuStreamCreate) create_stream;
  decltype(&cuStreamSynchronize) synchronize;
  decltype(&cuStreamBeginCapture) begin_capture;
  decltype(&cuStreamEndCapture) end_capture;
  decltype(&cuGraphGetNodes) nodes;
  decltype(&cuGraphKernelNodeGetParams) node_params;
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuFuncGetName) function_name;
  decltype(&cuLibraryLoadData) load_library;
  decltype(&cuLibraryGetKernel) find_kernel;
  decltype(&cuKernelGetFunction) function_of;
  decltype(&cuKernelSetAttribute) set_attribute;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
      std::fprintf(stderr, "no NVIDIA driver: %s\n", dlerror());
      std::exit(1);
    }
    load(library, "cuInit", init);
    load(library, "cuDevicePrimaryCtxRetain", retain);
    load(library, "cuCtxSetCurrent", set_current);
    load(library, "cuMemAlloc_v2", allocate);
    load(library, "cuMemsetD8_v2", fill);
    load(library, "cuStreamCreate", create_stream);
    load(library, "cuStreamSynchronize", synchronize);
    load(library, "cuStreamBeginCapture_v2", begin_capture);
    load(library, "cuStreamEndCapture", end_capture);
    load(library, "cuGraphGetNodes", nodes);
    load(library, "cuGraphKernelNodeGetParams_v2", node_params);
    load(library, "cuLaunchKernelEx", launch);
    load(library, "cuFuncGetName", function_name);
    load(library, "cuLibraryLoadData", load_library);
    load(library, "cuLibraryGetKernel", find_kernel);
    load(library, "cuKernelGetFunction", function_of);
    load(library, "cuKernelSetAttribute", set_attribute);
  }
};

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) {
    std::fprintf(stderr, "%s failed with CUDA error %d\n", what, static_cast<int>(result));
    std::exit(1);
  }
}

void* allocate(const Driver& driver, size_t num_bytes) {
  CUdeviceptr pointer = 0;
  check(driver.allocate(&pointer, num_bytes), "cuMemAlloc");
  check(driver.fill(pointer, 0, num_bytes), "cuMemsetD8");
  return reinterpret_cast<void*>(pointer);
}

// The file of libtilekernels, in which the cubins lie as they are.
std::vector<char> read_library() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<void*>(&tk_launch), &info) == 0) return {};
  std::ifstream file(info.dli_fname, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The kernel of that name, loaded anew from the library's own cubins; null if none has it.
CUkernel load_kernel(const Driver& driver, const char* name, unsigned smem) {
  static const std::vector<char> content = read_library();
  constexpr char kElf[] = {0x7f, 'E', 'L', 'F'};
  constexpr size_t kAlignment = 16, kMachine = 18;
  constexpr uint16_t kCuda = 190;  // EM_CUDA
  for (size_t at = 0; at + 64 < content.size(); at += kAlignment) {
    uint16_t machine = 0;
    std::memcpy(&machine, &content[at + kMachine], sizeof(machine));
    if (std::memcmp(&content[at], kElf, sizeof(kElf)) != 0 || machine != kCuda) continue;
    CUlibrary library = nullptr;
    CUkernel kernel = nullptr;
    // Of another arch, or without this kernel: look on.
    if (driver.load_library(&library, &content[at], nullptr, nullptr, 0, nullptr, nullptr, 0) != CUDA_SUCCESS) continue;
    if (driver.find_kernel(&kernel, library, name) != CUDA_SUCCESS) continue;
    const auto attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    check(driver.set_attribute(attribute, static_cast<int>(smem), kernel, 0), "cuKernelSetAttribute");
    return kernel;
  }
  return nullptr;
}

// Microseconds a call of `call`, over one burst.
double time_burst(const Driver& driver, CUstream stream, const std::function<void()>& burst) {
  const auto start = std::chrono::steady_clock::now();
  burst();
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
  check(driver.synchronize(stream), "cuStreamSynchronize");
  return elapsed.count() / kBurst;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// `entry` makes one call of the library on the stream.
template <typename Entry>
void measure(const Driver& driver, CUstream stream, const char* kernel, const Entry& entry) {
  CUgraph graph = nullptr;
  CUgraphNode node = nullptr;
  size_t num_nodes = 1;
  check(driver.begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
  entry();
  check(driver.end_capture(stream, &graph), "cuStreamEndCapture");
  check(driver.nodes(graph, &node, &num_nodes), "cuGraphGetNodes");
  CUDA_KERNEL_NODE_PARAMS params = {};
  check(driver.node_params(node, &params), "cuGraphKernelNodeGetParams");
  CUfunction function = params.func;
  CUkernel handle = params.kern;
  const char* name = nullptr;
  if (function == nullptr) check(driver.function_of(&function, handle), "cuKernelGetFunction");
  check(driver.function_name(&name, function), "cuFuncGetName");
  const char* handle_from = handle != nullptr ? "the graph's node" : "the cubin, loaded anew";
  if (handle == nullptr) handle = load_kernel(driver, name, params.sharedMemBytes);
  CUlaunchConfig config = {};
  config.gridDimX = params.gridDimX, config.gridDimY = params.gridDimY, config.gridDimZ = params.gridDimZ;
  config.blockDimX = params.blockDimX, config.blockDimY = params.blockDimY, config.blockDimZ = params.blockDimZ;
  config.sharedMemBytes = params.sharedMemBytes;
  config.hStream = stream;

  const auto launch_burst = [&](CUfunction launched) {
    for (int i = 0; i < kBurst; ++i) check(driver.launch(&config, launched, params.kernelParams, nullptr), kernel);
  };
  const auto raw_burst = [&] { launch_burst(function); };
  const auto handle_burst = [&] { launch_burst(reinterpret_cast<CUfunction>(handle)); };
  const auto entry_burst = [&] {
    for (int i = 0; i < kBurst; ++i) entry();
  };
  std::vector<double> raw, through_handle, typed, over, over_handle;
  for (int round = -20; round < kRounds; ++round) {
    const double raw_us = time_burst(driver, stream, raw_burst);
    const double handle_us = handle != nullptr ? time_burst(driver, stream, handle_burst) : 0.0;
    const double typed_us = time_burst(driver, stream, entry_burst);
    if (round < 0) continue;  // warming up
    raw.push_back(raw_us), typed.push_back(typed_us), over.push_back(typed_us - raw_us);
    through_handle.push_back(handle_us), over_handle.push_back(typed_us - handle_us);
  }
  std::printf("{\"kernel\": \"%s\", \"raw_us\": %.4f, \"entry_us\": %.4f, \"over_raw_us\": %.4f", kernel, median(raw),
              median(typed), median(over));
  if (handle != nullptr) {
    std::printf(", \"raw_handle_us\": %.4f, \"over_raw_handle_us\": %.4f, \"handle_from\": \"%s\"",
                median(through_handle), median(over_handle), handle_from);
  }
  std::printf("}\n");
}

}  // namespace

int main() {
  const Driver driver;
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  check(driver.init(0), "cuInit");
  check(driver.retain(&context, 0), "cuDevicePrimaryCtxRetain");
  check(driver.set_current(context), "cuCtxSetCurrent");
  check(driver.create_stream(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  try {
    using tilekernels::Tensor;
    tilekernels::check(tk_preload(nullptr, 0, 0));

    const Tensor x = Tensor::dense(allocate(driver, 64 * 512 * 2), tilekernels::kBfloat16, {64, 512});
    const Tensor transposed = Tensor::dense(allocate(driver, 64 * 512 * 2), tilekernels::kBfloat16, {512, 64});
    tk_transpose_transpose_args transpose = {};
    transpose.size = sizeof(transpose);
    transpose.x = &x.view();
    transpose.out = &transposed.view();
    measure(driver, stream, "transpose.transpose",
            [&] { tilekernels::check(tk_transpose_transpose(&transpose, stream)); });

    const Tensor tokens = Tensor::dense(allocate(driver, 8 * 4096 * 2), tilekernels::kBfloat16, {8, 4096});
    const Tensor data = Tensor::dense(allocate(driver, 8 * 4096), tilekernels::kFloat8E4m3fn, {8, 4096});
    const Tensor scales = Tensor::dense(allocate(driver, 8 * 32 * 4), tilekernels::kFloat32, {8, 32});
    tk_quant_per_token_cast_args cast = {};
    cast.size = sizeof(cast);
    cast.x = &tokens.view();
    cast.out = &data.view();
    cast.out_sf = &scales.view();
    cast.x_block_rows = 1;
    cast.x_block_cols = 1;
    cast.clamp_min = 1e-4f;
    cast.num_per_channels = 128;
    measure(driver, stream, "quant.per_token_cast",
            [&] { tilekernels::check(tk_quant_per_token_cast(&cast, stream)); });
  } catch (const tilekernels::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
