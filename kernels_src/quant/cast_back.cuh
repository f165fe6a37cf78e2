// The way back: a thread's quantised channels times their scales, as bf16 or fp32. N counts channels.
#pragma once

#include "cast.cuh"
#include "scale.cuh"

namespace tk {

// The bits of a scale of a block that is one channel wide: a packed word holds four neighbouring rows of blocks.
__device__ __forceinline__ uint32_t load_channel_scale(const void* base, int64_t row_stride, int64_t column_stride,
                                                       int row, int column, int kind) {
  if (kind != kScalePacked) return load_scale(base, row_stride, column_stride, row, column, kind);
  const int64_t element = (row >> 2) * row_stride + column * column_stride;
  return static_cast<const uint8_t*>(base)[4 * element + (row & 3)];
}

// ---- stored channels as fp32 ---------------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void load_values(E4m3, const void* source, float* values) {
  const uint32_t* words = static_cast<const uint32_t*>(source);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float2 pair = __half22float2(decode_e4m3x2((words[i / 2] >> (16 * (i % 2))) & 0xffffu));
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

template <int N>
__device__ __forceinline__ void load_values(E2m1, const void* source, float* values) {
  float eight[8];
  if (N == 4) {
    decode_e2m1x8(*static_cast<const uint16_t*>(source), eight);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = eight[i];
  } else {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) decode_e2m1x8(static_cast<const uint32_t*>(source)[i], values + 8 * i);
  }
}

// Each code becomes the twelve high bits of an fp16 number.
template <int N>
__device__ __forceinline__ void load_values(E5m6, const void* source, float* values) {
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    const uint32_t* words = static_cast<const uint32_t*>(source) + 3 * block;
    const uint32_t halves[8] = {words[0] >> 16, words[0] >> 4, __funnelshift_l(words[1], words[0], 8),
                                words[1] >> 12, words[1],      __funnelshift_l(words[2], words[1], 12),
                                words[2] >> 8,  words[2] << 4};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      values[8 * block + i] = __half2float(__ushort_as_half(static_cast<unsigned short>(halves[i] & 0xfff0u)));
  }
}

// ---- values as the output holds them -------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void store_values(Bf16, const float* values, void* target) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    static_cast<__nv_bfloat162*>(target)[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
}

template <int N>
__device__ __forceinline__ void store_values(Fp32, const float* values, void* target) {
#pragma unroll
  for (int i = 0; i < N; ++i) static_cast<float*>(target)[i] = values[i];
}

// Target = source * scale, one product in fp32, then rounded.
template <typename Source, typename Target, int N>
__device__ __forceinline__ void cast_back(const void* source, void* target, float scale) {
  float values[N];
  load_values<N>(Source{}, source, values);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] *= scale;
  store_values<N>(Target{}, values, target);
}

// The same where each channel has a scale of its own.
template <typename Source, typename Target, int N>
__device__ __forceinline__ void cast_back_channels(const void* source, void* target, const float* scales) {
  float values[N];
  load_values<N>(Source{}, source, values);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] *= scales[i];
  store_values<N>(Target{}, values, target);
}

}  // namespace tk
