// Two CUDA contexts, a thread and two streams in each: on two GPUs where the machine has them, else both on one. The
// library loads its kernels once; each call goes to the context that is current in the calling thread.
#include <tilekernels/ops.h>
#include <tilekernels/tilekernels.hpp>

#include <cstdio>
#include <thread>

#include "cuda_driver.h"

namespace {

using tilekernels::Tensor;

constexpr int64_t kRows = 1000, kCols = 768;
constexpr int kLaunches = 50;  // on each stream

struct Outcome {
  size_t num_wrong = 0;
  std::string failure;
};

std::vector<uint16_t> make_matrix(int seed) {
  std::vector<uint16_t> matrix(kRows * kCols);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<uint16_t>(i * 31 + static_cast<size_t>(seed));
  return matrix;
}

size_t count_wrong(const std::vector<uint16_t>& matrix, const std::vector<uint16_t>& transposed) {
  size_t num_wrong = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t col = 0; col < kCols; ++col) {
      num_wrong += matrix[static_cast<size_t>(row * kCols + col)] != transposed[static_cast<size_t>(col * kRows + row)];
    }
  }
  return num_wrong;
}

// One matrix and its transpose, on a stream of its own.
struct Job {
  Job(int device, int seed)
      : matrix(make_matrix(seed)),
        x(Tensor::dense(input.get(), tilekernels::kBfloat16, {kRows, kCols}, {TK_CUDA, device})),
        out(Tensor::dense(output.get(), tilekernels::kBfloat16, {kCols, kRows}, {TK_CUDA, device})) {
    output.fill(0xFF);
    args.x = x;
    args.out = out;
  }
  void launch() const { tilekernels::check(tk_transpose_transpose(&args, stream.get())); }
  size_t finish() const {
    stream.synchronize();
    return count_wrong(matrix, output.download<uint16_t>());
  }

  std::vector<uint16_t> matrix;
  cuda::Buffer input{matrix}, output{matrix.size() * sizeof(uint16_t)};
  cuda::Stream stream;
  Tensor x, out;
  tk_transpose_transpose_args args = tilekernels::make_args<tk_transpose_transpose_args>();
};

void work(int device, Outcome* outcome) try {
  const cuda::Context context(device);  // current in this thread
  const Job first(device, 1), second(device, 2);
  for (int i = 0; i < kLaunches; ++i) {
    first.launch();
    second.launch();
  }
  outcome->num_wrong = first.finish() + second.finish();
} catch (const std::exception& error) {
  outcome->failure = error.what();
}

}  // namespace

int main() try {
  const int devices[] = {0, cuda::num_devices() > 1 ? 1 : 0};
  Outcome outcomes[2];
  std::thread other(work, devices[1], &outcomes[1]);
  work(devices[0], &outcomes[0]);
  other.join();

  bool right = true;
  for (int i = 0; i < 2; ++i) {
    const Outcome& outcome = outcomes[i];
    right &= outcome.num_wrong == 0 && outcome.failure.empty();
    std::printf("context %d on cuda:%d: 2 streams, %d launches: %s\n", i, devices[i], 2 * kLaunches,
                !outcome.failure.empty() ? outcome.failure.c_str()
                : outcome.num_wrong == 0 ? "right"
                                         : (std::to_string(outcome.num_wrong) + " wrong values").c_str());
  }
  return right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
