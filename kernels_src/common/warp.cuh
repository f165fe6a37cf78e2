// Reductions over the 32 lanes of a warp.
#pragma once

#include <cstdint>

namespace tk {

__device__ __forceinline__ uint32_t warp_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }
__device__ __forceinline__ uint32_t warp_min(uint32_t value) { return __reduce_min_sync(0xffffffffu, value); }

// How many of a ballot's lanes come before this one.
__device__ __forceinline__ int lanes_before(uint32_t ballot) {
  uint32_t before;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(before));
  return __popc(ballot & before);
}

// An unsigned number above 0 that orders as scores do: NaN lowest, then -inf; both zeros are equal. Adding 0x7fffff
// moves the NaNs of either sign below -inf, where the maximum makes them one.
__device__ __forceinline__ uint32_t order_key(float score) {
  const int32_t bits = __float_as_int(score + 0.0f);
  const uint32_t key = static_cast<uint32_t>(bits ^ ((bits >> 31) | static_cast<int32_t>(0x80000000u)));
  return max(key + 0x007fffffu, 0x00fffffdu);
}

// A key with its index: orders by key, ties by the smaller index.
__device__ __forceinline__ uint64_t key_with_index(uint32_t key, int32_t index) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~index);
}

__device__ __forceinline__ int64_t index_of_key(uint64_t key) {
  return static_cast<uint32_t>(~static_cast<uint32_t>(key));
}

// Gather the keys of at least `bound` of all lanes, lane after lane, with their indices (lane + 32 * slot). Returns
// how many. The sum over lanes comes before the stores: a ballot and a population count for each slot took half of
// the kernel's instructions.
template <int kSlots>
__device__ __forceinline__ int gather_keys(const uint32_t* keys, uint32_t bound, int lane, void* candidates) {
  int count = 0;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) count += keys[slot] >= bound ? 1 : 0;
  int sum = count;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += other;
  }
  uint64_t* target = static_cast<uint64_t*>(candidates) + (sum - count);
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    if (keys[slot] >= bound) *target++ = key_with_index(keys[slot], slot * 32 + lane);
  }
  return __shfl_sync(0xffffffffu, sum, 31);
}

}  // namespace tk
