// Normal random numbers from Philox by the method of Box and Muller.
#pragma once

#include "philox.cuh"

namespace tk {

// Two draws as two normal numbers: a radius from the first, an angle from the second.
__device__ __forceinline__ void box_muller(uint32_t first, uint32_t second, float* numbers) {
  // 2 * ln 2 * log2 would lose what matters where the first is near 1; logf keeps it
  const float square = -2.0f * logf(uniform(first));
  float radius;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(radius) : "f"(square));
  // Half turns in [-1, 1)
  const float turns = static_cast<float>(static_cast<int32_t>(second)) * 0x1p-31f;
  float sine, cosine;
  sincospif(turns, &sine, &cosine);
  numbers[0] = radius * cosine;
  numbers[1] = radius * sine;
}

__device__ __forceinline__ void normal_x4(int64_t seed, int64_t offset, int64_t index, float* numbers) {
  uint32_t words[4] = {uint32_t(uint64_t(index)), uint32_t(uint64_t(index) >> 32), uint32_t(uint64_t(offset)),
                       uint32_t(uint64_t(offset) >> 32)};
  philox(words, uint32_t(uint64_t(seed)), uint32_t(uint64_t(seed) >> 32));
  box_muller(words[0], words[1], numbers);
  box_muller(words[2], words[3], numbers + 2);
}

}  // namespace tk
