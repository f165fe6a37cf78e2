// From the parts of pre-norm's product to mixes and to the layer's input: rms.cuh, mixes.cuh and streams.cuh one after
// the other. Streams are on their way while a block forms the mixes that they are multiplied by; Sinkhorn, which
// nothing in the block waits for, is left to a warp of its own.
#pragma once

#include <cstdint>

#include "copy_async.cuh"
#include "mixes.cuh"
#include "rms.cuh"
#include "streams.cuh"

namespace tk {

struct BigFuseScalars {
  float rms_eps, pre_eps, sinkhorn_eps, post_mult_value;
  int sinkhorn_repeat, num_splits;
};

// The mixes of a few neighbouring tokens of a block, by way of shared memory. Lane i of a warp forms those of stream i
// % kStreams.
template <int kStreams>
struct BlockMixes {
  static constexpr int kColumns = kStreams * (kStreams + 2);
  static constexpr int kNumSums = kColumns + 1;  // of a token: the product's, and that of the squares

  // Of a lane's stream.
  struct Constants {
    float scales[3];
    float bases[2 + kStreams];

    __device__ __forceinline__ void load(const float* scale, const float* base) {
      const int place = threadIdx.x % kStreams;
#pragma unroll
      for (int i = 0; i < 3; ++i) scales[i] = scale[i];
#pragma unroll
      for (int i = 0; i < 2 + kStreams; ++i) {
        bases[i] = base[i < 2 ? i * kStreams + place : (2 + place) * kStreams + i - 2];
      }
    }
  };

  float* totals;   // of the product's columns, token after token; then of the squares
  float* streams;  // what each token's streams are multiplied by

  // Number i of `totals`, whose first parts are asked for.
  __device__ __forceinline__ SumOfParts start_sum(const float* out_mul, const float* sqrsum, int64_t first_token, int i,
                                                  int count, int num_tokens, int num_splits) const {
    const int square = i - count * kColumns;
    SumOfParts result;
    result.parts = square < 0 ? out_mul + first_token * kColumns + i : sqrsum + first_token + square;
    result.stride = static_cast<int64_t>(num_tokens) * (square < 0 ? kColumns : 1);
    result.num_parts = i < count * kNumSums ? num_splits : 0;
    result.load(0);
    return result;
  }

  __device__ __forceinline__ float factor_of(int token, int count, int num_channels, float rms_eps) const {
    return rms_factor(totals[count * kColumns + token], num_channels, rms_eps);
  }

  __device__ __forceinline__ float mix_of(int token, int column, float factor) const {
    return add_group(0.0f, totals[token * kColumns + column], factor);
  }

  // One warp; a barrier must follow.
  __device__ __forceinline__ void make_pre(const Constants& constants, int count, int num_channels,
                                           const BigFuseScalars& scalars) const {
    for (int i = threadIdx.x % 32; i < count * kStreams; i += 32) {
      const float mix =
          mix_of(i / kStreams, i % kStreams, factor_of(i / kStreams, count, num_channels, scalars.rms_eps));
      streams[i] = pre_mix(mix, constants.scales[0], constants.bases[0], scalars.pre_eps);
    }
  }

  // The same warp: kStreams lanes a token.
  __device__ __forceinline__ void write_others(const Constants& constants, float* post, float* comb,
                                               int64_t first_token, int count, int num_channels,
                                               const BigFuseScalars& scalars) const {
    const int lane = threadIdx.x % 32, place = lane % kStreams;
#pragma unroll 1
    for (int first = 0; first < count; first += 32 / kStreams) {
      const int token = min(first + lane / kStreams, count - 1);
      const float factor = factor_of(token, count, num_channels, scalars.rms_eps);
      const float behind = post_mix(mix_of(token, kStreams + place, factor), constants.scales[1], constants.bases[1],
                                    scalars.post_mult_value);
      float row[kStreams];
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const float mix = mix_of(token, (2 + place) * kStreams + j, factor);
        row[j] = scaled_mix(mix, constants.scales[2], constants.bases[2 + j]);
      }
      sinkhorn<kStreams>(row, scalars.sinkhorn_repeat, scalars.sinkhorn_eps);
      if (first + lane / kStreams < count) {
        const int64_t at = (first_token + token) * kStreams + place;
        post[at] = behind;
#pragma unroll
        for (int j = 0; j < kStreams; ++j) comb[at * kStreams + j] = row[j];
      }
    }
  }
};

// A block takes a few tokens: kThreads threads the streams, a warp more the mixes. A thread has kCount neighbouring
// channels of every stream at a time; kCount = 8 goes through a ring of kStages stages in shared memory, each thread
// reading what it copied itself, kCount = 1 through registers.
template <int kStreams, int kCount, int kThreads, int kStages, int kMaxTokens>
struct BigFuse {
  static constexpr int kStageBytes = kStreams * kThreads * 16;
  static constexpr int kSharedBytes = kCount == 1 ? 16 : kStages * kStageBytes;
  static constexpr int kNumbers = kMaxTokens * (BlockMixes<kStreams>::kNumSums + kStreams);  // in shared memory

  __device__ static __forceinline__ void run(const float* out_mul, const float* sqrsum, const float* scale,
                                             const float* base, const void* residual, float* post, float* comb,
                                             void* layer_input, void* ring, float* numbers, int block,
                                             int tokens_of_block, int num_tokens, int hidden, float rms_eps,
                                             float pre_eps, float sinkhorn_eps, float post_mult_value,
                                             int sinkhorn_repeat, int num_splits) {
    const int thread = threadIdx.x;
    const int64_t first_token = static_cast<int64_t>(block) * tokens_of_block;
    const int count = static_cast<int>(min(static_cast<int64_t>(tokens_of_block), num_tokens - first_token));
    const BigFuseScalars scalars = {rms_eps, pre_eps, sinkhorn_eps, post_mult_value, sinkhorn_repeat, num_splits};
    const BlockMixes<kStreams> mixes = {numbers + kMaxTokens * kStreams, numbers};

    // Tile after tile of token after token
    const int num_tiles = (hidden + kThreads * kCount - 1) / (kThreads * kCount);
    const __nv_bfloat16* source =
        static_cast<const __nv_bfloat16*>(residual) + first_token * kStreams * hidden + thread * kCount;
    const uint32_t own = shared_address(ring) + thread * 16;
    int next_token = 0, next_tile = 0;
    const auto start = [&](int stage) {
      if (next_token < count) {
        if ((next_tile * kThreads + thread) * kCount < hidden) {
#pragma unroll
          for (int i = 0; i < kStreams; ++i) {
            copy_async(own + stage * kStageBytes + i * kThreads * 16,
                       source + static_cast<int64_t>(i) * hidden + next_tile * kThreads * kCount);
          }
        }
        if (++next_tile == num_tiles) {
          next_tile = 0;
          ++next_token;
          source += static_cast<int64_t>(kStreams) * hidden;
        }
      }
      commit_copies();
    };
    // What the mixes are made of comes first, before the streams fill the way to memory
    typename BlockMixes<kStreams>::Constants constants;
    if (thread >= kThreads) constants.load(scale, base);
    constexpr int kStep = kThreads + 32;
    const auto start_sum = [&](int i) {
      return mixes.start_sum(out_mul, sqrsum, first_token, i, count, num_tokens, num_splits);
    };
    SumOfParts first_sum = start_sum(thread);
    SumOfParts second_sum = start_sum(thread + kStep);
    if (kCount > 1 && thread < kThreads) {
#pragma unroll 1
      for (int stage = 0; stage < kStages; ++stage) start(stage);
    }
    const int num_sums = count * BlockMixes<kStreams>::kNumSums;
    if (thread < num_sums) mixes.totals[thread] = first_sum.finish();
    if (thread + kStep < num_sums) mixes.totals[thread + kStep] = second_sum.finish();
#pragma unroll 1
    for (int i = thread + 2 * kStep; i < num_sums; i += kStep) mixes.totals[i] = start_sum(i).finish();
    __syncthreads();
    if (thread >= kThreads) mixes.make_pre(constants, count, kStreams * hidden, scalars);
    __syncthreads();
    if (thread >= kThreads) {
      mixes.write_others(constants, post, comb, first_token, count, kStreams * hidden, scalars);
      return;
    }

    __nv_bfloat16* target = static_cast<__nv_bfloat16*>(layer_input) + first_token * hidden + thread * kCount;
    int stage = 0;
#pragma unroll 1
    for (int token = 0; token < count; ++token) {
      float mix[kStreams];
#pragma unroll
      for (int i = 0; i < kStreams; ++i) mix[i] = mixes.streams[token * kStreams + i];
#pragma unroll 1
      for (int tile = 0; tile < num_tiles; ++tile) {
        const bool has_channels = (tile * kThreads + thread) * kCount < hidden;
        if constexpr (kCount > 1) {
          uint4 values[kStreams];
          uint4 out;
          wait_for_copies<kStages - 1>();
          if (has_channels) {
#pragma unroll
            for (int i = 0; i < kStreams; ++i) values[i] = load_shared(own + stage * kStageBytes + i * kThreads * 16);
            apply_mix<kStreams, kCount>(values, mix, &out);
            *reinterpret_cast<uint4*>(target + tile * kThreads * kCount) = out;
          }
          start(stage);
          stage = stage + 1 == kStages ? 0 : stage + 1;
        } else if (has_channels) {
          const __nv_bfloat16* streams = source + static_cast<int64_t>(token) * kStreams * hidden + tile * kThreads;
          __nv_bfloat16 values[kStreams];
#pragma unroll
          for (int i = 0; i < kStreams; ++i) values[i] = streams[static_cast<int64_t>(i) * hidden];
          apply_mix<kStreams, 1>(values, mix, target + tile * kThreads);
        }
      }
      target += hidden;
    }
  }
};

}  // namespace tk
