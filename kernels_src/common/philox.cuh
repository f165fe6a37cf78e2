// Philox4x32-10 (Salmon et al., 2011) with the streams of curand: a stream is (seed, subsequence) with offset 0.
#pragma once

#include <cstdint>

namespace tk {

// The ten rounds on a counter, in place.
__device__ __forceinline__ void philox(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t even = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t odd = uint64_t{0xCD9E8D57u} * counter[2];
    const uint32_t first = uint32_t(odd >> 32) ^ counter[1] ^ key0;
    const uint32_t third = uint32_t(even >> 32) ^ counter[3] ^ key1;
    counter[0] = first;
    counter[1] = uint32_t(odd);
    counter[2] = third;
    counter[3] = uint32_t(even);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// The first two draws of a stream.
__device__ __forceinline__ void draw_two(int64_t seed, int64_t subsequence, uint32_t* draws) {
  uint32_t counter[4] = {0u, 0u, uint32_t(uint64_t(subsequence)), uint32_t(uint64_t(subsequence) >> 32)};
  philox(counter, uint32_t(uint64_t(seed)), uint32_t(uint64_t(seed) >> 32));
  draws[0] = counter[0];
  draws[1] = counter[1];
}

// A draw as a number in (0, 1], as curand_uniform makes it.
__device__ __forceinline__ float uniform(uint32_t draw) {
  return __fadd_rn(__fmul_rn(float(draw), 0x1p-32f), 0x1p-33f);
}

}  // namespace tk
