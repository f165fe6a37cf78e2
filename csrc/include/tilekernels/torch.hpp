// Views of at::Tensor, for programs that have libtorch. Nothing of the library needs this header, and no other header
// includes it: it is there for those who include it and have torch's headers on their path.
//
//   const auto scores = tilekernels::from_torch(scores_tensor);
//   args.scores = scores;
//   tilekernels::check(tk_moe_topk_gate(&args, at::cuda::getCurrentCUDAStream()));   // in the context of its device
#ifndef TILEKERNELS_TORCH_HPP_
#define TILEKERNELS_TORCH_HPP_

#include <ATen/core/Tensor.h>

#include "tilekernels/tilekernels.hpp"

namespace tilekernels {

inline tk_dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kBool: return kBool;
    case at::kChar: return kInt8;
    case at::kShort: return kInt16;
    case at::kInt: return kInt32;
    case at::kLong: return kInt64;
    case at::kByte: return kUint8;
    case at::kUInt16: return kUint16;
    case at::kUInt32: return kUint32;
    case at::kHalf: return kFloat16;
    case at::kBFloat16: return kBfloat16;
    case at::kFloat: return kFloat32;
    case at::kDouble: return kFloat64;
    case at::kFloat8_e4m3fn: return kFloat8E4m3fn;
    case at::kFloat8_e5m2: return kFloat8E5m2;
    case at::ScalarType::Float8_e8m0fnu: return kFloat8E8m0fnu;
    case at::ScalarType::Float4_e2m1fn_x2: return kFloat4E2m1fnX2;
    default: refuse(std::string("tilekernels::from_torch: no kernel takes tensors of ") + at::toString(type));
  }
}

// A view of the tensor's memory: keep the tensor until the call has returned, and as long as torch wants it for work on
// a stream. No gradient is recorded.
inline Tensor from_torch(const at::Tensor& tensor) {
  const at::Device device = tensor.device();
  if (!device.is_cuda() && !device.is_cpu()) {
    refuse("tilekernels::from_torch: must be a tensor on a CUDA device or the CPU, got one on " + device.str());
  }
  const tk_device place = {device.is_cuda() ? TK_CUDA : TK_CPU, device.is_cuda() ? device.index() : 0};
  const Dims shape(tensor.sizes().data(), tensor.sizes().size());
  const Dims strides(tensor.strides().data(), tensor.strides().size());
  return Tensor(tensor.data_ptr(), dtype_of(tensor.scalar_type()), shape, strides, place);
}

}  // namespace tilekernels

#endif  // TILEKERNELS_TORCH_HPP_
