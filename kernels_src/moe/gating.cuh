// The router's part of the expert gates: logits summed over a cluster, scores by the number of their function, choice.
#pragma once

#include <cstdint>

#include "ranking.cuh"
#include "scoring.cuh"

namespace tk {

enum Scoring { kSigmoid = 0, kSqrtSoftplus = 1, kSoftmax = 2, kIdentity = 3 };

// What ranks an expert, before the bias: the score, of softmax the logit.
__device__ __forceinline__ float ranked(float logit, int scoring) {
  if (scoring == kSigmoid) return sigmoid(logit);
  if (scoring == kSqrtSoftplus) return sqrt_softplus(logit);
  return logit;
}

// `largest` and `total` are the row's, for softmax.
__device__ __forceinline__ float score(float logit, int scoring, float largest, float total) {
  if (scoring == kSoftmax) return quotient(softmax_part(logit, largest), total);
  return ranked(logit, scoring);
}

// The sum of one number over the blocks of a cluster, in the order of their ranks.
template <int kSplit>
__device__ __forceinline__ float sum_of_cluster(const float* mine) {
  if constexpr (kSplit == 1) return *mine;
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
  float total = 0.0f;
#pragma unroll
  for (int rank = 0; rank < kSplit; ++rank) {
    uint32_t remote;
    float part;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(remote));
    total = rank == 0 ? part : total + part;
  }
  return total;
}

// Candidates of a row that lanes sort among them; rows with more, which have many ties, are searched place by place.
constexpr int kMostCandidates = 32;

// The expert of place `lane` among a row's keys, -1 from num_topk on. Takes the keys away.
template <int kSlots>
__device__ __forceinline__ int select_by_place(uint32_t* keys, int num_topk, int lane) {
  int expert = -1;
#pragma unroll 1
  for (int place = 0; place < num_topk; ++place) {
    uint32_t best = keys[0];
#pragma unroll
    for (int slot = 1; slot < kSlots; ++slot) best = max(best, keys[slot]);
    best = warp_max(best);
    uint32_t index = 0xffffffffu;
#pragma unroll
    for (int slot = kSlots - 1; slot >= 0; --slot) {
      if (keys[slot] == best) index = slot * 32 + lane;
    }
    index = warp_min(index);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (index == slot * 32 + lane) keys[slot] = 0;
    }
    if (lane == place) expert = static_cast<int>(index);
  }
  return expert;
}

// Route the rows first ... end - 1 of a tile: add up the cluster's logits, score, choose, write. Lane l of a warp has
// experts l, l + 32, ...; a warp takes kRows rows at a time, phase by phase, because one row alone leaves it waiting
// for each of some fifty reductions. `offsets` holds what is added to each expert's score, `candidates` kRows * 32 *
// kSlots keys for each warp; the first row of `topk_idx` and `topk_weights` is the tile's.
template <int kSlots, int kSplit, int kRows, int kWarps, int kPitch>
__device__ __forceinline__ void route_rows(const float* part, const float* offsets, uint64_t* candidates,
                                           int64_t* topk_idx, float* topk_weights, int first, int end, int num_experts,
                                           int num_topk, int scoring, bool renormalize, float factor, int warp,
                                           int lane) {
  candidates += warp * kRows * kSlots * 32;
#pragma unroll 1
  for (int base = first + warp; base < end; base += kWarps * kRows) {
    const float* rows[kRows];
    float values[kRows][kSlots], largest[kRows], total[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = part + min(base + r * kWarps, end - 1) * kPitch;
      largest[r] = total[r] = 0.0f;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        // Selected, not skipped: the tile has columns for experts that do not exist too
        const float logit = sum_of_cluster<kSplit>(rows[r] + slot * 32 + lane);
        values[r][slot] = slot * 32 + lane < num_experts ? logit : __int_as_float(0x7fffffff);
      }
    }
    if (scoring == kSoftmax) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float best = values[r][0];
#pragma unroll
        for (int slot = 1; slot < kSlots; ++slot) best = fmaxf(best, values[r][slot]);
        largest[r] = score_of_key(warp_max(order_key(best)));
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          const float part_of_slot = softmax_part(values[r][slot], largest[r]);
          total[r] = sum(total[r], slot * 32 + lane < num_experts ? part_of_slot : 0.0f);
        }
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) total[r] = sum(total[r], __shfl_xor_sync(0xffffffffu, total[r], distance));
      }
    }
    if (scoring == kSigmoid || scoring == kSqrtSoftplus) {
      each_slot_in_turn<kRows * kSlots>(values[0], [=](float logit) { return ranked(logit, scoring); });
    }
    uint32_t keys[kRows][kSlots], best[kRows], bound[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      best[r] = 0;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const uint32_t key = order_key(sum(values[r][slot], offsets[slot * 32 + lane]));
        keys[r][slot] = slot * 32 + lane < num_experts ? key : 0;
        best[r] = max(best[r], keys[r][slot]);
      }
      // Less one, so that the 0 of exhausted lanes is the largest number and leaves the minimum alone
      bound[r] = 0xffffffffu;
    }
#pragma unroll 1
    for (int place = 0; place < num_topk; ++place) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t top = warp_max(best[r]);
        bound[r] = min(bound[r], top - 1);
        if (best[r] == top) best[r] = 0;
      }
    }
    int num[kRows], most = 0, expert[kRows];
    uint64_t mine[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      num[r] = gather_keys<kSlots>(keys[r], bound[r] + 1, lane, candidates + r * kSlots * 32);
      most = max(most, min(num[r], kMostCandidates));
      expert[r] = 0;
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) mine[r] = lane < num[r] ? candidates[r * kSlots * 32 + lane] : 0;
#pragma unroll 1
    for (int other = 0; other < most; ++other) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (other < num[r] && candidates[r * kSlots * 32 + other] > mine[r]) ++expert[r];
      }
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      int32_t* chosen = reinterpret_cast<int32_t*>(candidates + r * kSlots * 32);
      if (lane < num[r] && expert[r] < num_topk) chosen[expert[r]] = static_cast<int32_t>(index_of_key(mine[r]));
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      expert[r] = lane < num_topk ? reinterpret_cast<const int32_t*>(candidates + r * kSlots * 32)[lane] : -1;
      if (num[r] > kMostCandidates) expert[r] = select_by_place<kSlots>(keys[r], num_topk, lane);
    }
    float weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      weight[r] = 0.0f;
      if (lane < num_topk)
        weight[r] = score(sum_of_cluster<kSplit>(rows[r] + expert[r]), scoring, largest[r], total[r]);
    }
    if (renormalize) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) total[r] = weight[r];
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) total[r] = sum(total[r], __shfl_xor_sync(0xffffffffu, total[r], distance));
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) weight[r] = quotient(weight[r], sum(total[r], 1e-20f));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = base + r * kWarps;
      if (row < end && lane < num_topk) {
        topk_idx[static_cast<int64_t>(row) * num_topk + lane] = expert[r];
        topk_weights[static_cast<int64_t>(row) * num_topk + lane] = product(weight[r], factor);
      }
    }
    __syncwarp();
  }
}

}  // namespace tk
