// RMSNorm of a thread's channels, eight at a time, in the roundings of plain fp32. Tags are those of cast.cuh.
#pragma once

#include "to_e4m3.cuh"

namespace tk {

// ---- eight channels in the words of their dtype ---------------------------------------------------------------------

// fp32 values rounded to bf16.
__device__ __forceinline__ void round_x8(Bf16, const float* values, void* target) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    static_cast<__nv_bfloat162*>(target)[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  }
}

__device__ __forceinline__ void round_x8(Fp32, const float* values, void* target) {
#pragma unroll
  for (int i = 0; i < 8; ++i) static_cast<float*>(target)[i] = values[i];
}

// x = x + residual, rounded to their dtype.
__device__ __forceinline__ void add_residual_x8(Bf16, void* x, const void* residual) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __nv_bfloat162& pair = static_cast<__nv_bfloat162*>(x)[i];
    pair = __hadd2_rn(pair, static_cast<const __nv_bfloat162*>(residual)[i]);
  }
}

__device__ __forceinline__ void add_residual_x8(Fp32, void* x, const void* residual) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& value = static_cast<float*>(x)[i];
    value = __fadd_rn(value, static_cast<const float*>(residual)[i]);
  }
}

template <typename Kind>
__device__ __forceinline__ void add_residual(void* x, const void* residual) {
  add_residual_x8(Kind{}, x, residual);
}

// ---- forward --------------------------------------------------------------------------------------------------------

// sum + the squares of eight channels, one after the other. Squares of bf16 numbers are exact, so that fused or not
// the sums are the same.
__device__ __forceinline__ float add_squares_x8(Bf16, const float* values, float sum) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = __fmaf_rn(values[i], values[i], sum);
  return sum;
}

__device__ __forceinline__ float add_squares_x8(Fp32, const float* values, float sum) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = __fadd_rn(sum, __fmul_rn(values[i], values[i]));
  return sum;
}

template <typename Kind>
__device__ __forceinline__ float add_squares(const void* x, float sum) {
  float values[8];
  load_x8(Kind{}, static_cast<const uint32_t*>(x), 0, 1.0f, values);
  return add_squares_x8(Kind{}, values, sum);
}

__device__ __forceinline__ float reciprocal_rms(float sum, int count, float eps) {
  return rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(count)), eps));
}

// y = (x * rstd) * (weight * out_scale), or (x * rstd) * out_scale, rounded to x's dtype.
template <typename Kind>
__device__ __forceinline__ void normalise(const void* x, const void* weight, bool has_weight, float rstd,
                                          float out_scale, void* y) {
  float values[8], factors[8];
  load_x8(Kind{}, static_cast<const uint32_t*>(x), 0, 1.0f, values);
  if (has_weight) load_x8(Kind{}, static_cast<const uint32_t*>(weight), 0, 1.0f, factors);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float factor = has_weight ? __fmul_rn(factors[i], out_scale) : out_scale;
    values[i] = __fmul_rn(__fmul_rn(values[i], rstd), factor);
  }
  round_x8(Kind{}, values, y);
}

// ---- scales of a fused mixture of experts ---------------------------------------------------------------------------

// Store the exponent of a scale as byte `column` % 4 of word `column` / 4 of a token, in the order of rows that such a
// kernel reads: blocks of block_m tokens, padded to 128, in which 32 tokens lie four words apart.
__device__ __forceinline__ void store_mega_moe_scale(void* base, int64_t column_stride, int block_m, int token,
                                                     int column, float scale) {
  const int block = token / block_m, inside = token % block_m, padded = (block_m + 127) / 128 * 128;
  const int64_t row = static_cast<int64_t>(block) * padded + inside / 128 * 128 + inside % 32 * 4 + inside % 128 / 32;
  const int64_t word = (column >> 2) * column_stride + row;
  static_cast<uint8_t*>(base)[4 * word + (column & 3)] = static_cast<uint8_t>(bits_of(scale) >> 23);
}

// ---- backward -------------------------------------------------------------------------------------------------------

// For eight channels: sum + (x * rstd) * (grad * out_scale * weight).
template <typename Kind>
__device__ __forceinline__ float add_projection(const void* x, const void* grad, const void* weight, bool has_weight,
                                                float rstd, float out_scale, float sum) {
  float values[8], grads[8], factors[8];
  load_x8(Kind{}, static_cast<const uint32_t*>(x), 0, 1.0f, values);
  load_x8(Kind{}, static_cast<const uint32_t*>(grad), 0, 1.0f, grads);
  if (has_weight) load_x8(Kind{}, static_cast<const uint32_t*>(weight), 0, 1.0f, factors);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float scaled = __fmul_rn(grads[i], out_scale);
    const float weighted = has_weight ? __fmul_rn(scaled, factors[i]) : scaled;
    sum = __fadd_rn(sum, __fmul_rn(__fmul_rn(values[i], rstd), weighted));
  }
  return sum;
}

// Eight channels of the gradient of x: (weighted grad - x * rstd * mean) * rstd [+ residual], rounded. Adds the
// gradient of the weight, x * rstd * grad * out_scale, to weight_sums.
template <typename Kind>
__device__ __forceinline__ void norm_gradient(const void* x, const void* grad, const void* weight, bool has_weight,
                                              const void* residual, bool has_residual, float rstd, float out_scale,
                                              float mean, void* x_grad, void* weight_sums) {
  float values[8], grads[8], factors[8], residuals[8];
  load_x8(Kind{}, static_cast<const uint32_t*>(x), 0, 1.0f, values);
  load_x8(Kind{}, static_cast<const uint32_t*>(grad), 0, 1.0f, grads);
  if (has_weight) load_x8(Kind{}, static_cast<const uint32_t*>(weight), 0, 1.0f, factors);
  if (has_residual) load_x8(Kind{}, static_cast<const uint32_t*>(residual), 0, 1.0f, residuals);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float scaled = __fmul_rn(grads[i], out_scale), normal = __fmul_rn(values[i], rstd);
    const float weighted = has_weight ? __fmul_rn(scaled, factors[i]) : scaled;
    if (has_weight) {
      float& sum = static_cast<float*>(weight_sums)[i];
      sum = __fadd_rn(sum, __fmul_rn(normal, scaled));
    }
    values[i] = __fmul_rn(__fsub_rn(weighted, __fmul_rn(normal, mean)), rstd);
    if (has_residual) values[i] = __fadd_rn(values[i], residuals[i]);
  }
  round_x8(Kind{}, values, x_grad);
}

}  // namespace tk
