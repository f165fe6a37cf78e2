// Arithmetic of a token's mixes: their sigmoids and Sinkhorn's normalisation, for every kernel that forms them, so that
// all give the same bits. One rounding after the other, as plain torch does: no multiplication is fused into an
// addition.
#pragma once

#include "scoring.cuh"

namespace tk {

__device__ __forceinline__ float scaled_mix(float x, float scale, float base) { return sum(product(x, scale), base); }

__device__ __forceinline__ float pre_mix(float x, float scale, float base, float eps) {
  return sum(sigmoid(scaled_mix(x, scale, base)), eps);
}

__device__ __forceinline__ float post_mix(float x, float scale, float base, float mult) {
  return product(sigmoid(scaled_mix(x, scale, base)), mult);
}

// The gradient before the scale of sigmoid(x * scale + base).
__device__ __forceinline__ float sigmoid_grad(float x, float scale, float base, float grad) {
  const float p = sigmoid(scaled_mix(x, scale, base));
  return product(product(p, difference(1.0f, p)), grad);
}

// The same of post_mix, from its result.
__device__ __forceinline__ float post_mix_grad(float post, float mult, float grad) {
  return product(product(post, difference(1.0f, quotient(post, mult))), grad);
}

// ---- Sinkhorn ------------------------------------------------------------------------------------------------------
// kSize neighbouring lanes, the first of which is a multiple of kSize, hold a matrix: lane i of them its row i. All
// lanes of a warp call these together.

// From left to right.
template <int kSize>
__device__ __forceinline__ float sum_row(const float* row) {
  float total = row[0];
#pragma unroll
  for (int j = 1; j < kSize; ++j) total = sum(total, row[j]);
  return total;
}

// Neighbouring rows, then neighbouring pairs of rows: ((0 + 1) + (2 + 3)) + ...
template <int kSize>
__device__ __forceinline__ void sum_columns(const float* row, float* sums) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    sums[j] = row[j];
#pragma unroll
    for (int distance = 1; distance < kSize; distance *= 2) {
      sums[j] = sum(sums[j], __shfl_xor_sync(0xffffffffu, sums[j], distance));
    }
  }
}

template <int kSize>
__device__ __forceinline__ void softmax_row(float* row) {
  float largest = row[0];
#pragma unroll
  for (int j = 1; j < kSize; ++j) largest = fmaxf(largest, row[j]);
#pragma unroll
  for (int j = 0; j < kSize; ++j) row[j] = softmax_part(row[j], largest);
  const float total = sum_row<kSize>(row);
#pragma unroll
  for (int j = 0; j < kSize; ++j) row[j] = quotient(row[j], total);
}

// Divide the row by its sum + eps, which is returned.
template <int kSize>
__device__ __forceinline__ float normalize_row(float* row, float eps) {
  const float divisor = sum(sum_row<kSize>(row), eps);
#pragma unroll
  for (int j = 0; j < kSize; ++j) row[j] = quotient(row[j], divisor);
  return divisor;
}

// Divide each column by its sum + eps; divisors[j] is that of column j.
template <int kSize>
__device__ __forceinline__ void normalize_columns(float* row, float eps, float* divisors) {
  sum_columns<kSize>(row, divisors);
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    divisors[j] = sum(divisors[j], eps);
    row[j] = quotient(row[j], divisors[j]);
  }
}

// Softmax of each row plus eps, columns; then repeat - 1 times rows and columns. In place.
template <int kSize>
__device__ __forceinline__ void sinkhorn(void* row_of_lane, int repeat, float eps) {
  float* row = static_cast<float*>(row_of_lane);
  float divisors[kSize];
  softmax_row<kSize>(row);
#pragma unroll
  for (int j = 0; j < kSize; ++j) row[j] = sum(row[j], eps);
  normalize_columns<kSize>(row, eps, divisors);
  for (int i = 1; i < repeat; ++i) {
    normalize_row<kSize>(row, eps);
    normalize_columns<kSize>(row, eps, divisors);
  }
}

// The gradient of sinkhorn: grad_of_lane holds the row of the result's gradient and then that of the input's;
// row_of_lane the input, which is lost. Going back, the matrix before a division is the one behind it times the
// divisor, so only divisors are kept: `divisors` is shared memory of 2 * repeat - 1 numbers a thread of the block.
template <int kSize>
__device__ __forceinline__ void sinkhorn_backward(void* row_of_lane, void* grad_of_lane, void* divisors, int thread,
                                                  int num_threads, int repeat, float eps) {
  float* row = static_cast<float*>(row_of_lane);
  float* grad = static_cast<float*>(grad_of_lane);
  float* kept = static_cast<float*>(divisors) + thread;
  const int place = thread % kSize;
  float softmax[kSize];
  float columns[kSize];
  softmax_row<kSize>(row);
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    softmax[j] = row[j];
    row[j] = sum(row[j], eps);
  }
  for (int i = 0; i < repeat; ++i) {
    if (i > 0) kept[(2 * i - 1) * num_threads] = normalize_row<kSize>(row, eps);
    normalize_columns<kSize>(row, eps, columns);
    // Each lane keeps the divisor of one column
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (j == place) kept[2 * i * num_threads] = columns[j];
    }
  }
  __syncwarp();
  float products[kSize];
  float dots[kSize];
  for (int i = repeat - 1; i >= 0; --i) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) products[j] = product(grad[j], row[j]);
    sum_columns<kSize>(products, dots);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float divisor = kept[2 * i * num_threads - place + j];
      grad[j] = quotient(difference(grad[j], dots[j]), divisor);
      row[j] = product(row[j], divisor);
    }
    if (i == 0) break;
    const float divisor = kept[(2 * i - 1) * num_threads];
#pragma unroll
    for (int j = 0; j < kSize; ++j) products[j] = product(grad[j], row[j]);
    const float dot = sum_row<kSize>(products);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      grad[j] = quotient(difference(grad[j], dot), divisor);
      row[j] = product(row[j], divisor);
    }
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) products[j] = product(grad[j], softmax[j]);
  const float dot = sum_row<kSize>(products);
#pragma unroll
  for (int j = 0; j < kSize; ++j) grad[j] = product(difference(grad[j], dot), softmax[j]);
}

}  // namespace tk
