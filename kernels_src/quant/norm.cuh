// RMSNorm of a thread's channels, eight at a time, in the roundings of plain fp32. Tags are those of cast.cuh.
#pragma once

#include "to_e4m3.cuh"

namespace tk {

// ---- eight channels in the words of their dtype ---------------------------------------------------------------------

// fp32 values rounded to bf16.
__device__ __forceinline__ void round_x8(Bf16, const float* values, void* target) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    static_cast<__nv_bfloat162*>(target)[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  }
}

__device__ __forceinline__ void round_x8(Fp32, const float* values, void* target) {
#pragma unroll
  for (int i = 0; i < 8; ++i) static_cast<float*>(target)[i] = values[i];
}

// x = x + residual, rounded to their dtype.
__device__ __forceinline__ void add_residual_x8(Bf16, void* x, const void* residual) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __nv_bfloat162& pair = static_cast<__nv_bfloat162*>(x)[i];
    pair = __hadd2_rn(pair, static_cast<const __nv_bfloat162*>(residual)[i]);
  }
}

__device__ __forceinline__ void add_residual_x8(Fp32, void* x, const void* residual) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& value = static_cast<float*>(x)[i];
    value = __fadd_rn(value, static_cast<const float*>(residual)[i]);
  }
}

template <typename Kind>
__device__ __forceinline__ void add_residual(void* x, const void* residual) {
  add_residual_x8(Kind{}, x, residual);
}

// ---- forward --------------------------------------------------------------------------------------------------------

// sum + the squares of eight channels, one after the other. Squares of bf16 numbers are exact, so that fused or not
// the sums are the same.
__device__ __forceinline__ float add_squares_x8(Bf16, const float* values, float sum) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = __fmaf_rn(values[i], values[i], sum);
  return sum;
}

__device__ __forceinline__ float add_squares_x8(Fp32, const float* values, float sum) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = __fadd_rn(sum, __fmul_rn(values[i], values[i]));
  return sum;
}

template <typename Kind>
__device__ __forceinline__ float add_squares(const void* x, float sum) {
  float values[8];
  load_x8(Kind{}, static_cast<const uint32_t*>(x), 0, 1.0f, values);
  return add_squares_x8(Kind{}, values, sum);
}

__device__ __forceinline__ float reciprocal_rms(float sum, int count, float eps) {
  return rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(count)), eps));
}

// y = (x * rstd) * (weight * out_scale), or (x * rstd) * out_scale, rounded to x's dtype.
template <typename Kind>
__device__ __forceinline__ void normalise(const void* x, const void* weight, bool has_weight, float rstd,
                                          float out_scale, void* y) {
  float values[8], factors[8];
  load_x8(Kind{}, static_cast<const uint32_t*>(x), 0, 1.0f, values);
  if (has_weight) load_x8(Kind{}, static_cast<const uint32_t*>(weight), 0, 1.0f, factors);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float factor = has_weight ? __fmul_rn(factors[i], out_scale) : out_scale;
    values[i] = __fmul_rn(__fmul_rn(values[i], rstd), factor);
  }
  round_x8(Kind{}, values, y);
}

// ---- scales of a fused mixture of experts ---------------------------------------------------------------------------

// Store the exponent of a scale as byte `column` % 4 of word `column` / 4 of a token, in the order of rows that such a
// kernel reads: blocks of block_m tokens, padded to 128, in which 32 tokens lie four words apart.
__device__ __forceinline__ void store_mega_moe_scale(void* base, int64_t column_stride, int block_m, int token,
                                                     int column, float scale) {
  const int block = token / block_m, inside = token % block_m, padded = (block_m + 127) / 128 * 128;
  const int64_t row = static_cast<int64_t>(block) * padded + inside / 128 * 128 + inside % 32 * 4 + inside % 128 / 32;
  const int64_t word = (column >> 2) * column_stride + row;
  static_cast<uint8_t*>(base)[4 * word + (column & 3)] = static_cast<uint8_t>(bits_of(scale) >> 23);
}

// ---- backward -------------------------------------------------------------------------------------------------------

// How a block of norm_backward shares a row: steps of 256 threads with eight neighbouring channels each.
constexpr int kBackwardThreads = 256;
constexpr int kBackwardSteps = 4;

template <typename Kind>
constexpr int kWords = 8;  // that hold eight channels
template <>
constexpr int kWords<Bf16> = 4;

template <int kCount, bool kIsAligned>
__device__ __forceinline__ void load_channels(const void* source, int64_t channel, uint32_t* words) {
  const uint8_t* start = static_cast<const uint8_t*>(source) + channel * (kCount / 2);
  if constexpr (kIsAligned) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const uint4 part = __ldg(reinterpret_cast<const uint4*>(start) + i);
      words[4 * i] = part.x;
      words[4 * i + 1] = part.y;
      words[4 * i + 2] = part.z;
      words[4 * i + 3] = part.w;
    }
  } else {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(start);
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = __ldg(halves + 2 * i) | (uint32_t{__ldg(halves + 2 * i + 1)} << 16);
  }
}

template <int kCount>
__device__ __forceinline__ void store_channels(void* target, int64_t channel, const uint32_t* words) {
  uint4* start = reinterpret_cast<uint4*>(static_cast<uint8_t*>(target) + channel * (kCount / 2));
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    start[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
}

// x * rstd and what the gradient of the result comes to, for eight channels; `scaled` is without the weight.
template <typename Kind>
__device__ __forceinline__ void norm_factors(const uint32_t* x, const uint32_t* grad, const uint32_t* weight,
                                             bool has_weight, float rstd, float out_scale, float* normal, float* scaled,
                                             float* weighted) {
  load_x8(Kind{}, x, 0, rstd, normal);
  load_x8(Kind{}, grad, 0, out_scale, scaled);
  if (has_weight) {
    load_x8(Kind{}, weight, 0, 1.0f, weighted);
#pragma unroll
    for (int i = 0; i < 8; ++i) weighted[i] = __fmul_rn(scaled[i], weighted[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) weighted[i] = scaled[i];
  }
}

// The rows first, first + stride, ... of the gradient of x, and in `workspace` this block's sums of x * rstd * grad *
// out_scale. weight, residual and workspace may be null. shared: two floats for each warp.
template <typename Kind, bool kIsAligned>
__device__ __forceinline__ void norm_backward_rows(const void* x, int64_t x_stride, const void* grad,
                                                   int64_t grad_stride, const void* weight, bool has_weight,
                                                   const float* rstd, const void* residual, int64_t residual_stride,
                                                   bool has_residual, void* x_grad, float* workspace, int num_tokens,
                                                   int hidden, float out_scale, int first, int stride, float* shared) {
  constexpr int kCount = kWords<Kind>, kWarps = kBackwardThreads / 32;
  const int thread = static_cast<int>(threadIdx.x);
  float weight_sums[kBackwardSteps][8] = {};
  int parity = 0;
  for (int row = first; row < num_tokens; row += stride) {
    uint32_t x_words[kBackwardSteps][kCount] = {}, grad_words[kBackwardSteps][kCount] = {};
    const float row_rstd = rstd[row];
#pragma unroll
    for (int step = 0; step < kBackwardSteps; ++step) {
      const int channel = (step * kBackwardThreads + thread) * 8;
      if (channel < hidden) {
        load_channels<kCount, kIsAligned>(x, row * x_stride + channel, x_words[step]);
        load_channels<kCount, kIsAligned>(grad, row * grad_stride + channel, grad_words[step]);
      }
    }
    float sum = 0.0f;
#pragma unroll
    for (int step = 0; step < kBackwardSteps; ++step) {
      const int channel = (step * kBackwardThreads + thread) * 8;
      if (channel < hidden) {
        uint32_t weight_words[kCount];
        if (has_weight) load_channels<kCount, kIsAligned>(weight, channel, weight_words);
        float normal[8], scaled[8], weighted[8];
        norm_factors<Kind>(x_words[step], grad_words[step], weight_words, has_weight, row_rstd, out_scale, normal,
                           scaled, weighted);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = __fadd_rn(sum, __fmul_rn(normal[i], weighted[i]));
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
    // Two sets, so that one barrier a row is enough
    float* sums = shared + parity * kWarps;
    parity ^= 1;
    if (thread % 32 == 0) sums[thread / 32] = sum;
    __syncthreads();
    sum = sums[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) sum = __fadd_rn(sum, sums[warp]);
    const float mean = __fdiv_rn(sum, static_cast<float>(hidden));
#pragma unroll
    for (int step = 0; step < kBackwardSteps; ++step) {
      const int channel = (step * kBackwardThreads + thread) * 8;
      if (channel < hidden) {
        uint32_t weight_words[kCount], residual_words[kCount];
        if (has_weight) load_channels<kCount, kIsAligned>(weight, channel, weight_words);
        if (has_residual) {
          load_channels<kCount, kIsAligned>(residual, row * residual_stride + channel, residual_words);
        }
        float normal[8], scaled[8], weighted[8], residuals[8];
        norm_factors<Kind>(x_words[step], grad_words[step], weight_words, has_weight, row_rstd, out_scale, normal,
                           scaled, weighted);
        if (has_residual) load_x8(Kind{}, residual_words, 0, 1.0f, residuals);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          weight_sums[step][i] = __fadd_rn(weight_sums[step][i], __fmul_rn(normal[i], scaled[i]));
          weighted[i] = __fmul_rn(__fsub_rn(weighted[i], __fmul_rn(normal[i], mean)), row_rstd);
          if (has_residual) weighted[i] = __fadd_rn(weighted[i], residuals[i]);
        }
        uint32_t target[kCount];
        round_x8(Kind{}, weighted, target);
        store_channels<kCount>(x_grad, static_cast<int64_t>(row) * hidden + channel, target);
      }
    }
  }
  if (!has_weight) return;
#pragma unroll
  for (int step = 0; step < kBackwardSteps; ++step) {
    const int channel = (step * kBackwardThreads + thread) * 8;
    if (channel < hidden) {
      float4* target = reinterpret_cast<float4*>(workspace + static_cast<int64_t>(first) * hidden + channel);
      const float* sums = weight_sums[step];
      target[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      target[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
    }
  }
}

// The sums over the parts in `workspace` of 32 columns from `column` on, by 256 threads: each takes every eighth part.
// shared: 256 floats.
__device__ __forceinline__ void sum_weight_grad(const float* workspace, int num_parts, int hidden, int column,
                                                void* weight_grad, bool is_bf16, bool accumulate, float* shared) {
  const int thread = static_cast<int>(threadIdx.x), place = column + thread % 32;
  float sum = 0.0f;
  if (place < hidden) {
#pragma unroll 8
    for (int part = thread / 32; part < num_parts; part += 8) {
      sum = __fadd_rn(sum, workspace[static_cast<int64_t>(part) * hidden + place]);
    }
  }
  shared[thread] = sum;
  __syncthreads();
  if (thread >= 32 || place >= hidden) return;
#pragma unroll
  for (int other = 1; other < 8; ++other) sum = __fadd_rn(sum, shared[32 * other + thread]);
  if (is_bf16) {
    __nv_bfloat16& target = static_cast<__nv_bfloat16*>(weight_grad)[place];
    target = __float2bfloat16_rn(accumulate ? __fadd_rn(__bfloat162float(target), sum) : sum);
  } else {
    float& target = static_cast<float*>(weight_grad)[place];
    target = accumulate ? __fadd_rn(target, sum) : sum;
  }
}

}  // namespace tk
