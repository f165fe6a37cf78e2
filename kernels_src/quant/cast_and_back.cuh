// A thread's channels rounded to the numbers of a format, in place.
#pragma once

#include "cast.cuh"

namespace tk {

// The number of e2m1 nearest to a value, NaN counts as 6. Adding 2^22 times the power of two at or below the magnitude,
// at least one, leaves one bit after it, and half steps below one.
__device__ __forceinline__ float round_to_e2m1(float value) {
  const float magnitude = fminf(fabsf(value), 6.0f);
  const float offset = float_of(max(bits_of(magnitude) & 0x7f800000u, bits_of(1.0f)) + (22u << 23));
  return copysignf(__fsub_rn(__fadd_rn(magnitude, offset), offset), value);
}

__device__ __forceinline__ void round_x8(E2m1, float* values) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = round_to_e2m1(values[i]);
}

__device__ __forceinline__ void round_x8(E4m3, float* values) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float2 pair = __half22float2(decode_e4m3x2(encode_e4m3x2(values[i], values[i + 1])));
    values[i] = pair.x;
    values[i + 1] = pair.y;
  }
}

__device__ __forceinline__ void put_x8(Bf16, const float* values, int block, uint32_t* words) {
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(words) + 4 * block;
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
}

__device__ __forceinline__ void put_x8(Fp32, const float* values, int block, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < 8; ++i) words[8 * block + i] = bits_of(values[i]);
}

// Channels become round(channel * inverse) * scale.
template <typename Source, typename Format, int N>
__device__ __forceinline__ void cast_and_back(void* channels, float inverse, float scale) {
  uint32_t* words = static_cast<uint32_t*>(channels);
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    float values[8];
    load_x8(Source{}, words, block, inverse, values);
    round_x8(Format{}, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] *= scale;
    put_x8(Source{}, values, block, words);
  }
}

}  // namespace tk
