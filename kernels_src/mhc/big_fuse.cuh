// A token's way from the parts of pre-norm's product to its mixes and to the layer's input: rms.cuh, mixes.cuh and
// streams.cuh one after the other. One warp forms the mixes while the streams are on their way to the others; these
// wait for what they multiply by, not for Sinkhorn.
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

// The mixes of one token by one warp. `shared`: kStreams * (kStreams + 2) numbers, the first kStreams of which become
// the mixes of the streams before the block's barrier, in which the warp takes part.
template <int kStreams>
__device__ __forceinline__ void make_mixes(const float* out_mul, const float* sqrsum, const float* scale,
                                           const float* base, float* post, float* comb, float* shared, int64_t token,
                                           int num_tokens, int num_channels, const BigFuseScalars& scalars) {
  constexpr int kColumns = kStreams * (kStreams + 2);
  const int lane = threadIdx.x % 32;
  // All loads first
  const int place = lane % kStreams;
  const float scales[3] = {scale[0], scale[1], scale[2]};
  float bases[2 + kStreams];
#pragma unroll
  for (int j = 0; j < 2; ++j) bases[j] = base[j * kStreams + place];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) bases[2 + j] = base[(2 + place) * kStreams + j];
  float totals[(kColumns + 31) / 32];
  float squares;
#pragma unroll
  for (int i = 0; i < (kColumns + 31) / 32; ++i) {
    const float* parts = out_mul + token * kColumns + min(i * 32 + lane, kColumns - 1);
    const int64_t stride = static_cast<int64_t>(num_tokens) * kColumns;
    sum_parts_of_two(parts, stride, sqrsum + token, num_tokens, scalars.num_splits, &totals[i], &squares);
  }
  const float factor = rms_factor(squares, num_channels, scalars.rms_eps);
#pragma unroll
  for (int i = 0; i < (kColumns + 31) / 32; ++i) {
    if (i * 32 + lane < kColumns) shared[i * 32 + lane] = add_group(0.0f, totals[i], factor);
  }
  __syncwarp();
  const float pre = pre_mix(shared[place], scales[0], bases[0], scalars.pre_eps);
  const float behind = post_mix(shared[kStreams + place], scales[1], bases[1], scalars.post_mult_value);
  float row[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) row[j] = scaled_mix(shared[(2 + place) * kStreams + j], scales[2], bases[2 + j]);
  __syncwarp();
  if (lane < kStreams) shared[lane] = pre;
  __syncthreads();
  sinkhorn<kStreams>(row, scalars.sinkhorn_repeat, scalars.sinkhorn_eps);
  if (lane < kStreams) {
    post[token * kStreams + lane] = behind;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) comb[(token * kStreams + lane) * kStreams + j] = row[j];
  }
}

// A block takes one token: kThreads threads the streams, a warp more the mixes. A thread has kCount neighbouring
// channels of every stream at a time; kCount = 8 goes through a ring of kStages stages in shared memory, each thread
// reading what it copied itself, kCount = 1 through registers.
template <int kStreams, int kCount, int kThreads, int kStages>
struct BigFuse {
  static constexpr int kStageBytes = kStreams * kThreads * 16;
  static constexpr int kSharedBytes = kCount == 1 ? 16 : kStages * kStageBytes;

  __device__ static __forceinline__ void run(const float* out_mul, const float* sqrsum, const float* scale,
                                             const float* base, const void* residual, float* post, float* comb,
                                             void* layer_input, void* ring, float* mixes, int token, int num_tokens,
                                             int hidden, float rms_eps, float pre_eps, float sinkhorn_eps,
                                             float post_mult_value, int sinkhorn_repeat, int num_splits) {
    const int thread = threadIdx.x;
    if (thread >= kThreads) {
      const BigFuseScalars scalars = {rms_eps, pre_eps, sinkhorn_eps, post_mult_value, sinkhorn_repeat, num_splits};
      make_mixes<kStreams>(out_mul, sqrsum, scale, base, post, comb, mixes, token, num_tokens, kStreams * hidden,
                           scalars);
      return;
    }
    const __nv_bfloat16* source =
        static_cast<const __nv_bfloat16*>(residual) + static_cast<int64_t>(token) * kStreams * hidden + thread * kCount;
    __nv_bfloat16* target =
        static_cast<__nv_bfloat16*>(layer_input) + static_cast<int64_t>(token) * hidden + thread * kCount;
    const uint32_t own = shared_address(ring) + thread * 16;
    const int num_tiles = (hidden + kThreads * kCount - 1) / (kThreads * kCount);
    const auto start = [&](int tile, int stage) {
      if (tile * kThreads * kCount + thread * kCount < hidden) {
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
          copy_async(own + stage * kStageBytes + i * kThreads * 16,
                     source + static_cast<int64_t>(i) * hidden + tile * kThreads * kCount);
        }
      }
      commit_copies();
    };
    if constexpr (kCount > 1) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) start(stage, stage);
    }
    __syncthreads();
    float mix[kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) mix[i] = mixes[i];
    int stage = 0;
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      const bool has_channels = tile * kThreads * kCount + thread * kCount < hidden;
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
        start(tile + kStages, stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
      } else if (has_channels) {
        __nv_bfloat16 values[kStreams];
#pragma unroll
        for (int i = 0; i < kStreams; ++i) values[i] = source[static_cast<int64_t>(i) * hidden + tile * kThreads];
        apply_mix<kStreams, 1>(values, mix, target + tile * kThreads);
      }
    }
  }
};

}  // namespace tk
