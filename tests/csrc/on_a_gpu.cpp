// What a machine has that a fake driver can only imitate: threads that come at once, contexts, forks, the end of the
// process. Calls the package's transpose and prints a line for each outcome.
//
//   on_a_gpu threads | contexts | fork | at_exit
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "../../examples/cpp/cuda_driver.h"
#include "tilekernels/ops.h"
#include "tilekernels/tilekernels.hpp"

namespace {

using tilekernels::Tensor;

constexpr int kThreads = 32;
constexpr int64_t kRows = 300, kCols = 200;

// A matrix of its own in the current context.
struct Job {
  explicit Job(int seed) : matrix(kRows * kCols) {
    for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<uint16_t>(i * 31 + static_cast<size_t>(seed));
    input = std::make_unique<cuda::Buffer>(matrix);
    output = std::make_unique<cuda::Buffer>(matrix.size() * sizeof(uint16_t));
  }
  tk_status launch(int device = 0) const {
    const auto x = Tensor::dense(input->get(), tilekernels::kBfloat16, {kRows, kCols}, {TK_CUDA, device});
    const auto out = Tensor::dense(output->get(), tilekernels::kBfloat16, {kCols, kRows}, {TK_CUDA, device});
    auto args = tilekernels::make_args<tk_transpose_transpose_args>();
    args.x = x;
    args.out = out;
    return tk_transpose_transpose(&args, stream.get());
  }
  bool is_right() const {
    stream.synchronize();
    const std::vector<uint16_t> got = output->download<uint16_t>();
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t col = 0; col < kCols; ++col) {
        if (got[static_cast<size_t>(col * kRows + row)] != matrix[static_cast<size_t>(row * kCols + col)]) return false;
      }
    }
    return true;
  }

  std::vector<uint16_t> matrix;
  std::unique_ptr<cuda::Buffer> input, output;
  cuda::Stream stream;
};

void show(const char* what, tk_status status) {
  std::printf("%s: %s\n", what, tk_status_name(status));
  std::fflush(stdout);
}

// All arrive before the first use of the library.
void run_threads() {
  std::atomic<int> num_waiting{kThreads}, num_done{0}, num_right{0};
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      --num_waiting;
      while (num_waiting > 0) std::this_thread::yield();
      const tilekernels::DeviceScope device(0);
      const Job job(index);
      num_done += job.launch() == TK_OK;
      num_right += job.is_right();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d launched, %d right\n", num_done.load(), num_right.load());
}

void run_contexts() {
  const tilekernels::DeviceScope device(0);
  const Job job(1);
  show("primary", job.launch());
  show("another device's tensor", job.launch(1));
  std::thread([&] { show("none", job.launch()); }).join();

  void* context = nullptr;
  cuda::check(cuda::driver().cuCtxCreate_v2(&context, 0, 0), "cuCtxCreate_v2");
  auto own = std::make_unique<Job>(2);
  show("own", own->launch());
  std::atomic<int> step{0};
  std::thread other([&] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    const auto set_current = reinterpret_cast<int (*)(void*)>(dlsym(library, "cuCtxSetCurrent"));
    cuda::check(set_current(context), "cuCtxSetCurrent");
    show("own, in another thread", own->launch());
    step = 1;
    while (step != 2) std::this_thread::yield();
    show("destroyed, current in another thread", own->launch());
    step = 3;
    void* previous = context;
    show("entering the device", tk_enter_device(0, &previous));
    std::printf("%s\n", previous == nullptr ? "nothing to restore" : "a destroyed context to restore");
    show("primary, after that", job.launch());
    std::printf("%s\n", job.is_right() ? "right" : "wrong");
  });
  while (step != 1) std::this_thread::yield();
  own->stream.synchronize();
  cuda::driver().cuCtxDestroy_v2(context);
  step = 2;
  other.join();
  own.release();  // its memory went with the context
}

void run_fork() {
  const tilekernels::DeviceScope device(0);
  const Job job(3);
  show("parent", job.launch());
  const pid_t child = fork();
  if (child == 0) {
    show("child", job.launch());
    show("child", tk_preload(nullptr, 0, 0));
    std::_Exit(0);
  }
  int state = 0;
  waitpid(child, &state, 0);
  std::printf("child ended with %d\n", state);
  show("parent", job.launch());
  std::printf("%s\n", job.is_right() ? "right" : "wrong");
}

Job* last_job = nullptr;

// The driver may be gone by then: any status, but no crash.
void launch_at_exit() { std::printf("at exit: %s\n", tk_status_name(last_job->launch())[0] == 'T' ? "returned" : ""); }

struct Global {
  ~Global() {
    if (last_job != nullptr) launch_at_exit();
  }
} global;

void run_at_exit() {
  std::atexit(launch_at_exit);
  const tilekernels::DeviceScope device(0);
  last_job = new Job(4);
  show("first", last_job->launch());
  std::printf("%s\n", last_job->is_right() ? "right" : "wrong");
}

}  // namespace

int main(int num_arguments, char** arguments) try {
  const auto is = [&](const char* name) { return num_arguments == 2 && std::strcmp(arguments[1], name) == 0; };
  if (is("threads")) run_threads();
  if (is("contexts")) run_contexts();
  if (is("fork")) run_fork();
  if (is("at_exit")) run_at_exit();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
