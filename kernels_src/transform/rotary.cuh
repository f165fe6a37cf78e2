// The rotation of a thread's pairs of one head, in registers.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

namespace tk {

__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void assign(float& target, float value) { target = value; }
__device__ __forceinline__ void assign(__nv_bfloat16& target, float value) { target = __float2bfloat16_rn(value); }

__device__ __forceinline__ int64_t load_position(const void* positions, int64_t at, bool is_long) {
  return is_long ? static_cast<const int64_t*>(positions)[at] : int64_t{static_cast<const int32_t*>(positions)[at]};
}

// values: kPairs numbers of the first piece, then of the second; a pair is one of each, or two neighbours where it is
// interleaved. angles: cosines, then sines. Of each result one product is rounded, the other fused into the sum.
template <typename Value, bool kInterleaved, int kPairs>
__device__ __forceinline__ void rotate(void* numbers, const float* angles, bool conjugate) {
  Value* values = static_cast<Value*>(numbers);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    Value& first = values[kInterleaved ? 2 * i : i];
    Value& second = values[kInterleaved ? 2 * i + 1 : kPairs + i];
    const float a = as_float(first), b = as_float(second), cosine = angles[i];
    const float sine = conjugate ? -angles[kPairs + i] : angles[kPairs + i];
    assign(first, __fmaf_rn(a, cosine, -__fmul_rn(b, sine)));
    assign(second, __fmaf_rn(a, sine, __fmul_rn(b, cosine)));
  }
}

}  // namespace tk
