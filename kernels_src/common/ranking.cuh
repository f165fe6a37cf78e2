// Beside the keys of warp.cuh: the way back to scores, for sums of scores that were ranked as keys, and places within a
// ballot.
#pragma once

#include <cstdint>

#include "warp.cuh"

namespace tk {

// How many lanes before this one have their bit set.
__device__ __forceinline__ int lanes_below(uint32_t ballot) {
  uint32_t below;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
  return __popc(ballot & below);
}

// The score whose order_key this is; NaN for the key of NaN and for 0, which stands for nothing.
__device__ __forceinline__ float score_of_key(uint32_t key) {
  const uint32_t bits = key - 0x007fffffu;
  return __uint_as_float(bits ^ ((bits & 0x80000000u) != 0u ? 0x80000000u : 0xffffffffu));
}

}  // namespace tk
