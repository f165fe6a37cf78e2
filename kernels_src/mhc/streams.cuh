// Mixing of residual streams, for every kernel that does it, so that all give the same bits. Channels of a thread lie
// in registers as bf16, stream after stream; sums are fp32 fused multiply-adds in the order of the streams, rounded
// once.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace tk {

// Channel i of packed bf16: half a word each.
__device__ __forceinline__ float channel(const uint32_t* words, int i) {
  return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
}

// kCount channels in fp32. A single one is not packed.
template <int kCount>
__device__ __forceinline__ void unpack_channels(const void* source, float* target) {
  if constexpr (kCount == 1) {
    target[0] = __bfloat162float(*static_cast<const __nv_bfloat16*>(source));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) target[i] = channel(static_cast<const uint32_t*>(source), i);
  }
}

// To nearest, ties to even.
template <int kCount>
__device__ __forceinline__ void pack_channels(const float* source, void* target) {
  if constexpr (kCount == 1) {
    *static_cast<__nv_bfloat16*>(target) = __float2bfloat16_rn(source[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      static_cast<__nv_bfloat162*>(target)[i / 2] = __floats2bfloat162_rn(source[i], source[i + 1]);
    }
  }
}

// out = the sum of mix[i] * x[i] over the streams, from 0 on.
template <int kStreams, int kCount>
__device__ __forceinline__ void apply_mix(const void* x, const float* mix, void* out) {
  float total[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) total[j] = 0.0f;
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    float stream[kCount];
    unpack_channels<kCount>(static_cast<const __nv_bfloat16*>(x) + i * kCount, stream);
#pragma unroll
    for (int j = 0; j < kCount; ++j) total[j] = __fmaf_rn(mix[i], stream[j], total[j]);
  }
  pack_channels<kCount>(total, out);
}

// out[o] = post[o] * x, then plus comb[i][o] * residual[i] for each stream i. out may be residual.
template <int kStreams, int kCount>
__device__ __forceinline__ void post_streams(const void* x, const void* residual, const float* post, const float* comb,
                                             void* out) {
  float layer[kCount];
  float streams[kStreams][kCount];
  unpack_channels<kCount>(x, layer);
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    unpack_channels<kCount>(static_cast<const __nv_bfloat16*>(residual) + i * kCount, streams[i]);
  }
#pragma unroll
  for (int o = 0; o < kStreams; ++o) {
    float total[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) total[j] = __fmul_rn(post[o], layer[j]);
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) total[j] = __fmaf_rn(comb[i * kStreams + o], streams[i][j], total[j]);
    }
    pack_channels<kCount>(total, static_cast<__nv_bfloat16*>(out) + o * kCount);
  }
}

// sums[i] += <grad, x[i]>; x_grad[i] += mix[i] * grad, rounded to bf16.
template <int kStreams, int kCount>
__device__ __forceinline__ void apply_mix_backward(const void* grad, const void* x, const float* mix, void* x_grad,
                                                   float* sums) {
  float g[kCount];
  unpack_channels<kCount>(grad, g);
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    float stream[kCount];
    unpack_channels<kCount>(static_cast<const __nv_bfloat16*>(x) + i * kCount, stream);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[i] = __fmaf_rn(g[j], stream[j], sums[i]);
    __nv_bfloat16* target = static_cast<__nv_bfloat16*>(x_grad) + i * kCount;
    unpack_channels<kCount>(target, stream);
#pragma unroll
    for (int j = 0; j < kCount; ++j) stream[j] = __fmaf_rn(mix[i], g[j], stream[j]);
    pack_channels<kCount>(stream, target);
  }
}

// The gradients of post_streams for kCount channels: x_grad and residual_grad, which may be x and residual, from 0 on
// in the order of the output streams; and sums[o] += <x, grad[o]>, sums[kStreams + i * kStreams + o] += <residual[i],
// grad[o]>.
template <int kStreams, int kCount>
__device__ __forceinline__ void post_streams_backward(const void* grad, const void* x, const void* residual,
                                                      const float* post, const float* comb, void* x_grad,
                                                      void* residual_grad, float* sums) {
  float g[kStreams][kCount];
#pragma unroll
  for (int o = 0; o < kStreams; ++o) {
    unpack_channels<kCount>(static_cast<const __nv_bfloat16*>(grad) + o * kCount, g[o]);
  }
#pragma unroll
  for (int i = -1; i < kStreams; ++i) {
    // Stream -1 is x, whose mix is post
    const __nv_bfloat16* source = static_cast<const __nv_bfloat16*>(i < 0 ? x : residual) + (i < 0 ? 0 : i * kCount);
    __nv_bfloat16* target = static_cast<__nv_bfloat16*>(i < 0 ? x_grad : residual_grad) + (i < 0 ? 0 : i * kCount);
    const float* mix = i < 0 ? post : comb + i * kStreams;
    float stream[kCount];
    float total[kCount];
    unpack_channels<kCount>(source, stream);
#pragma unroll
    for (int j = 0; j < kCount; ++j) total[j] = 0.0f;
#pragma unroll
    for (int o = 0; o < kStreams; ++o) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        sums[(i + 1) * kStreams + o] = __fmaf_rn(stream[j], g[o][j], sums[(i + 1) * kStreams + o]);
        total[j] = __fmaf_rn(mix[o], g[o][j], total[j]);
      }
    }
    pack_channels<kCount>(total, target);
  }
}

// ---- Sums over a block ---------------------------------------------------------------------------------------------

// One step of the exchange: of 2 * kHalf numbers the lanes whose bit kHalf is set keep the upper half.
template <int kHalf, int kCount>
__device__ __forceinline__ void exchange_halves(float* values, int lane) {
  const bool is_upper = (lane & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float upper = i + kHalf < kCount ? values[i + kHalf] : 0.0f;
    const float received = __shfl_xor_sync(0xffffffffu, is_upper ? values[i] : upper, kHalf);
    values[i] = (is_upper ? upper : values[i]) + received;
  }
  if constexpr (kHalf > 1) exchange_halves<kHalf / 2, kHalf>(values, lane);
}

__host__ __device__ constexpr int power_of_two_from(int value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// Sums of kCount <= 32 numbers over a warp; lane i gets that of number i. 31 shuffles instead of 5 * kCount.
template <int kCount>
__device__ __forceinline__ float sum_over_warp(const float* values, int lane) {
  constexpr int kWidth = power_of_two_from(kCount);
  static_assert(kCount >= 2 && kWidth <= 32);
  float own[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) own[i] = values[i];
  exchange_halves<kWidth / 2, kCount>(own, lane);
  float total = own[0];
#pragma unroll
  for (int distance = kWidth; distance < 32; distance *= 2) total += __shfl_xor_sync(0xffffffffu, total, distance);
  return total;
}

// Write the sums of kCount numbers over each warp to shared memory: warp after warp, kCount numbers each.
template <int kCount>
__device__ __forceinline__ void store_warp_sums(const float* values, int thread, void* shared) {
  const int lane = thread % 32;
  float* target = static_cast<float*>(shared) + thread / 32 * kCount;
  constexpr int kRest = kCount % 32;
#pragma unroll
  for (int first = 0; first + 32 <= kCount; first += 32) {
    target[first + lane] = sum_over_warp<32>(values + first, lane);
  }
  if constexpr (kRest > 0) {
    const float total = sum_over_warp<kRest>(values + (kCount - kRest), lane);
    if (lane < kRest) target[kCount - kRest + lane] = total;
  }
}

// Number i of the block: its warps' sums, added in their order.
template <int kCount, int kWarps>
__device__ __forceinline__ float sum_warp_sums(const void* shared, int i) {
  float total = static_cast<const float*>(shared)[i];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total += static_cast<const float*>(shared)[warp * kCount + i];
  return total;
}

}  // namespace tk
