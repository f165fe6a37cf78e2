// From the parts of pre-norm's product to mixes, for every kernel that does it, so that all give the same bits.
#pragma once

#include <cstdint>

#include "scoring.cuh"

namespace tk {

// The sum of num_parts numbers that lie `stride` apart, first to last.
__device__ __forceinline__ float sum_parts(const float* parts, int64_t stride, int num_parts) {
  float total = 0.0f;
#pragma unroll 8
  for (int i = 0; i < num_parts; ++i) total = sum(total, parts[i * stride]);
  return total;
}

// 1 / sqrt(sqrsum / size + eps)
__device__ __forceinline__ float rms_factor(float sqrsum, int size, float eps) {
  return __frsqrt_rn(sum(quotient(sqrsum, static_cast<float>(size)), eps));
}

// Add one more group's share to a mix, which starts at zero.
__device__ __forceinline__ float add_group(float mix, float out_mul, float factor) {
  return sum(mix, product(out_mul, factor));
}

// The gradient of sqrsum; `dot` is the sum over the columns of the gradient times out_mul.
__device__ __forceinline__ float sqrsum_grad(float dot, float factor, float sqrsum, int size, float eps) {
  const float squares = sum(sqrsum, product(eps, static_cast<float>(size)));
  return product(-0.5f, quotient(product(dot, factor), squares));
}

}  // namespace tk
