// Element by element conversions between bf16, fp32, fp16 and e4m3, and stochastic rounding to bf16 and e4m3. N counts
// elements.
#pragma once

#include "cast_back.cuh"

namespace tk {

struct Fp16 {};

// ---- sources as fp32, exact ----------------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void load_values(Fp32, const void* source, float* values) {
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = static_cast<const float*>(source)[i];
}

template <int N>
__device__ __forceinline__ void load_values(Bf16, const void* source, float* values) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const uint32_t word = static_cast<const uint32_t*>(source)[i];
    values[2 * i] = float_of(word << 16);
    values[2 * i + 1] = float_of(word & 0xffff0000u);
  }
}

template <int N>
__device__ __forceinline__ void load_values(Fp16, const void* source, float* values) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float2 pair = __half22float2(static_cast<const __half2*>(source)[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

// ---- targets: rounded to nearest even ------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void store_values(Fp16, const float* values, void* target) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    static_cast<__half2*>(target)[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
}

template <int N>
__device__ __forceinline__ void store_values(E4m3, const float* values, void* target) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) static_cast<uint32_t*>(target)[i] = encode_e4m3x4(values + 4 * i);
}

template <typename Source, typename Target, int N>
__device__ __forceinline__ void cast_values(const void* source, void* target) {
  float values[N];
  load_values<N>(Source{}, source, values);
  store_values<N>(Target{}, values, target);
}

// ---- stochastic rounding: `group` is the place of the first four elements, divided by four
// ---------------------------

// The hash of four neighbours that random words are made of by one more multiplication.
__device__ __forceinline__ uint32_t stochastic_hash(const float* values, uint32_t group) {
  uint32_t hash = bits_of(values[0]) * 0x5671d42bu + bits_of(values[1]) * 0x9995e499u +
                  bits_of(values[2]) * 0xace1b8a5u + bits_of(values[3]) * 0xe153538du + group;
  hash ^= hash >> 23;
  hash *= 0x7feb352du;
  return hash ^ (hash >> 16);
}

// One bf16: 16 random bits added to the 16 that are dropped. Saturates; NaN becomes 0x7fff.
__device__ __forceinline__ uint32_t encode_bf16_stochastic(float value, uint32_t random) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  return min((magnitude + random) >> 16, 0x7f7fu) | ((bits >> 16) & 0x8000u);
}

template <int N>
__device__ __forceinline__ void store_stochastic(Bf16, const float* values, void* target, uint32_t group) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float* four = values + 4 * i;
    const uint32_t hash = stochastic_hash(four, group + i);
    uint32_t* words = static_cast<uint32_t*>(target) + 2 * i;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t random = hash * (pair == 0 ? 0x846ca68bu : 0xd35a2d97u);
      random ^= random >> 11;
      words[pair] = encode_bf16_stochastic(four[2 * pair], random & 0xffffu) |
                    (encode_bf16_stochastic(four[2 * pair + 1], random >> 16) << 16);
    }
  }
}

template <int N>
__device__ __forceinline__ void store_stochastic(E4m3, const float* values, void* target, uint32_t group) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i)
    static_cast<uint32_t*>(target)[i] = encode_stochastic_x4<true>(values + 4 * i, group + i);
}

template <typename Source, typename Target, int N>
__device__ __forceinline__ void cast_values_stochastic(const void* source, void* target, uint32_t group) {
  float values[N];
  load_values<N>(Source{}, source, values);
  store_stochastic<N>(Target{}, values, target, group);
}

}  // namespace tk
