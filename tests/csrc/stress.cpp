// Everything that threads may do with the library at the same time, from its first use on: launches by name and typed,
// in two contexts and on two devices, checks, preloads, questions, and failures with their messages. Prints "right".
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "tilekernels/ops.h"
#include "tilekernels/tilekernels.hpp"

namespace {

using tilekernels::Tensor;

constexpr int kThreads = 32, kRounds = 30;

std::atomic<int> num_waiting{kThreads};
std::atomic<bool> failed{false};

void expect(tk_status status, tk_status wanted, const char* text = "") {
  if (status == wanted && std::strstr(tk_last_error(), text) != nullptr) return;
  failed = true;
  std::fprintf(stderr, "%s: %s\n", tk_status_name(status), tk_last_error());
}

void launch(int device) {
  void* const data = reinterpret_cast<void*>(0x10000);
  const tk_device place = {TK_CUDA, device};
  const Tensor scores = Tensor::dense(data, tilekernels::kFloat32, {6, 64}, place);
  const Tensor out = Tensor::dense(data, tilekernels::kInt64, {6, 4}, place);
  auto args = tilekernels::make_args<tk_demo_topk_args>();
  args.scores = scores;
  args.out = out;
  expect(tk_demo_topk(&args, nullptr), TK_OK);

  const tk_kernel* transpose = nullptr;
  expect(tk_find("demo.transpose", &transpose), TK_OK);
  const Tensor x(data, tilekernels::kBfloat16, {100, 200}, {208, 1}, place);
  const Tensor x_out = Tensor::dense(data, tilekernels::kBfloat16, {200, 100}, place);
  const tk_tensor* const tensors[] = {x, x_out};
  expect(tk_launch(transpose, tensors, nullptr, nullptr, nullptr), TK_OK);
  expect(tk_check(transpose, tensors, nullptr, nullptr), TK_OK);

  const tk_kernel* sync = nullptr;
  expect(tk_find("demo.sync", &sync), TK_OK);
  const Tensor workspace = Tensor::dense(data, tilekernels::kFloat32, {100}, place);
  const tk_tensor* const sync_tensors[] = {workspace};
  const tk_scalar num_sms = {.i32 = 8};
  const int32_t num_stages = 16;
  expect(tk_launch(sync, sync_tensors, &num_sms, &num_stages, nullptr), TK_OK);
}

// Each thread has its own message.
void fail(int index) {
  const std::string name = "demo.number" + std::to_string(index);
  const tk_kernel* kernel = nullptr;
  expect(tk_find(name.c_str(), &kernel), TK_NOT_BUILT, (name + ":").c_str());
}

void ask(int device) {
  auto info = tilekernels::make_args<tk_device_info>();
  expect(tk_describe_device(device, &info), TK_OK);
  failed = failed || !tilekernels::covers("demo.sync", "sm_90a") || tilekernels::variants("demo.topk").size() != 1;
}

void work(int index) {
  --num_waiting;
  while (num_waiting > 0) std::this_thread::yield();
  const int device = index % 2;
  void* previous = nullptr;
  expect(tk_enter_device(device, &previous), TK_OK);
  for (int round = 0; round < kRounds; ++round) {
    launch(device);
    fail(index);
    ask(device);
    if (round % 10 == index % 10) expect(tk_preload(nullptr, 0, device), TK_OK);
  }
  expect(tk_leave_device(previous), TK_OK);
}

}  // namespace

int main() {
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) threads.emplace_back(work, index);
  for (std::thread& thread : threads) thread.join();
  std::puts(failed ? "wrong" : "right");
  return failed ? 1 : 0;
}
