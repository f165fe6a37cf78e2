// What a program may hand over by mistake: null pointers, structs of a wrong size, sizes and strides that no tensor
// has, values of no enumerator, addresses between elements. Prints the status and the sentence of each call, for
// test_misuse.py, which runs it under the sanitizers too: none may crash or be undefined.
#include <cstdio>
#include <cstring>
#include <string>

#include "tilekernels/ops.h"

namespace {

const tk_kernel* find(const char* name) {
  const tk_kernel* kernel = nullptr;
  tk_find(name, &kernel);
  return kernel;
}

void show(const char* what, tk_status status) {
  std::printf("%s: %s: %s\n", what, tk_status_name(status), status == TK_OK ? "" : tk_last_error());
}

constexpr int64_t kHuge = INT64_MAX;

// A valid call of demo.topk and demo.transpose; each case changes one thing.
struct Topk {
  int64_t scores_shape[2] = {6, 64}, out_shape[2] = {6, 4};
  tk_tensor scores = {reinterpret_cast<void*>(0x10000), {TK_CUDA, 0}, 2, {TK_FLOAT, 32, 1}, scores_shape, nullptr, 0};
  tk_tensor out = {reinterpret_cast<void*>(0x20000), {TK_CUDA, 0}, 2, {TK_INT, 64, 1}, out_shape, nullptr, 0};
  // With room behind it, as a struct of a newer header has.
  struct Newer {
    tk_demo_topk_args known;
    uint64_t unknown[4];
  } args = {};

  Topk() {
    args.known.size = sizeof(args.known);
    args.known.scores = &scores;
    args.known.out = &out;
  }
  void show_call(const char* what) { show(what, tk_demo_topk(&args.known, nullptr)); }
  void show_check(const char* what) {
    const tk_tensor* const tensors[] = {&scores, nullptr, &out};
    const tk_scalar scalars[] = {{1.0f}};
    const int32_t axes[] = {0, 0};
    show(what, tk_check(find("demo.topk"), tensors, scalars, axes));
  }
};

struct Transpose {
  int64_t x_shape[2] = {100, 200}, x_strides[2] = {200, 1}, out_shape[2] = {200, 100};
  tk_tensor x = {reinterpret_cast<void*>(0x10000), {TK_CUDA, 0}, 2, {TK_BFLOAT, 16, 1}, x_shape, x_strides, 0};
  tk_tensor out = {reinterpret_cast<void*>(0x20000), {TK_CUDA, 0}, 2, {TK_BFLOAT, 16, 1}, out_shape, nullptr, 0};

  void show_call(const char* what) {
    const tk_tensor* const tensors[] = {&x, &out};
    show(what, tk_launch(find("demo.transpose"), tensors, nullptr, nullptr, nullptr));
  }
};

void hand_over_null() {
  const tk_kernel* kernel = find("demo.topk");
  const tk_tensor* const none[] = {nullptr, nullptr, nullptr};
  const tk_scalar scalars[] = {{1.0f}};
  const int32_t axes[] = {0, 0};
  tk_kernel_info described = {};
  const char* names[] = {nullptr};
  show("find, no name", tk_find(nullptr, &kernel));
  show("find, no place", tk_find("demo.topk", nullptr));
  kernel = find("demo.topk");
  show("launch, no tensors", tk_launch(kernel, nullptr, scalars, axes, nullptr));
  show("launch, no scalars", tk_launch(kernel, none, nullptr, axes, nullptr));
  show("launch, no axes", tk_launch(kernel, none, scalars, nullptr, nullptr));
  show("launch, null tensors", tk_launch(kernel, none, scalars, axes, nullptr));
  show("check, no tensors", tk_check(kernel, nullptr, scalars, axes));
  show("workspace, no kernel", tk_workspace_size(nullptr, 0, none, scalars, axes, 0, nullptr));
  show("workspace, no tensors", tk_workspace_size(kernel, 0, nullptr, scalars, axes, 0, nullptr));
  show("preload, null name", tk_preload(names, 1, 0));
  show("preload, negative", tk_preload(names, -1, 0));
  show("load pack", tk_load_pack(nullptr));
  show("enter without a place", tk_enter_device(0, nullptr));
  show("driver version", tk_driver_version(nullptr));
  show("devices", tk_num_devices(nullptr));
  show("describe device", tk_describe_device(0, nullptr));
  show("describe kernel", tk_describe_kernel(nullptr, &described));
  show("describe param", tk_describe_param(nullptr, 0, nullptr));
  show("describe axis", tk_describe_axis(nullptr, 0, nullptr));
  show("describe variant", tk_describe_variant(nullptr, 0, nullptr));
  show("info without a size", tk_describe_kernel(kernel, &described));
  show("index", tk_describe_param(kernel, -1, nullptr));
  std::printf("answers: %d %d %d %d\n", tk_param_dtype(nullptr, 0, 0) == nullptr, tk_covers(nullptr, nullptr, nullptr),
              tk_kernel_at(-1) == nullptr, tk_arch_at(1000) == nullptr);
}

void hand_over_sizes() {
  show("args, null", tk_demo_topk(nullptr, nullptr));
  const size_t known = sizeof(tk_demo_topk_args);
  const size_t sizes[] = {0, 4, 8, known - 4, known + 8, known + 12, ~size_t{0}};
  for (const size_t size : sizes) {
    Topk topk;
    topk.args.known.size = size;
    topk.show_call(("args of " + std::to_string(size)).c_str());
  }
  Topk newer;
  newer.args.known.size = sizeof(newer.args);
  newer.show_call("args of a newer header");
  newer.args.unknown[3] = 1;
  newer.show_call("args of a newer header, a new field set");
}

void hand_over_shapes() {
  Topk topk;
  topk.scores.shape = nullptr;
  topk.show_check("no shape");
  topk.show_call("no shape, launched");
  topk = Topk();
  for (const int32_t ndim : {-1, 9, 1000000}) {
    Topk other;
    other.scores.ndim = ndim;
    other.show_call(("dimensions " + std::to_string(ndim)).c_str());
  }
  for (const int64_t size : {int64_t{-1}, int64_t{1} << 31, INT64_MIN}) {
    Transpose transpose;
    transpose.x_shape[0] = transpose.out_shape[1] = size;
    transpose.show_call(("size " + std::to_string(size)).c_str());
    transpose = Transpose();
    transpose.x.shape = transpose.x_shape, transpose.x.strides = transpose.x_strides;
    transpose.out.shape = transpose.out_shape;
    transpose.x_strides[0] = size;
    transpose.show_call(("stride " + std::to_string(size)).c_str());
  }
  Transpose overflow;
  overflow.x.strides = nullptr;
  overflow.x_shape[0] = overflow.x_shape[1] = overflow.out_shape[0] = overflow.out_shape[1] = kHuge;
  overflow.show_call("all sizes huge");
  overflow.x_shape[0] = overflow.x_shape[1] = overflow.out_shape[0] = overflow.out_shape[1] = INT32_MAX;
  overflow.show_call("each size possible, all of them not");
}

void hand_over_values() {
  Topk topk;
  const int unknown = 77;
  std::memcpy(&topk.args.known.scoring, &unknown, sizeof(unknown));
  topk.show_call("enumerator");
  Topk flag;
  flag.args.known.with_bias = 2;
  flag.show_call("flag");
  Topk dtype;
  dtype.scores.dtype = {255, 255, 65535};
  dtype.show_call("dtype");
  Topk device;
  device.scores.device = device.out.device = {99, 0};
  device.show_call("device type");
  device.scores.device = device.out.device = {TK_CUDA, -5};
  device.show_call("device number");
  Transpose odd;
  odd.x.data = reinterpret_cast<void*>(0x10001);
  odd.show_call("address between elements");
  odd.x.data = reinterpret_cast<void*>(0x10000);
  odd.x.byte_offset = 3;
  odd.show_call("byte offset between elements");
  tk_pdl_mode strange;
  std::memcpy(&strange, &unknown, sizeof(unknown));
  tk_set_thread_pdl(strange);
  std::printf("pdl mode: %d\n", static_cast<int>(tk_set_thread_pdl(TK_PDL_DEFAULT)));
  std::printf("status: %s\n", tk_status_name(static_cast<tk_status>(13)));
}

}  // namespace

int main() {
  hand_over_null();
  void* previous = nullptr;
  show("enter", tk_enter_device(0, &previous));
  Topk topk;
  topk.show_call("valid");
  hand_over_sizes();
  hand_over_shapes();
  hand_over_values();
  Topk again;
  again.show_call("valid");
  return 0;
}
