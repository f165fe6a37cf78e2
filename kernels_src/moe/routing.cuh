// Arithmetic of routing on single indices.
#pragma once

#include <cstdint>

namespace tk {

// 64-bit division costs some hundred instructions, and indices hardly ever need it.
__device__ __forceinline__ int64_t divide(int64_t value, int64_t divisor) {
  if (((value | divisor) >> 32) == 0) return static_cast<uint32_t>(value) / static_cast<uint32_t>(divisor);
  return value / divisor;
}

// A data-parallel group is num_tp_ranks neighbouring GPUs; the index on this rank drops the experts of the group's
// other GPUs.
__device__ __forceinline__ int64_t mask_index_by_tp(int64_t index, int num_experts_per_gpu, int tp_rank,
                                                    int num_tp_ranks) {
  if (index < 0) return -1;
  const int64_t per_gpu = num_experts_per_gpu;
  const int64_t gpu = divide(index, per_gpu);
  const int64_t group = divide(gpu, num_tp_ranks);
  if (gpu - group * num_tp_ranks != tp_rank) return -1;
  // Experts of earlier groups on this rank, and the place within the GPU
  return group * per_gpu + (index - gpu * per_gpu);
}

}  // namespace tk
