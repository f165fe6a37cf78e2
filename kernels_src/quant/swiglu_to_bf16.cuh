// SwiGLU that ends in bf16: gate / (1 + exp(-gate)) * value, each step rounded to fp32 and the result to bf16, exactly.
// The division is the most expensive step, and its last bits are lost in bf16: a product with an approximate reciprocal
// gives the same bf16 number, unless it lies beside the middle of two. Only then everything is computed once more.
#pragma once

#include <cuda_bf16.h>
#include <cstdint>

namespace tk {

__device__ __forceinline__ float swiglu_exact(float gate, float value) {
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate))), value);
}

// The smaller one; NaN stays.
__device__ __forceinline__ float clamp_above(float value, float limit) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(value), "f"(limit));
  return result;
}

__device__ __forceinline__ float reciprocal_approximate(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// kCount pairs of bf16. `clamp` bounds gates above and values on both sides; infinity bounds nothing.
//
// The approximate reciprocal is off by at most 2^-23 of itself, which with the roundings of both products makes less
// than 1.5 * 2^-22 of the result: six units in the last place. kNear takes eight. Reciprocals of numbers above 2^126
// are flushed to zero, so gates below -80 are computed exactly too.
template <int kCount>
__device__ __forceinline__ void swiglu_to_bf16(const void* gates, const void* values, float clamp, void* target) {
  constexpr uint32_t kNear = 8;
  const uint32_t* gate_words = static_cast<const uint32_t*>(gates);
  const uint32_t* value_words = static_cast<const uint32_t*>(values);
  uint32_t* out = static_cast<uint32_t*>(target);
  float gate[2 * kCount], value[2 * kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    gate[2 * i] = __uint_as_float(gate_words[i] << 16);
    gate[2 * i + 1] = __uint_as_float(gate_words[i] & 0xffff0000u);
    value[2 * i] = __uint_as_float(value_words[i] << 16);
    value[2 * i + 1] = __uint_as_float(value_words[i] & 0xffff0000u);
  }
  if (clamp < INFINITY) {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      gate[i] = clamp_above(gate[i], clamp);
      value[i] = -clamp_above(-clamp_above(value[i], clamp), clamp);
    }
  }
  float lowest = gate[0];
  uint32_t closest = 0xffffffffu;  // distance of the dropped halves from the middle, plus kNear, modulo 2^16
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float result[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float silu = gate[2 * i + j] * reciprocal_approximate(__fadd_rn(1.0f, expf(-gate[2 * i + j])));
      result[j] = __fmul_rn(silu, value[2 * i + j]);
      lowest = fminf(lowest, gate[2 * i + j]);
    }
    const uint32_t dropped = __byte_perm(__float_as_uint(result[0]), __float_as_uint(result[1]), 0x5410);
    closest = __viaddmin_u16x2(dropped, (0x8000u + kNear) * 0x10001u, closest);
    out[i] = pack_bf16(result[0], result[1]);
  }
  if (min(closest & 0xffffu, closest >> 16) <= 2 * kNear || lowest < -80.0f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      out[i] = pack_bf16(swiglu_exact(gate[2 * i], value[2 * i]), swiglu_exact(gate[2 * i + 1], value[2 * i + 1]));
  }
}

}  // namespace tk
