// The gradients of mixing residual streams behind a layer (streams.cuh), for tokens of a block one after the other.
#pragma once

#include <cstdint>

#include "copy_async.cuh"
#include "streams.cuh"

namespace tk {

// Block `block` of `num_blocks` takes every num_blocks-th token. A thread has kCount = 8 neighbouring channels of every
// stream at a time, by way of a ring of kStages stages in shared memory, in which it reads what it copied itself;
// copies of the next token are on their way while the sums over the channels of this one are added up.
template <int kStreams, int kThreads, int kStages>
struct PostBackward {
  static constexpr int kCount = 8;
  static constexpr int kPart = kStreams <= 4 ? kCount : kCount / 2;  // channels at a time in registers
  static constexpr int kMixes = kStreams * (kStreams + 1);
  static constexpr int kRows = 2 * kStreams + 1;  // grad, x, residual
  static constexpr int kStageBytes = kRows * kThreads * 16;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kNumbers = 2 * (kMixes + kWarps * kMixes);  // in shared memory

  __device__ static __forceinline__ float load_mix(const float* post, const float* comb, int token, int i) {
    return i < kStreams ? post[static_cast<int64_t>(token) * kStreams + i]
                        : comb[static_cast<int64_t>(token) * kStreams * kStreams + i - kStreams];
  }

  // x, x_grad (num_tokens, hidden), residual, grad, residual_grad (num_tokens, kStreams, hidden) bf16; post, post_grad
  // (num_tokens, kStreams), comb, comb_grad (num_tokens, kStreams, kStreams) fp32.
  __device__ static __forceinline__ void run(const void* grad, const void* x, const void* residual, const float* post,
                                             const float* comb, void* x_grad, void* residual_grad, float* post_grad,
                                             float* comb_grad, void* ring, float* numbers, int block, int num_blocks,
                                             int num_tokens, int hidden) {
    const int thread = threadIdx.x;
    const uint32_t own = shared_address(ring) + thread * 16;
    const int num_tiles = (hidden + kThreads * kCount - 1) / (kThreads * kCount);
    const int64_t stream_step = static_cast<int64_t>(num_blocks) * kStreams * hidden;
    const int64_t token_step = static_cast<int64_t>(num_blocks) * hidden;

    const __nv_bfloat16* sources[3];
    sources[0] = static_cast<const __nv_bfloat16*>(grad) + static_cast<int64_t>(block) * kStreams * hidden;
    sources[1] = static_cast<const __nv_bfloat16*>(x) + static_cast<int64_t>(block) * hidden;
    sources[2] = static_cast<const __nv_bfloat16*>(residual) + static_cast<int64_t>(block) * kStreams * hidden;
    int next_token = block, next_channel = thread * kCount;
    const auto start = [&](int stage) {
      if (next_token < num_tokens) {
        if (next_channel < hidden) {
          const uint32_t target = own + stage * kStageBytes;
#pragma unroll
          for (int i = 0; i < kStreams; ++i) {
            copy_async(target + i * kThreads * 16, sources[0] + static_cast<int64_t>(i) * hidden + next_channel);
          }
          copy_async(target + kStreams * kThreads * 16, sources[1] + next_channel);
#pragma unroll
          for (int i = 0; i < kStreams; ++i) {
            copy_async(target + (kStreams + 1 + i) * kThreads * 16,
                       sources[2] + static_cast<int64_t>(i) * hidden + next_channel);
          }
        }
        next_channel += kThreads * kCount;
        if (next_channel >= num_tiles * kThreads * kCount) {
          next_channel = thread * kCount;
          next_token += num_blocks;
          sources[0] += stream_step;
          sources[1] += token_step;
          sources[2] += stream_step;
        }
      }
      commit_copies();
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) start(stage);

    __nv_bfloat16* x_target = static_cast<__nv_bfloat16*>(x_grad) + static_cast<int64_t>(block) * hidden;
    __nv_bfloat16* target =
        static_cast<__nv_bfloat16*>(residual_grad) + static_cast<int64_t>(block) * kStreams * hidden;
    if (thread < kMixes && block < num_tokens) numbers[thread] = load_mix(post, comb, block, thread);
    __syncthreads();
    int stage = 0, buffer = 0;
#pragma unroll 1
    for (int token = block; token < num_tokens; token += num_blocks) {
      const float* mixes = numbers + buffer * kMixes;
      float* warp_sums = numbers + 2 * kMixes + buffer * kWarps * kMixes;
      float next_mix = 0.0f;
      if (thread < kMixes && token < num_tokens - num_blocks) {
        next_mix = load_mix(post, comb, token + num_blocks, thread);
      }
      float sums[kMixes] = {};
#pragma unroll 1
      for (int channel = thread * kCount; channel < num_tiles * kThreads * kCount; channel += kThreads * kCount) {
        wait_for_copies<kStages - 1>();
        if (channel < hidden) {
          const uint32_t from = own + stage * kStageBytes;
#pragma unroll 1
          for (int part = 0; part < kCount; part += kPart) {
            add_part(from + part * 2, mixes, sums, x_target + channel + part, target + channel + part, hidden);
          }
        }
        start(stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      store_warp_sums<kMixes>(sums, thread, warp_sums);
      if (thread < kMixes) numbers[(buffer ^ 1) * kMixes + thread] = next_mix;
      __syncthreads();
      if (thread < kMixes) {
        const float total = sum_warp_sums<kMixes, kWarps>(warp_sums, thread);
        if (thread < kStreams) {
          post_grad[static_cast<int64_t>(token) * kStreams + thread] = total;
        } else {
          comb_grad[static_cast<int64_t>(token) * kStreams * kStreams + thread - kStreams] = total;
        }
      }
      buffer ^= 1;
      x_target += token_step;
      target += stream_step;
    }
  }

  __device__ static __forceinline__ void load_part(uint32_t address, uint32_t (&words)[kPart / 2]) {
    if constexpr (kPart == 8) {
      const uint4 all = load_shared(address);
      words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else {
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) words[i] = __float_as_uint(load_shared_word(address + i * 4));
    }
  }

  __device__ static __forceinline__ void store_part(const uint32_t (&words)[kPart / 2], __nv_bfloat16* target) {
    if constexpr (kPart == 8) {
      *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
    }
  }

  // kPart channels of a thread.
  __device__ static __forceinline__ void add_part(uint32_t from, const float* mixes, float (&sums)[kMixes],
                                                  __nv_bfloat16* x_target, __nv_bfloat16* target, int64_t hidden) {
    uint32_t words[kPart / 2];
    float g[kStreams][kPart];
#pragma unroll
    for (int o = 0; o < kStreams; ++o) {
      load_part(from + o * kThreads * 16, words);
      unpack_channels<kPart>(words, g[o]);
    }
#pragma unroll
    for (int i = -1; i < kStreams; ++i) {
      // Stream -1 is x, whose mixes are those of the layer's output
      float stream[kPart];
      load_part(from + (kStreams + 1 + i) * kThreads * 16, words);
      unpack_channels<kPart>(words, stream);
      float total[kPart] = {};
#pragma unroll
      for (int o = 0; o < kStreams; ++o) {
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
          sums[(i + 1) * kStreams + o] = __fmaf_rn(stream[j], g[o][j], sums[(i + 1) * kStreams + o]);
          total[j] = __fmaf_rn(mixes[(i + 1) * kStreams + o], g[o][j], total[j]);
        }
      }
      pack_channels<kPart>(total, words);
      store_part(words, i < 0 ? x_target : target + i * hidden);
    }
  }
};

}  // namespace tk
