// From the parts of pre-norm's product to mixes, for every kernel that does it, so that all give the same bits.
#pragma once

#include <cstdint>

#include "scoring.cuh"

namespace tk {

// The sum of num_parts numbers that lie `stride` apart, first to last, eight at a time. In two steps, so that the first
// eight can be on their way while a thread does other things.
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

// kCount neighbouring mixes of a token, with the sums that they are made of.
template <int kCount>
struct ReducePartials {
  static constexpr int kLoads = 8;

  struct Part {
    float mul[kCount];
    float squares;
  };

  __device__ static __forceinline__ void load(const float* source, float* target) {
    if constexpr (kCount == 4) {
      *reinterpret_cast<float4*>(target) = *reinterpret_cast<const float4*>(source);
    } else {
      target[0] = source[0];
    }
  }

  __device__ static __forceinline__ void store(float* target, const float* source) {
    if constexpr (kCount == 4) {
      *reinterpret_cast<float4*>(target) = *reinterpret_cast<const float4*>(source);
    } else {
      target[0] = source[0];
    }
  }

  // parts_mul (num_parts, num_tokens, num_groups, num_columns), parts_squares (num_parts, num_tokens, num_groups);
  // out_mul, sqrsum without the first size; out (num_tokens, num_columns).
  __device__ static __forceinline__ void run(const float* parts_mul, const float* parts_squares, float* out_mul,
                                             float* sqrsum, float* out, int64_t token, int column, int64_t num_tokens,
                                             int num_groups, int num_columns, int num_parts, int size, float eps) {
    float mixes[kCount] = {};
    for (int group = 0; group < num_groups; ++group) {
      const int64_t row = token * num_groups + group, num_rows = num_tokens * num_groups;
      const float* mul = parts_mul + row * num_columns + column;
      const float* squares = parts_squares + row;
      Part total = {};
#pragma unroll 1
      for (int first = 0; first < num_parts; first += kLoads) {
        Part parts[kLoads] = {};
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (first + i < num_parts) {
            load(mul + (first + i) * num_rows * num_columns, parts[i].mul);
            parts[i].squares = squares[(first + i) * num_rows];
          }
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
#pragma unroll
          for (int j = 0; j < kCount; ++j) total.mul[j] = sum(total.mul[j], parts[i].mul[j]);
          total.squares = sum(total.squares, parts[i].squares);
        }
      }
      const float factor = rms_factor(total.squares, size, eps);
#pragma unroll
      for (int j = 0; j < kCount; ++j) mixes[j] = add_group(mixes[j], total.mul[j], factor);
      store(out_mul + row * num_columns + column, total.mul);
      if (column == 0) sqrsum[row] = total.squares;
    }
    store(out + token * num_columns + column, mixes);
  }
};

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
