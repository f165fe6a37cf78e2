// The gradients of pre-norm's product: of residual, added in place, and of fn, in parts over the tokens.
//
// residual^T stands where tensor cores keep their results and the same registers are their left operand: of the product
// fn^T x out_mul_grad^T (channels by tokens) a lane gets what it adds to the residual's gradient, and with the residual
// it holds it feeds residual^T x out_mul_grad (channels by columns), which is summed up over the tokens.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "copy_async.cuh"
#include "tf32.cuh"

namespace tk {

// One block: kWarps * 64 channels (fewer with kPairs < 4) of the tokens of one part. A lane holds 2 * kPairs
// neighbouring channels of two of eight tokens; product `pair` takes two of them as rows group and group + 8.
template <int kColumnTiles, int kPairs, int kWarps, int kStages>
struct NormBackward {
  static constexpr int kColumns = kColumnTiles * 8;
  static constexpr int kTokens = 8;                       // of a step
  static constexpr int kLaneBytes = kPairs * 4;           // of one token
  static constexpr int kChannels = 8 * kPairs * 2;        // of a warp
  static constexpr int kRowsBytes = 2 * 32 * kLaneBytes;  // residual or its gradient
  static constexpr int kMulStride = kColumns + 4;         // no bank conflicts, whichever way it is read
  static constexpr int kMulBytes = kTokens * kMulStride * 4;
  static constexpr int kStageBytes = 2 * kRowsBytes + kMulBytes + kTokens * 4;
  static constexpr int kSharedBytes = kWarps * kStages * kStageBytes;

  struct Lane {
    uint32_t word[kPairs];
  };

  __device__ static __forceinline__ Lane load_lane(uint32_t address) {
    Lane value;
    if constexpr (kPairs == 4) {
      const uint4 all = load_shared(address);
      value.word[0] = all.x, value.word[1] = all.y, value.word[2] = all.z, value.word[3] = all.w;
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) value.word[i] = __float_as_uint(load_shared_word(address + i * 4));
    }
    return value;
  }

  __device__ static __forceinline__ void copy_lane(uint32_t target, const void* source, bool is_valid) {
    if constexpr (kPairs == 4) {
      copy_async(target, source, is_valid);
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        copy_word_async(target + i * 4, static_cast<const char*>(source) + i * 4, is_valid);
    }
  }

  // The warp's copies of eight tokens.
  __device__ static __forceinline__ void start_copies(uint32_t stage, const __nv_bfloat16* residual,
                                                      const __nv_bfloat16* residual_grad, const float* out_mul_grad,
                                                      const float* sqrsum_grad, int64_t first_token, int64_t end_token,
                                                      int64_t num_channels, int channel, bool has_channels) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t token = first_token + quad * 2 + i;
      const bool is_valid = has_channels && token < end_token;
      const int64_t at = is_valid ? token * num_channels + channel : 0;
      const uint32_t target = stage + (i * 32 + lane) * kLaneBytes;
      copy_lane(target, residual + at, is_valid);
      copy_lane(target + kRowsBytes, residual_grad + at, is_valid);
    }
    constexpr int kRowChunks = kColumns / 4;
    constexpr int kMulChunks = kTokens * kRowChunks;
#pragma unroll
    for (int i = 0; i < (kMulChunks + 31) / 32; ++i) {
      const int chunk = i * 32 + lane;
      if (chunk < kMulChunks) {
        const int64_t token = first_token + chunk / kRowChunks;
        const bool is_valid = token < end_token;
        const float* source = out_mul_grad + (is_valid ? first_token * kColumns + chunk * 4 : 0);
        copy_async_cached(stage + 2 * kRowsBytes + (chunk / kRowChunks * kMulStride + chunk % kRowChunks * 4) * 4,
                          source, is_valid);
      }
    }
    if (lane < kTokens) {
      const bool is_valid = first_token + lane < end_token;
      const float* source = sqrsum_grad + (is_valid ? first_token + lane : 0);
      copy_word_async(stage + 2 * kRowsBytes + kMulBytes + lane * 4, source, is_valid);
    }
  }

  // residual, residual_grad (num_tokens, num_channels) bf16; fn (kColumns, num_channels); out_mul_grad (num_tokens,
  // kColumns); sqrsum_grad (num_tokens); fn_grad_parts (parts, kColumns, num_channels) fp32.
  __device__ static __forceinline__ void run(const float* out_mul_grad, const float* sqrsum_grad,
                                             const void* residual_address, const float* fn, void* residual_grad_address,
                                             float* fn_grad_parts, void* shared, int num_tokens, int num_channels,
                                             int tile, int part, int num_parts) {
    const __nv_bfloat16* residual = static_cast<const __nv_bfloat16*>(residual_address);
    __nv_bfloat16* residual_grad = static_cast<__nv_bfloat16*>(residual_grad_address);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int channel = (tile * kWarps + warp) * kChannels + group * kPairs * 2;
    const bool has_channels = channel < num_channels;
    const uint32_t ring = shared_address(shared) + warp * kStages * kStageBytes;

    const int num_steps = (num_tokens + kTokens - 1) / kTokens;
    const int first = static_cast<int>(static_cast<int64_t>(num_steps) * part / num_parts);
    const int end = static_cast<int>(static_cast<int64_t>(num_steps) * (part + 1) / num_parts);
    const auto start = [&](int step) {
      if (step < end) {
        start_copies(ring + (step - first) % kStages * kStageBytes, residual, residual_grad, out_mul_grad, sqrsum_grad,
                     static_cast<int64_t>(step) * kTokens, num_tokens, num_channels, channel, has_channels);
      }
      commit_copies();
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) start(first + stage);

    // fn^T as left operand: rows are channels, columns those of the product
    uint32_t weights[kPairs][kColumnTiles][4];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int tile_of_columns = 0; tile_of_columns < kColumnTiles; ++tile_of_columns) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int64_t column = tile_of_columns * 8 + quad + i / 2 * 4;
          const float value = has_channels ? fn[column * num_channels + channel + pair * 2 + i % 2] : 0.0f;
          weights[pair][tile_of_columns][i] = round_to_tf32(__float_as_uint(value));
        }
      }
    }
    float sums[kPairs][kColumnTiles][4] = {};

#pragma unroll 1
    for (int step = first; step < end; ++step) {
      wait_for_copies<kStages - 2>();
      __syncwarp();  // all lanes' copies are there, and all have read the stage that is filled anew now
      start(step + kStages - 1);
      const uint32_t stage = ring + (step - first) % kStages * kStageBytes;
      const uint32_t mul = stage + 2 * kRowsBytes;
      Lane x[2];
      Lane grad[2];
      float twice[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[i] = load_lane(stage + (i * 32 + lane) * kLaneBytes);
        grad[i] = load_lane(stage + kRowsBytes + (i * 32 + lane) * kLaneBytes);
        twice[i] = 2.0f * load_shared_word(mul + kMulBytes + (quad * 2 + i) * 4);
      }
      float added[kPairs][4] = {};
#pragma unroll
      for (int columns = 0; columns < kColumnTiles; ++columns) {
        uint32_t by_token[2];
        uint32_t by_column[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          by_token[i] = round_to_tf32(
              __float_as_uint(load_shared_word(mul + (group * kMulStride + columns * 8 + quad + i * 4) * 4)));
          by_column[i] = round_to_tf32(
              __float_as_uint(load_shared_word(mul + ((quad * 2 + i) * kMulStride + columns * 8 + group) * 4)));
        }
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          multiply_tf32(added[pair], weights[pair][columns], by_token[0], by_token[1]);
          const uint32_t a[4] = {low_half(x[0].word[pair]), high_half(x[0].word[pair]), low_half(x[1].word[pair]),
                                 high_half(x[1].word[pair])};
          multiply_tf32(sums[pair][columns], a, by_column[0], by_column[1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Lane out;
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const uint32_t values = x[i].word[pair], old = grad[i].word[pair];
          const float low = __fmaf_rn(__uint_as_float(low_half(values)), twice[i], added[pair][i]);
          const float high = __fmaf_rn(__uint_as_float(high_half(values)), twice[i], added[pair][2 + i]);
          const __nv_bfloat162 both = __floats2bfloat162_rn(__fadd_rn(__uint_as_float(low_half(old)), low),
                                                            __fadd_rn(__uint_as_float(high_half(old)), high));
          out.word[pair] = *reinterpret_cast<const uint32_t*>(&both);
        }
        const int64_t token = static_cast<int64_t>(step) * kTokens + quad * 2 + i;
        if (has_channels && token < num_tokens) {
          __nv_bfloat16* target = residual_grad + token * num_channels + channel;
          if constexpr (kPairs == 4) {
            *reinterpret_cast<uint4*>(target) = make_uint4(out.word[0], out.word[1], out.word[2], out.word[3]);
          } else {
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) reinterpret_cast<uint32_t*>(target)[pair] = out.word[pair];
          }
        }
      }
    }
    if (!has_channels) return;
#pragma unroll
    for (int columns = 0; columns < kColumnTiles; ++columns) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = static_cast<int64_t>(part) * kColumns + columns * 8 + quad * 2 + i;
        float2* target = reinterpret_cast<float2*>(fn_grad_parts + row * num_channels + channel);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          target[pair] = make_float2(sums[pair][columns][i], sums[pair][columns][2 + i]);
        }
      }
    }
  }
};

// The same for any number of channels at any address: a thread takes one channel.
template <int kColumns>
struct NormBackwardGeneral {
  __device__ static __forceinline__ void run(const float* out_mul_grad, const float* sqrsum_grad,
                                             const void* residual_address, const float* fn, void* residual_grad_address,
                                             float* fn_grad_parts, int num_tokens, int num_channels, int channel,
                                             int part, int num_parts) {
    if (channel >= num_channels) return;
    const __nv_bfloat16* residual = static_cast<const __nv_bfloat16*>(residual_address) + channel;
    __nv_bfloat16* residual_grad = static_cast<__nv_bfloat16*>(residual_grad_address) + channel;
    const int first = static_cast<int>(static_cast<int64_t>(num_tokens) * part / num_parts);
    const int end = static_cast<int>(static_cast<int64_t>(num_tokens) * (part + 1) / num_parts);
    float weights[kColumns];
    float sums[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      weights[i] = as_tf32(fn[static_cast<int64_t>(i) * num_channels + channel]);
    }
#pragma unroll 1
    for (int64_t token = first; token < end; ++token) {
      const float x = __bfloat162float(residual[token * num_channels]);
      float added = 0.0f;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float grad = as_tf32(out_mul_grad[token * kColumns + i]);
        added = __fmaf_rn(grad, weights[i], added);
        sums[i] = __fmaf_rn(grad, x, sums[i]);
      }
      added = __fmaf_rn(x, 2.0f * sqrsum_grad[token], added);
      const float old = __bfloat162float(residual_grad[token * num_channels]);
      residual_grad[token * num_channels] = __float2bfloat16_rn(__fadd_rn(old, added));
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      fn_grad_parts[(static_cast<int64_t>(part) * kColumns + i) * num_channels + channel] = sums[i];
    }
  }
};

}  // namespace tk
