// RMSNorm of a row by a block, in the roundings of plain fp32. Tags are those of cast.cuh.
#pragma once

#include <type_traits>

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

template <typename Kind>
constexpr int kWords = 8;  // that hold eight channels
template <>
constexpr int kWords<Bf16> = 4;

template <typename Kind, int kCount, bool kIsAligned>
__device__ __forceinline__ void load_channels(const void* source, int64_t channel, uint32_t* words) {
  const uint8_t* start = static_cast<const uint8_t*>(source) + channel * (kWords<Kind> / 2);
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

template <int kBytes, bool kIsAligned>
__device__ __forceinline__ void store_bytes(uint8_t* target, const uint32_t* words) {
  if constexpr (kIsAligned) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      reinterpret_cast<uint4*>(target)[i] =
          make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) target[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
  }
}

__device__ __forceinline__ void round_to_bf16(Bf16, const uint32_t* words, uint32_t* halves) {
#pragma unroll
  for (int i = 0; i < 8; ++i) halves[i] = words[i];
}

__device__ __forceinline__ void round_to_bf16(Fp32, const uint32_t* words, uint32_t* halves) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(float_of(words[2 * i]), float_of(words[2 * i + 1]));
    halves[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// The place of a token among the scales of a fused mixture of experts: blocks of block_m tokens, padded to 128, in
// which 32 tokens lie four words apart.
__device__ __forceinline__ int64_t place_of_token(int token, int block_m) {
  const int block = token / block_m, inside = token % block_m, padded = (block_m + 127) / 128 * 128;
  return static_cast<int64_t>(block) * padded + inside / 128 * 128 + inside % 32 * 4 + inside % 128 / 32;
}

// ---- forward --------------------------------------------------------------------------------------------------------

// How a block of norm_forward shares a row: steps of 128 threads with sixteen neighbouring channels each. With four
// times the threads each step has its own: for few tokens.
constexpr int kChannels = 16;
constexpr int kStepThreads = 128;

struct NormArguments {
  const void* x;
  int64_t x_stride;
  const void* weight;
  const void* residual;
  int64_t residual_stride;
  void* out;
  int64_t out_stride;
  void* residual_out;
  int64_t residual_out_stride;
  float* rstd;
  int row, hidden;
  float eps, out_scale;
};

struct CastArguments {
  void* out_sf;
  int64_t row_stride, column_stride;
  int num_columns;
  void* out_bf16;
  int64_t out_bf16_stride;
  void* mega_moe_sf;
  int64_t mega_moe_stride;
  int mega_moe_block_m;
  float clamp_min;
  bool round_sf, is_packed;
};

// x = x + residual, rounded to their dtype.
__device__ __forceinline__ void add_residual(Bf16, uint32_t* x, const uint32_t* residual) {
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) {
    __nv_bfloat162& pair = reinterpret_cast<__nv_bfloat162*>(x)[i];
    pair = __hadd2_rn(pair, reinterpret_cast<const __nv_bfloat162*>(residual)[i]);
  }
}

__device__ __forceinline__ void add_residual(Fp32, uint32_t* x, const uint32_t* residual) {
#pragma unroll
  for (int i = 0; i < kChannels; ++i) x[i] = bits_of(__fadd_rn(float_of(x[i]), float_of(residual[i])));
}

// The sum of a thread's squares, one after the other. Squares of bf16 numbers are exact, so that fused or not the sums
// are the same.
template <typename Kind>
__device__ __forceinline__ float sum_squares(const uint32_t* words) {
  float sum = 0.0f;
#pragma unroll
  for (int block = 0; block < kChannels / 8; ++block) {
    float values[8];
    load_x8(Kind{}, words, block, 1.0f, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum = std::is_same<Kind, Bf16>::value ? __fmaf_rn(values[i], values[i], sum)
                                            : __fadd_rn(sum, __fmul_rn(values[i], values[i]));
    }
  }
  return sum;
}

// The sum over a row of what 128 threads hold: lanes by butterfly, then warps in order. `sums` holds four floats.
__device__ __forceinline__ float sum_of_step_threads(float sum, int thread, float* sums) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
  if (thread % 32 == 0) sums[thread / 32] = sum;
  return sum;
}

// y = (x * rstd) * (weight * out_scale), or (x * rstd) * out_scale, rounded to x's dtype, in place of x.
template <typename Kind>
__device__ __forceinline__ void normalise(uint32_t* words, const uint32_t* weight, bool has_weight, float rstd,
                                          float out_scale) {
#pragma unroll
  for (int block = 0; block < kChannels / 8; ++block) {
    float values[8], factors[8];
    load_x8(Kind{}, words, block, rstd, values);
    if (has_weight) {
      load_x8(Kind{}, weight, block, out_scale, factors);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = __fmul_rn(values[i], factors[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = __fmul_rn(values[i], out_scale);
    }
    round_x8(Kind{}, values, words + block * kWords<Kind>);
  }
}

// Store a thread's results of a step, cast: y in words.
template <typename Kind, bool kIsAligned>
__device__ __forceinline__ void cast_step(const NormArguments& norm, const CastArguments& cast, const uint32_t* y,
                                          int channel, int64_t mega_moe_row) {
  float most = largest<kChannels>(Kind{}, y);
  most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));  // two threads share a scale
  float scale, factor;
  make_scales<1>(&most, cast.clamp_min, 448.0f, cast.round_sf, kScaleFp32, &scale, &factor);
  const bool is_inside = channel < norm.hidden;
  if (is_inside) {
    uint32_t words[kChannels / 4];
    scale_to_e4m3<Kind, kChannels>(y, factor, words);
    uint8_t* target = static_cast<uint8_t*>(norm.out) + norm.row * norm.out_stride + channel;
    store_bytes<kChannels, kIsAligned>(target, words);
    if (cast.out_bf16 != nullptr) {
      uint32_t halves[kChannels / 2];
      round_to_bf16(Kind{}, y, halves);
      uint8_t* other = static_cast<uint8_t*>(cast.out_bf16) + 2 * (norm.row * cast.out_bf16_stride + channel);
      store_bytes<2 * kChannels, kIsAligned>(other, halves);
    }
  }
  if (channel % 32 != 0) return;
  // Bytes of a packed word beyond the last group become 0
  const int group = channel / 32;
  store_scale(cast.out_sf, cast.row_stride, cast.column_stride, cast.num_columns, norm.row, group, cast.is_packed,
              is_inside ? scale : 0.0f);
  if (cast.mega_moe_sf != nullptr && is_inside) {
    const int64_t word = (group >> 2) * cast.mega_moe_stride + mega_moe_row;
    static_cast<uint8_t*>(cast.mega_moe_sf)[4 * word + (group & 3)] = static_cast<uint8_t>(bits_of(scale) >> 23);
  }
}

// One row by a block of kThreads, in kSteps steps. `cast` is null for the plain norm. shared: 516 floats.
template <typename Kind, int kThreads, int kSteps, bool kIsAligned>
__device__ __forceinline__ void norm_row(const NormArguments& norm, const CastArguments* cast, float* shared) {
  constexpr int kCount = kChannels / 8 * kWords<Kind>;
  // Weights are on their way before the sum is known, where registers allow it
  constexpr bool kIsEarly = kSteps == 1;
  const int thread = static_cast<int>(threadIdx.x), hidden = norm.hidden;
  uint32_t words[kSteps][kCount] = {}, weight[kCount] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int channel = (step * kThreads + thread) * kChannels;
    if (channel < hidden)
      load_channels<Kind, kCount, kIsAligned>(norm.x, norm.row * norm.x_stride + channel, words[step]);
  }
  if (kIsEarly && norm.weight != nullptr && thread * kChannels < hidden) {
    load_channels<Kind, kCount, kIsAligned>(norm.weight, thread * kChannels, weight);
  }
  if (norm.residual != nullptr) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int channel = (step * kThreads + thread) * kChannels;
      if (channel < hidden) {
        uint32_t residual[kCount];
        load_channels<Kind, kCount, kIsAligned>(norm.residual, norm.row * norm.residual_stride + channel, residual);
        add_residual(Kind{}, words[step], residual);
        if (norm.residual_out != nullptr) {
          uint8_t* target = static_cast<uint8_t*>(norm.residual_out) +
                            (norm.row * norm.residual_out_stride + channel) * (kWords<Kind> / 2);
          store_bytes<4 * kCount, kIsAligned>(target, words[step]);
        }
      }
    }
  }
  float sum = sum_squares<Kind>(words[0]);
#pragma unroll
  for (int step = 1; step < kSteps; ++step) {
    if (step * kThreads * kChannels < hidden) sum = __fadd_rn(sum, sum_squares<Kind>(words[step]));
  }
  if constexpr (kThreads == kStepThreads) {
    sum_of_step_threads(sum, thread, shared);
  } else {
    // The order is that of 128 threads: steps first
    shared[thread] = sum;
    __syncthreads();
    if (thread < kStepThreads) {
#pragma unroll
      for (int step = 1; step < kThreads / kStepThreads; ++step) {
        if (step * kStepThreads * kChannels < hidden) sum = __fadd_rn(sum, shared[step * kStepThreads + thread]);
      }
      sum_of_step_threads(sum, thread, shared + kThreads);
    }
    shared += kThreads;
  }
  __syncthreads();
  sum = __fadd_rn(__fadd_rn(__fadd_rn(shared[0], shared[1]), shared[2]), shared[3]);
  const float rstd = rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(hidden)), norm.eps));
  if (norm.rstd != nullptr && thread == 0) norm.rstd[norm.row] = rstd;

  const bool has_weight = norm.weight != nullptr;
  int64_t mega_moe_row = 0;
  if (cast != nullptr && cast->mega_moe_sf != nullptr) {
    mega_moe_row = place_of_token(norm.row, cast->mega_moe_block_m);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int channel = (step * kThreads + thread) * kChannels;
    if (step * kThreads * kChannels < hidden) {
      if (!kIsEarly && has_weight && channel < hidden) {
        load_channels<Kind, kCount, kIsAligned>(norm.weight, channel, weight);
      }
      normalise<Kind>(words[step], weight, has_weight, rstd, norm.out_scale);
      if (cast != nullptr) {
        cast_step<Kind, kIsAligned>(norm, *cast, words[step], channel, mega_moe_row);
      } else if (channel < hidden) {
        uint8_t* target = static_cast<uint8_t*>(norm.out) + (norm.row * norm.out_stride + channel) * (kWords<Kind> / 2);
        store_bytes<4 * kCount, kIsAligned>(target, words[step]);
      }
    }
  }
}

template <typename Kind, int kThreads, int kSteps, bool kIsAligned>
__device__ __forceinline__ void norm_forward(const void* x, int64_t x_stride, const void* weight, const void* residual,
                                             int64_t residual_stride, void* out, int64_t out_stride, void* residual_out,
                                             int64_t residual_out_stride, void* rstd, int row, int hidden, float eps,
                                             float out_scale, float* shared) {
  const NormArguments norm = {x,
                              x_stride,
                              weight,
                              residual,
                              residual_stride,
                              out,
                              out_stride,
                              residual_out,
                              residual_out_stride,
                              static_cast<float*>(rstd),
                              row,
                              hidden,
                              eps,
                              out_scale};
  norm_row<Kind, kThreads, kSteps, kIsAligned>(norm, nullptr, shared);
}

template <typename Kind, int kThreads, int kSteps, bool kIsAligned>
__device__ __forceinline__ void norm_forward_and_cast(
    const void* x, int64_t x_stride, const void* weight, const void* residual, int64_t residual_stride, void* out,
    int64_t out_stride, void* residual_out, int64_t residual_out_stride, void* rstd, int row, int hidden, float eps,
    float out_scale, float* shared, void* out_sf, int64_t sf_row_stride, int64_t sf_column_stride, int num_sf_columns,
    void* out_bf16, int64_t out_bf16_stride, void* mega_moe_sf, int64_t mega_moe_stride, int mega_moe_block_m,
    float clamp_min, bool round_sf, bool is_packed) {
  const NormArguments norm = {x,
                              x_stride,
                              weight,
                              residual,
                              residual_stride,
                              out,
                              out_stride,
                              residual_out,
                              residual_out_stride,
                              static_cast<float*>(rstd),
                              row,
                              hidden,
                              eps,
                              out_scale};
  const CastArguments cast = {out_sf,      sf_row_stride,   sf_column_stride, num_sf_columns, out_bf16, out_bf16_stride,
                              mega_moe_sf, mega_moe_stride, mega_moe_block_m, clamp_min,      round_sf, is_packed};
  norm_row<Kind, kThreads, kSteps, kIsAligned>(norm, &cast, shared);
}

// ---- backward -------------------------------------------------------------------------------------------------------

// How a block of norm_backward shares a row: steps of 256 threads with eight neighbouring channels each.
constexpr int kBackwardThreads = 256;

// Ask L2 for a row's share of this thread.
template <typename Kind, int kSteps>
__device__ __forceinline__ void prefetch_row(const void* row, int hidden) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int channel = (step * kBackwardThreads + static_cast<int>(threadIdx.x)) * 8;
    if (channel < hidden) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t*>(row) + channel * (kWords<Kind> / 2)));
    }
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
template <typename Kind, int kSteps, bool kIsAligned>
__device__ __forceinline__ void norm_backward_rows(const void* x, int64_t x_stride, const void* grad,
                                                   int64_t grad_stride, const void* weight, bool has_weight,
                                                   const float* rstd, const void* residual, int64_t residual_stride,
                                                   bool has_residual, void* x_grad, float* workspace, int num_tokens,
                                                   int hidden, float out_scale, int first, int stride, float* shared) {
  constexpr int kCount = kWords<Kind>, kWarps = kBackwardThreads / 32;
  const int thread = static_cast<int>(threadIdx.x);
  float weight_sums[kSteps][8] = {};
  int parity = 0;
  for (int row = first; row < num_tokens; row += stride) {
    uint32_t x_words[kSteps][kCount] = {}, grad_words[kSteps][kCount] = {};
    const float row_rstd = rstd[row];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int channel = (step * kBackwardThreads + thread) * 8;
      if (channel < hidden) {
        load_channels<Kind, kCount, kIsAligned>(x, row * x_stride + channel, x_words[step]);
        load_channels<Kind, kCount, kIsAligned>(grad, row * grad_stride + channel, grad_words[step]);
      }
    }
    // What is read next comes from memory while this row is computed
    constexpr int kBytes = kWords<Kind> / 2;  // of a channel
    if (has_residual) {
      prefetch_row<Kind, kSteps>(static_cast<const uint8_t*>(residual) + row * residual_stride * kBytes, hidden);
    }
    if (row + stride < num_tokens) {
      const int64_t next = row + stride;
      prefetch_row<Kind, kSteps>(static_cast<const uint8_t*>(x) + next * x_stride * kBytes, hidden);
      prefetch_row<Kind, kSteps>(static_cast<const uint8_t*>(grad) + next * grad_stride * kBytes, hidden);
    }
    float sum = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int channel = (step * kBackwardThreads + thread) * 8;
      if (channel < hidden) {
        uint32_t weight_words[kCount];
        if (has_weight) load_channels<Kind, kCount, kIsAligned>(weight, channel, weight_words);
        float normal[8], scaled[8], weighted[8], part = 0.0f;
        norm_factors<Kind>(x_words[step], grad_words[step], weight_words, has_weight, row_rstd, out_scale, normal,
                           scaled, weighted);
#pragma unroll
        for (int i = 0; i < 8; ++i) part = __fadd_rn(part, __fmul_rn(normal[i], weighted[i]));
        sum = step == 0 ? part : __fadd_rn(sum, part);
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
    for (int step = 0; step < kSteps; ++step) {
      const int channel = (step * kBackwardThreads + thread) * 8;
      if (channel < hidden) {
        uint32_t weight_words[kCount], residual_words[kCount];
        if (has_weight) load_channels<Kind, kCount, kIsAligned>(weight, channel, weight_words);
        if (has_residual) {
          load_channels<Kind, kCount, kIsAligned>(residual, row * residual_stride + channel, residual_words);
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
  for (int step = 0; step < kSteps; ++step) {
    const int channel = (step * kBackwardThreads + thread) * 8;
    if (channel < hidden) {
      float4* target = reinterpret_cast<float4*>(workspace + static_cast<int64_t>(first) * hidden + channel);
      const float* sums = weight_sums[step];
      target[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      target[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
    }
  }
}

// The sums over the parts in `workspace` of 32 columns from `column` on: a warp takes every kWarps-th part. shared: a
// float for each thread.
template <int kWarps>
__device__ __forceinline__ void sum_weight_grad(const float* workspace, int num_parts, int hidden, int column,
                                                void* weight_grad, bool is_bf16, bool accumulate, float* shared) {
  const int thread = static_cast<int>(threadIdx.x), place = column + thread % 32;
  float sum = 0.0f;
  if (place < hidden) {
#pragma unroll 8
    for (int part = thread / 32; part < num_parts; part += kWarps) {
      sum = __fadd_rn(sum, workspace[static_cast<int64_t>(part) * hidden + place]);
    }
  }
  shared[thread] = sum;
  __syncthreads();
  if (thread >= 32 || place >= hidden) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) sum = __fadd_rn(sum, shared[32 * other + thread]);
  if (is_bf16) {
    __nv_bfloat16& target = static_cast<__nv_bfloat16*>(weight_grad)[place];
    target = __float2bfloat16_rn(accumulate ? __fadd_rn(__bfloat162float(target), sum) : sum);
  } else {
    float& target = static_cast<float*>(weight_grad)[place];
    target = accumulate ? __fadd_rn(target, sum) : sum;
  }
}

}  // namespace tk
