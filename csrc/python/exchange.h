// The part of DLPack 1.x that reads a tensor without owning it, as the array library publishes it in the capsule
// `torch.Tensor.__dlpack_c_exchange_api__`. Declared here so that the module needs no header of torch.
#pragma once

#include <cstdint>

#include "tilekernels/tilekernels.h"

namespace tk::python {

constexpr const char* kExchangeCapsule = "dlpack_exchange_api";
constexpr uint32_t kExchangeMajor = 1;

struct ExchangeVersion {
  uint32_t major, minor;
};

struct ExchangeHeader {
  ExchangeVersion version;
  ExchangeHeader* prev_api;  // the table of an older major version, or null
};

// A DLTensor has the layout of tk_tensor; its shape and strides belong to the tensor that was read.
struct ExchangeApi {
  ExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, tk_tensor* view);  // -1: a Python error is set
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** current_stream);  // the same
};

}  // namespace tk::python
