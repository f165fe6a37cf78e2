// From the parts of pre-norm's product to mixes, for every kernel that does it, so that all give the same bits.
#pragma once

#include <cstdint>

#include "scoring.cuh"

namespace tk {

// The sums of num_parts numbers that lie `stride` apart, first to last, of two arrays. Eight of each are on their way
// at a time.
__device__ __forceinline__ void sum_parts_of_two(const float* first_parts, int64_t first_stride,
                                                 const float* second_parts, int64_t second_stride, int num_parts,
                                                 float* first_total, float* second_total) {
  constexpr int kLoads = 8;
  float totals[2] = {};
#pragma unroll 1
  for (int first = 0; first < num_parts; first += kLoads) {
    float values[2][kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool is_part = first + i < num_parts;
      values[0][i] = is_part ? first_parts[(first + i) * first_stride] : 0.0f;
      values[1][i] = is_part ? second_parts[(first + i) * second_stride] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      totals[0] = sum(totals[0], values[0][i]);
      totals[1] = sum(totals[1], values[1][i]);
    }
  }
  *first_total = totals[0];
  *second_total = totals[1];
}

// The same of one array, cut in two, so that the first loads can be on their way while a thread does other things.
struct SumOfParts {
  static constexpr int kLoads = 8;
  const float* parts;
  int64_t stride;
  int num_parts;
  float values[kLoads];

  __device__ __forceinline__ void load(int first) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) values[i] = first + i < num_parts ? parts[(first + i) * stride] : 0.0f;
  }

  // After load(0).
  __device__ __forceinline__ float finish() {
    float total = 0.0f;
#pragma unroll 1
    for (int first = 0;;) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) total = sum(total, values[i]);
      first += kLoads;
      if (first >= num_parts) return total;
      load(first);
    }
  }
};

// 1 / sqrt(sqrsum / size + eps), with the bits of torch's rsqrt
__device__ __forceinline__ float rms_factor(float sqrsum, int size, float eps) {
  return rsqrtf(sum(quotient(sqrsum, static_cast<float>(size)), eps));
}

// Add one more group's share to a mix, which starts at zero.
__device__ __forceinline__ float add_group(float mix, float out_mul, float factor) {
  return sum(mix, product(out_mul, factor));
}

// The sum over kLanes neighbouring lanes, for all of them. All lanes of a warp call it together.
template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    value = sum(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// The gradient of sqrsum; `dot` is the sum over the columns of the gradient times out_mul.
__device__ __forceinline__ float sqrsum_grad(float dot, float factor, float sqrsum, int size, float eps) {
  const float squares = sum(sqrsum, product(eps, static_cast<float>(size)));
  return product(-0.5f, quotient(product(dot, factor), squares));
}

}  // namespace tk
