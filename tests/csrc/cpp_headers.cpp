// The C++ headers without a driver: views, their conversions and refusals, and the layouts of quant.hpp as a table, one
// line a case, for test_cpp_headers.py. Compiled once more without exceptions.
#include <cstdio>
#include <cstring>

#include "tilekernels/ops.h"
#include "tilekernels/quant.hpp"

namespace {

using namespace tilekernels;

// As in dlpack.h.
struct DLDevice {
  enum Type { kDLCPU = 1, kDLCUDA = 2 } device_type;
  int32_t device_id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

int num_wrong = 0;

void expect(bool right, const char* what) {
  if (!right) std::printf("wrong: %s\n", what);
  num_wrong += !right;
}

void try_views() {
  void* const data = &num_wrong;
  const Tensor dense = Tensor::dense(data, kFloat16, {2, 3, 4});
  const tk_tensor* view = dense;
  expect(view->ndim == 3 && view->strides[0] == 12 && view->strides[1] == 4 && view->strides[2] == 1, "dense strides");
  expect(view->data == data && view->device.device_type == TK_CUDA, "place");
  Tensor copy(nullptr, kInt8, std::vector<int64_t>{5}, {2}, {TK_CPU, 0});
  copy = dense;
  expect(copy.view().shape != dense.view().shape && copy.view().shape[2] == 4, "a copy has its own shape");

  int64_t shape[] = {3, 7}, strides[] = {9, 1};
  DLTensor foreign = {data, {DLDevice::kDLCUDA, 1}, 2, {TK_BFLOAT, 16, 1}, shape, strides, 32};
  const Tensor strided = Tensor::from_dlpack(foreign);
  expect(strided.strides()[0] == 9 && strided.view().byte_offset == 32 && strided.view().device.device_id == 1,
         "dlpack");
  foreign.strides = nullptr;
  expect(Tensor::from_dlpack(foreign).strides()[0] == 7, "dlpack without strides");

  expect(make_args<tk_demo_topk_args>().size == sizeof(tk_demo_topk_args), "args");
  auto info = make_args<tk_workspace_info>();
  info.dtype = kInt32, info.ndim = 2, info.shape[0] = 3, info.shape[1] = 5;
  expect(make_workspace(data, info).strides()[0] == 5, "workspace");
  expect(size_of(kFloat4E2m1fnX2) == 1 && size_of(kBfloat16) == 2 && size_of(kBool) == 1, "sizes");
}

void try_status() {
  auto args = make_args<tk_demo_topk_args>();
  const Status status = tk_demo_topk(&args, nullptr);
  expect(!status && status.code() == TK_INVALID_TYPE && std::strcmp(status.name(), "TK_INVALID_TYPE") == 0, "status");
  expect(status.message() == "demo.topk: scores must be a tensor, got None", "message");
  expect(bool(Status(TK_OK)) && Status(TK_OK).message().empty(), "no failure");
}

#if TILEKERNELS_EXCEPTIONS
template <typename Call>
void show_refusal(Call call) {
  try {
    call();
    expect(false, "must be refused");
  } catch (const std::exception& error) {
    std::printf("refused: %s\n", error.what());
  }
}

void try_refusals() {
  show_refusal([] { Tensor(nullptr, kInt8, {1, 2}, {1}); });
  show_refusal([] { Dims{1, 1, 1, 1, 1, 1, 1, 1, 1}; });
  show_refusal([] { check(tk_demo_topk(nullptr, nullptr)); });
}
#else
void try_refusals() {}
#endif

void show_layouts() {
  for (const ScaleType type : {ScaleType::float32, ScaleType::packed, ScaleType::e4m3}) {
    for (const ScaleOrder order : {ScaleOrder::row_major, ScaleOrder::col_major}) {
      for (const int64_t rows : {1, 7, 16, 130}) {
        for (const int64_t groups : {1, 3, 4, 56}) {
          const Tensor sf = make_scales(nullptr, type, order, rows, groups);
          std::printf("layout %d %d %d %d: %d %d %d %d %d\n", static_cast<int>(type), static_cast<int>(order),
                      static_cast<int>(rows), static_cast<int>(groups), static_cast<int>(sf.shape()[0]),
                      static_cast<int>(sf.shape()[1]), static_cast<int>(sf.strides()[0]),
                      static_cast<int>(sf.strides()[1]),
                      static_cast<int>(layout_scales(type, order, rows, groups).num_bytes));
        }
      }
    }
  }
  for (const Format format : {Format::e4m3, Format::e2m1, Format::e5m6}) {
    const Tensor data = make_data(nullptr, format, 3, 64);
    std::printf("data %d: %d bits of code %d, %d\n", static_cast<int>(format), data.dtype().bits, data.dtype().code,
                static_cast<int>(data.shape()[1]));
  }
}

}  // namespace

int main() {
  try_views();
  try_status();
  try_refusals();
  show_layouts();
  return num_wrong != 0;
}
