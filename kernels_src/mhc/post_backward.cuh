// The gradients of mixing residual streams behind a layer (streams.cuh), and their sums over a token's channels.
#pragma once

#include <cstdint>

#include "copy_async.cuh"
#include "streams.cuh"

namespace tk {

// A block takes a token. A thread has kCount = 8 neighbouring channels of every stream at a time, by way of a ring of
// kStages stages in shared memory, in which it reads what it copied itself.
template <int kStreams, int kThreads, int kStages>
struct PostBackward {
  static constexpr int kCount = 8;
  static constexpr int kPart = kStreams <= 4 ? kCount : kCount / 2;  // channels at a time in registers
  static constexpr int kMixes = kStreams * (kStreams + 1);
  static constexpr int kRows = 2 * kStreams + 1;  // grad, x, residual
  static constexpr int kStageBytes = kRows * kThreads * 16;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kNumbers = (1 + kWarps) * kMixes;  // in shared memory

  // x, x_grad (num_tokens, hidden), residual, grad, residual_grad (num_tokens, kStreams, hidden) bf16; post, post_grad
  // (num_tokens, kStreams), comb, comb_grad (num_tokens, kStreams, kStreams) fp32.
  __device__ static __forceinline__ void run(const void* grad, const void* x, const void* residual, const float* post,
                                             const float* comb, void* x_grad, void* residual_grad, float* post_grad,
                                             float* comb_grad, void* ring, float* mixes, int64_t token, int hidden) {
    const int thread = threadIdx.x;
    const uint32_t own = shared_address(ring) + thread * 16;
    const int end = (hidden + kThreads * kCount - 1) / (kThreads * kCount) * kThreads * kCount;
    const __nv_bfloat16* grad_source = static_cast<const __nv_bfloat16*>(grad) + token * kStreams * hidden;
    const __nv_bfloat16* x_source = static_cast<const __nv_bfloat16*>(x) + token * hidden;
    const __nv_bfloat16* source = static_cast<const __nv_bfloat16*>(residual) + token * kStreams * hidden;
    int next = thread * kCount;
    const auto start = [&](int stage) {
      if (next < hidden) {
        const uint32_t target = own + stage * kStageBytes;
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
          copy_async(target + i * kThreads * 16, grad_source + static_cast<int64_t>(i) * hidden + next);
        }
        copy_async(target + kStreams * kThreads * 16, x_source + next);
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
          copy_async(target + (kStreams + 1 + i) * kThreads * 16, source + static_cast<int64_t>(i) * hidden + next);
        }
      }
      next += kThreads * kCount;
      commit_copies();
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) start(stage);

    if (thread < kStreams) {
      mixes[thread] = post[token * kStreams + thread];
    } else if (thread < kMixes) {
      mixes[thread] = comb[token * kStreams * kStreams + thread - kStreams];
    }
    __syncthreads();
    __nv_bfloat16* x_target = static_cast<__nv_bfloat16*>(x_grad) + token * hidden;
    __nv_bfloat16* target = static_cast<__nv_bfloat16*>(residual_grad) + token * kStreams * hidden;
    float sums[kMixes] = {};
    int stage = 0;
#pragma unroll 1
    for (int channel = thread * kCount; channel < end; channel += kThreads * kCount) {
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

    float* warp_sums = mixes + kMixes;
    store_warp_sums<kMixes>(sums, thread, warp_sums);
    __syncthreads();
    if (thread < kMixes) {
      const float total = sum_warp_sums<kMixes, kWarps>(warp_sums, thread);
      if (thread < kStreams) {
        post_grad[token * kStreams + thread] = total;
      } else {
        comb_grad[token * kStreams * kStreams + thread - kStreams] = total;
      }
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
