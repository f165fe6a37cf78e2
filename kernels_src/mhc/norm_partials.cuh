// The product of pre-norm, residual x fn^T in tf32 with fp32 sums, and each token's sum of squares, over one slice of
// the channels. bf16 is exact in tf32, so the values unpacked for the squares are the left operand as they are.
#pragma once

#include <cstdint>

#include "copy_async.cuh"
#include "tf32.cuh"

namespace tk {

// One block: kWarps * kRowTiles * 16 tokens times kColumnTiles * 8 rows of fn, over the channels of one split. Channels
// pass through a ring of kStages stages of kDepth in shared memory. Chunks are 16 bytes and are stored with their index
// xor-ed by the row, so that neither the copies nor the loads meet bank conflicts.
//
// Which channel a lane holds does not matter as long as both operands agree: lane t of a quad takes 8 neighbours of the
// 32 channels of a step, 16 bytes of residual and 32 of fn, and gives two of them to each of four products.
template <int kColumnTiles, int kRowTiles, int kWarps, int kDepth, int kStages>
struct NormPartials {
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRows = kRowTiles * 16;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kColumns = kColumnTiles * 8;
  static constexpr int kResidualBytes = kRows * kDepth * 2;
  static constexpr int kFnBytes = kColumns * kDepth * 4;
  static constexpr int kStageBytes = kResidualBytes + kFnBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kResidualChunks = kDepth / 8;  // of a row
  static constexpr int kFnChunks = kDepth / 4;

  __device__ static __forceinline__ uint32_t residual_offset(int row, int chunk) {
    return (row * kResidualChunks + (chunk ^ ((row & 1) * (kResidualChunks >= 8 ? 4 : 0)))) * 16;
  }
  __device__ static __forceinline__ uint32_t fn_offset(int column, int chunk) {
    return kResidualBytes + (column * kFnChunks + (chunk ^ (column & 1))) * 16;
  }

  // Start the copies of one stage: channels first_channel ... of this block's tokens and of fn.
  __device__ static __forceinline__ void start_copies(uint32_t stage, const char* residual, const char* fn,
                                                      int64_t first_row, int num_tokens, int num_channels,
                                                      int first_channel, int end_channel) {
    const int thread = threadIdx.x;
    const int64_t row_bytes = static_cast<int64_t>(num_channels) * 2;
    {
      const int chunk = thread % kResidualChunks;
      const bool has_channels = first_channel + chunk * 8 < end_channel;
      constexpr int kRowStep = 32 / kResidualChunks;  // a warp copies the rows that it will read
      const int row = thread / 32 * kWarpRows + thread % 32 / kResidualChunks;
      const char* source = residual + (first_row + row) * row_bytes + (first_channel + chunk * 8) * 2;
#pragma unroll
      for (int i = 0; i < kWarpRows / kRowStep; ++i) {
        const bool is_valid = has_channels && first_row + row + i * kRowStep < num_tokens;
        copy_async(stage + residual_offset(row + i * kRowStep, chunk), is_valid ? source : residual, is_valid);
        source += kRowStep * row_bytes;
      }
    }
#pragma unroll
    for (int i = 0; i < (kColumns * kFnChunks + kThreads - 1) / kThreads; ++i) {
      const int index = i * kThreads + thread;
      const int column = index / kFnChunks, chunk = index % kFnChunks;
      if (kColumns * kFnChunks % kThreads == 0 || column < kColumns) {
        const bool is_valid = first_channel + chunk * 4 < end_channel;
        const char* source = fn + (static_cast<int64_t>(column) * num_channels + first_channel + chunk * 4) * 4;
        copy_async(stage + fn_offset(column, chunk), is_valid ? source : fn, is_valid);
      }
    }
  }

  __device__ static __forceinline__ void add_stage(uint32_t stage, float (&sums)[kRowTiles][kColumnTiles][4],
                                                   float (&squares)[kRowTiles * 2]) {
    // First over the stage: many small squares would vanish in a large sum
    float stage_squares[kRowTiles * 2] = {};
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int first_row = threadIdx.x / 32 * kWarpRows + group;
#pragma unroll(kColumnTiles* kRowTiles > 8 ? 1 : kDepth / 32)
    for (int step = 0; step < kDepth / 32; ++step) {
      uint4 x[kRowTiles * 2];
#pragma unroll
      for (int i = 0; i < kRowTiles * 2; ++i)
        x[i] = load_shared(stage + residual_offset(first_row + i * 8, step * 4 + quad));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 weights[kColumnTiles];
#pragma unroll
        for (int tile = 0; tile < kColumnTiles; ++tile) {
          weights[tile] = load_shared(stage + fn_offset(tile * 8 + group, step * 8 + quad * 2 + half));
        }
#pragma unroll
        for (int word = 0; word < 2; ++word) {
#pragma unroll
          for (int rows = 0; rows < kRowTiles; ++rows) {
            const uint4 upper = x[rows * 2], lower = x[rows * 2 + 1];
            const uint32_t upper_pair = half ? (word ? upper.w : upper.z) : (word ? upper.y : upper.x);
            const uint32_t lower_pair = half ? (word ? lower.w : lower.z) : (word ? lower.y : lower.x);
            const uint32_t a[4] = {low_half(upper_pair), low_half(lower_pair), high_half(upper_pair),
                                   high_half(lower_pair)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float value = __uint_as_float(a[i]);
              stage_squares[rows * 2 + i % 2] = __fmaf_rn(value, value, stage_squares[rows * 2 + i % 2]);
            }
#pragma unroll
            for (int tile = 0; tile < kColumnTiles; ++tile) {
              const uint4 b = weights[tile];
              multiply_tf32(sums[rows][tile], a, round_to_tf32(word ? b.z : b.x), round_to_tf32(word ? b.w : b.y));
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) squares[i] += stage_squares[i];
  }

  // residual (num_tokens, num_channels) bf16; fn (kColumns, num_channels) fp32; out_mul (splits, num_tokens, kColumns),
  // sqrsum (splits, num_tokens) fp32. Channels come in multiples of 8, rows on 16 bytes.
  __device__ static __forceinline__ void run(const void* residual, const void* fn, float* out_mul, float* sqrsum,
                                             void* shared, int num_tokens, int num_channels, int tile, int split,
                                             int num_splits) {
    const uint32_t ring = shared_address(shared);
    const int64_t first_row = static_cast<int64_t>(tile) * kRows;
    const int num_blocks = (num_channels + kDepth - 1) / kDepth;
    const int first = static_cast<int>(static_cast<int64_t>(num_blocks) * split / num_splits);
    const int end = static_cast<int>(static_cast<int64_t>(num_blocks) * (split + 1) / num_splits);
    const auto start = [&](int block) {
      if (block < end) {
        start_copies(ring + (block - first) % kStages * kStageBytes, static_cast<const char*>(residual),
                     static_cast<const char*>(fn), first_row, num_tokens, num_channels, block * kDepth, num_channels);
      }
      commit_copies();
    };
    const bool has_tokens = first_row + threadIdx.x / 32 * kWarpRows < num_tokens;  // this warp
    float sums[kRowTiles][kColumnTiles][4] = {};
    float squares[kRowTiles * 2] = {};
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) start(first + stage);
#pragma unroll 1
    for (int block = first; block < end; ++block) {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // this stage is there for all, and all have read the one before, which is filled anew now
      start(block + kStages - 1);
      if (has_tokens) add_stage(ring + (block - first) % kStages * kStageBytes, sums, squares);
    }
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
#pragma unroll
    for (int i = 0; i < kRowTiles * 2; ++i) {
      squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], 1);
      squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], 2);
      const int64_t row = first_row + threadIdx.x / 32 * kWarpRows + i * 8 + group;
      if (row < num_tokens) {
        const int64_t at = static_cast<int64_t>(split) * num_tokens + row;
        if (quad == 0) sqrsum[at] = squares[i];
#pragma unroll
        for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
          const float* pair = &sums[i / 2][column_tile][i % 2 * 2];
          *reinterpret_cast<float2*>(out_mul + at * kColumns + column_tile * 8 + quad * 2) =
              make_float2(pair[0], pair[1]);
        }
      }
    }
  }
};

// The same for any number of channels at any address: a warp takes kTokens tokens, its lanes every 32nd channel.
template <int kColumns, int kTokens>
struct NormPartialsGeneral {
  static constexpr int kColumnsAtOnce = 8;

  __device__ static __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
  }

  __device__ static __forceinline__ void run(const void* residual_address, const float* fn, float* out_mul,
                                             float* sqrsum, int num_tokens, int num_channels, int64_t first_token,
                                             int split, int num_splits) {
    const uint16_t* residual = static_cast<const uint16_t*>(residual_address);
    const int lane = threadIdx.x % 32;
    const int first = static_cast<int>(static_cast<int64_t>(num_channels) * split / num_splits);
    const int end = static_cast<int>(static_cast<int64_t>(num_channels) * (split + 1) / num_splits);
    const int64_t first_out = static_cast<int64_t>(split) * num_tokens + first_token;
#pragma unroll 1
    for (int first_column = 0; first_column < kColumns; first_column += kColumnsAtOnce) {
      float sums[kTokens][kColumnsAtOnce] = {};
      float squares[kTokens] = {};
#pragma unroll 1
      for (int channel = first + lane; channel < end; channel += 32) {
        float weights[kColumnsAtOnce];
#pragma unroll
        for (int i = 0; i < kColumnsAtOnce; ++i) {
          weights[i] = as_tf32(fn[static_cast<int64_t>(first_column + i) * num_channels + channel]);
        }
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
          if (first_token + token < num_tokens) {
            const uint32_t bits = residual[(first_token + token) * num_channels + channel];
            const float value = __uint_as_float(low_half(bits));
            squares[token] = __fmaf_rn(value, value, squares[token]);
#pragma unroll
            for (int i = 0; i < kColumnsAtOnce; ++i) sums[token][i] = __fmaf_rn(value, weights[i], sums[token][i]);
          }
        }
      }
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        const float square = sum_of_warp(squares[token]);
        if (lane == 0 && first_column == 0 && first_token + token < num_tokens) sqrsum[first_out + token] = square;
#pragma unroll
        for (int i = 0; i < kColumnsAtOnce; ++i) {
          const float sum = sum_of_warp(sums[token][i]);
          if (lane == i && first_token + token < num_tokens) {
            out_mul[(first_out + token) * kColumns + first_column + i] = sum;
          }
        }
      }
    }
  }
};

}  // namespace tk
