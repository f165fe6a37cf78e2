// An engine's hot loop over the hand-written kernels, with malloc, calloc, realloc, free and pthread_mutex_lock
// counted. Prints the counts for repeated launches and checks, which must be zero, and the time of a launch beyond the
// driver's.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include <dlfcn.h>
#include <pthread.h>

#include "tilekernels/ops.h"
#include "tilekernels/tilekernels.hpp"

namespace {
long num_allocations = 0, num_locks = 0;
constexpr int kCalls = 200000;
}  // namespace

// This program's definitions come before libc's in symbol lookup, for the library too.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* data, size_t bytes);
void __libc_free(void* data);

void* malloc(size_t bytes) {
  ++num_allocations;
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  ++num_allocations;
  return __libc_calloc(count, bytes);
}
void* realloc(void* data, size_t bytes) {
  ++num_allocations;
  return __libc_realloc(data, bytes);
}
void free(void* data) {
  if (data != nullptr) ++num_allocations;
  __libc_free(data);
}
int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static const auto lock = reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  ++num_locks;
  return lock(mutex);
}
}

namespace {

template <typename Call>
void measure(const char* what, Call call) {
  call();  // first use
  const long allocations = num_allocations, locks = num_locks;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCalls; ++i) call();
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  std::printf("%s %ld %ld %.1f\n", what, num_allocations - allocations, num_locks - locks, time.count() / kCalls);
}

}  // namespace

int main() {
  using tilekernels::Tensor;
  const tilekernels::DeviceScope scope(0);
  void* const data = reinterpret_cast<void*>(0x10000);
  const Tensor scores = Tensor::dense(data, tilekernels::kFloat32, {6, 64});
  const Tensor out = Tensor::dense(data, tilekernels::kInt64, {6, 4});
  tk_demo_topk_args args = {};
  args.size = sizeof(args);
  args.scores = &scores.view();
  args.out = &out.view();
  measure("typed_two_launches", [&] { tilekernels::check(tk_demo_topk(&args, nullptr)); });

  const tk_kernel* transpose = nullptr;
  tilekernels::check(tk_find("demo.transpose", &transpose));
  const Tensor x(data, tilekernels::kBfloat16, {100, 200}, {203, 1});
  const Tensor x_out = Tensor::dense(data, tilekernels::kBfloat16, {200, 100});
  const tk_tensor* const tensors[] = {&x.view(), &x_out.view()};
  measure("by_name_one_launch", [&] { tilekernels::check(tk_launch(transpose, tensors, nullptr, nullptr, nullptr)); });
  measure("check", [&] { tilekernels::check(tk_check(transpose, tensors, nullptr, nullptr)); });

  const tk_kernel* sync = nullptr;
  tilekernels::check(tk_find("demo.sync", &sync));
  const Tensor workspace = Tensor::dense(data, tilekernels::kFloat32, {100});
  const tk_tensor* const sync_tensors[] = {&workspace.view()};
  const tk_scalar num_sms = {.i32 = 8};
  const int32_t num_stages = 16;
  measure("cooperative", [&] { tilekernels::check(tk_launch(sync, sync_tensors, &num_sms, &num_stages, nullptr)); });
}
