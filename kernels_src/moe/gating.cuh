// The router's part of the expert gates: logits summed over a cluster, and scores by the number of their function.
#pragma once

#include <cstdint>

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

}  // namespace tk
