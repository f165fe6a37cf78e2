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
// neighbouring channels of two of eight tokens; product `pair` takes two of them as rows group and group + 8. That is
// 32 bytes of four rows for eight neighbouring lanes, so rows are copied and stored whole by way of shared memory,
// where chunks of 16 bytes lie with their index xor-ed by the row: no bank conflicts either way.
template <int kColumnTiles, int kPairs, int kWarps, int kStages>
struct NormBackward {
  static constexpr int kColumns = kColumnTiles * 8;
  static constexpr int kTokens = 8;                 // of a step
  static constexpr int kChannels = 8 * kPairs * 2;  // of a warp
  static constexpr int kRowChunks = kChannels / 8;  // of 16 bytes
  static constexpr int kChunks = kTokens * kRowChunks;
  static constexpr int kRowsBytes = kChunks * 16;  // residual or its gradient
  static constexpr int kMulStride = kColumns + 4;  // no bank conflicts, whichever way it is read
  static constexpr int kMulBytes = kTokens * kMulStride * 4;
  static constexpr int kStageBytes = 2 * kRowsBytes + kMulBytes + kTokens * 4;
  static constexpr int kSharedBytes = kWarps * kStages * kStageBytes;

  struct Lane {
    uint32_t word[kPairs];
  };

  __device__ static __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return (row * kRowChunks + (chunk ^ (kRowChunks == 8 ? row & 6 : 0))) * 16;
  }

  // Of a lane's channels of one token.
  __device__ static __forceinline__ uint32_t lane_offset(int row, int group) {
    return kPairs == 4 ? chunk_offset(row, group) : (row * kRowChunks * 4 + group * kPairs) * 4;
  }

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

  __device__ static __forceinline__ void store_lane(uint32_t address, const Lane& value) {
    if constexpr (kPairs == 4) {
      store_shared(address, make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]));
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) store_shared_word(address + i * 4, value.word[i]);
    }
  }

  // Eight tokens of a warp: where they lie, and which of them and of its channels there are. Lane by lane: chunk
  // lane % kRowChunks of row lane / kRowChunks and of those that follow in steps of 32 lanes.
  struct Rows {
    int64_t offset;  // of the lane's first chunk, in elements
    int num_tokens;  // left
  };

  __device__ static __forceinline__ void start_copies(uint32_t stage, const __nv_bfloat16* residual,
                                                      const __nv_bfloat16* residual_grad, const float* out_mul_grad,
                                                      const float* sqrsum_grad, int64_t first_token, const Rows& rows,
                                                      int64_t num_channels, bool has_channels) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < (kChunks + 31) / 32; ++i) {
      const int row = (i * 32 + lane) / kRowChunks;
      if (kChunks % 32 == 0 || row < kTokens) {
        const bool is_valid = has_channels && row < rows.num_tokens;
        const int64_t at = is_valid ? rows.offset + i * (32 / kRowChunks) * num_channels : 0;
        const uint32_t target = stage + chunk_offset(row, lane % kRowChunks);
        copy_async(target, residual + at, is_valid);
        copy_async(target + kRowsBytes, residual_grad + at, is_valid);
      }
    }
    constexpr int kMulRowChunks = kColumns / 4;
    constexpr int kMulChunks = kTokens * kMulRowChunks;
#pragma unroll
    for (int i = 0; i < (kMulChunks + 31) / 32; ++i) {
      const int chunk = i * 32 + lane;
      if (chunk < kMulChunks) {
        const bool is_valid = chunk / kMulRowChunks < rows.num_tokens;
        const float* source = out_mul_grad + (is_valid ? first_token * kColumns + chunk * 4 : 0);
        copy_async_cached(stage + 2 * kRowsBytes + (chunk / kMulRowChunks * kMulStride + chunk % kMulRowChunks * 4) * 4,
                          source, is_valid);
      }
    }
    if (lane < kTokens) {
      const bool is_valid = lane < rows.num_tokens;
      const float* source = sqrsum_grad + (is_valid ? first_token + lane : 0);
      copy_word_async(stage + 2 * kRowsBytes + kMulBytes + lane * 4, source, is_valid);
    }
  }

  // fn^T as left operand: rows are channels, columns those of the product.
  __device__ static __forceinline__ void load_weights(uint32_t (&weights)[kPairs][kColumnTiles][4], const float* fn,
                                                      int64_t num_channels, int channel, int quad) {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* source = fn + (tile * 8 + quad + half * 4) * num_channels + channel;
        float values[kPairs * 2];
        if constexpr (kPairs == 4) {
          *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(source);
          *reinterpret_cast<float4*>(values + 4) = *reinterpret_cast<const float4*>(source + 4);
        } else {
#pragma unroll
          for (int i = 0; i < kPairs * 2; ++i) values[i] = source[i];
        }
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            weights[pair][tile][half * 2 + i] = round_to_tf32(__float_as_uint(values[pair * 2 + i]));
          }
        }
      }
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
    const int first_channel = (tile * kWarps + warp) * kChannels;
    const int channel = first_channel + group * kPairs * 2;           // of the products
    const int chunk_channel = first_channel + lane % kRowChunks * 8;  // of copies and stores
    const bool has_chunk = chunk_channel < num_channels;
    const uint32_t ring = shared_address(shared) + warp * kStages * kStageBytes;

    const int num_steps = (num_tokens + kTokens - 1) / kTokens;
    const int first = static_cast<int>(static_cast<int64_t>(num_steps) * part / num_parts);
    const int end = static_cast<int>(static_cast<int64_t>(num_steps) * (part + 1) / num_parts);
    int next = first;  // step to copy
    uint32_t next_stage = ring;
    int64_t next_offset = (static_cast<int64_t>(first) * kTokens + lane / kRowChunks) * num_channels + chunk_channel;
    const auto start = [&] {
      if (next < end) {
        const int64_t token = static_cast<int64_t>(next) * kTokens;
        start_copies(next_stage, residual, residual_grad, out_mul_grad, sqrsum_grad, token,
                     {next_offset, static_cast<int>(num_tokens - token)}, num_channels, has_chunk);
      }
      commit_copies();
      ++next;
      next_offset += static_cast<int64_t>(kTokens) * num_channels;
      next_stage = next_stage == ring + (kStages - 1) * kStageBytes ? ring : next_stage + kStageBytes;
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) start();

    uint32_t weights[kPairs][kColumnTiles][4] = {};
    if (channel < num_channels) load_weights(weights, fn, num_channels, channel, quad);
    float sums[kPairs][kColumnTiles][4] = {};

#pragma unroll 1
    for (int step = first; step < end; ++step) {
      wait_for_copies<kStages - 2>();
      __syncwarp();  // all lanes' copies are there, and all have read the stage that is filled anew now
      start();
      const uint32_t stage = next_stage;  // the one that is filled next is this step's
      const uint32_t mul = stage + 2 * kRowsBytes;
      Lane x[2];
      Lane grad[2];
      float twice[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[i] = load_lane(stage + lane_offset(quad * 2 + i, group));
        grad[i] = load_lane(stage + kRowsBytes + lane_offset(quad * 2 + i, group));
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
        store_lane(stage + kRowsBytes + lane_offset(quad * 2 + i, group), out);
      }
      __syncwarp();
      const int64_t offset = next_offset - static_cast<int64_t>(kStages * kTokens) * num_channels;
#pragma unroll
      for (int i = 0; i < (kChunks + 31) / 32; ++i) {
        const int row = (i * 32 + lane) / kRowChunks;
        if (has_chunk && row < kTokens && row < num_tokens - step * kTokens) {
          const uint4 out = load_shared(stage + kRowsBytes + chunk_offset(row, lane % kRowChunks));
          *reinterpret_cast<uint4*>(residual_grad + offset +
                                    static_cast<int64_t>(i * (32 / kRowChunks)) * num_channels) = out;
        }
      }
    }
    if (channel >= num_channels) return;
#pragma unroll
    for (int columns = 0; columns < kColumnTiles; ++columns) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = static_cast<int64_t>(part) * kColumns + columns * 8 + quad * 2 + i;
        float* target = fn_grad_parts + row * num_channels + channel;
        if constexpr (kPairs == 4) {
#pragma unroll
          for (int pair = 0; pair < kPairs; pair += 2) {
            reinterpret_cast<float4*>(target)[pair / 2] =
                make_float4(sums[pair][columns][i], sums[pair][columns][2 + i], sums[pair + 1][columns][i],
                            sums[pair + 1][columns][2 + i]);
          }
        } else {
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            reinterpret_cast<float2*>(target)[pair] = make_float2(sums[pair][columns][i], sums[pair][columns][2 + i]);
          }
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

// out[first ... first + kCount - 1] = the sums over the parts, one after the other; `count` numbers in a part.
template <int kCount>
__device__ __forceinline__ void add_up_parts(const float* parts, float* out, int64_t count, int64_t first,
                                             int num_parts) {
  if (first >= count) return;
  float total[kCount] = {};
#pragma unroll 8
  for (int part = 0; part < num_parts; ++part) {
    float values[kCount];
    if constexpr (kCount == 4) {
      *reinterpret_cast<float4*>(values) = *reinterpret_cast<const float4*>(parts + part * count + first);
    } else {
      values[0] = parts[part * count + first];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] += values[i];
  }
  if constexpr (kCount == 4) {
    *reinterpret_cast<float4*>(out + first) = *reinterpret_cast<const float4*>(total);
  } else {
    out[first] = total[0];
  }
}

}  // namespace tk
