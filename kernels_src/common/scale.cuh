// Scale factors of quantised blocks: from the largest magnitude to (sf, inverse), and their three storages behind
// one pair of strides. Kinds of storage are those of `scale_kind` in casting.py: 0 fp32, 1 UE8M0 (four exponent
// bytes of neighbouring columns in an int32), 2 e4m3.
#pragma once

#include "formats.cuh"

namespace tk {

enum ScaleKind : int { kScaleFp32 = 0, kScalePacked = 1, kScaleE4m3 = 2 };

__device__ __forceinline__ float round_to_e4m3(float value) {
  return __low2float(decode_e4m3x2(encode_e4m3x2(value, 0.0f)));
}

// value / divisor, rounded as IEEE's division is where the quotient is a normal number far from the smallest: the
// remainder of the product with the rounded reciprocal is exact, and corrects it. No branch, a third of the
// instructions.
__device__ __forceinline__ float divide_normal(float value, float divisor) {
  const float inverse = 1.0f / divisor;  // of a constant
  const float quotient = __fmul_rn(value, inverse);
  return __fmaf_rn(__fmaf_rn(-quotient, divisor, value), inverse, quotient);
}

// value = data * scale, data = convert(value * inverse), for kCount blocks at a time: the kind of scale is tested
// once for all. Divisions are IEEE's; the inverse is no reciprocal of the scale.
template <int kCount>
__device__ __forceinline__ void make_scales(const float* largest, float clamp_min, float max_value, bool round_sf,
                                            int kind, float* scales, float* inverses) {
  float most[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) most[i] = fmaxf(largest[i], clamp_min);
  if (round_sf) {
    // The smallest power of two that is at least most / max_value, by comparing mantissas: the same for every normal
    // quotient.
    const uint32_t limit = bits_of(max_value);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t exponent = ((bits_of(most[i]) + 0x7fffffu - (limit & 0x7fffffu)) >> 23) + 127u - (limit >> 23);
      scales[i] = float_of(exponent << 23);
      inverses[i] = float_of((254u - exponent) << 23);
    }
  } else if (kind == kScaleE4m3) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scales[i] = round_to_e4m3(divide_normal(most[i], max_value));
      inverses[i] = __frcp_rn(scales[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scales[i] = __fdiv_rn(most[i], max_value);
      inverses[i] = __fdiv_rn(max_value, most[i]);
    }
  }
}

// Store kCount scales of one column, rows `row_step` apart. Strides count elements of the storage, num_columns its
// columns.
template <int kCount>
__device__ __forceinline__ void store_scales(void* base, int64_t row_stride, int64_t column_stride, int num_columns,
                                             int row, int row_step, int num_rows, int column, int kind,
                                             const float* scales) {
  const int storage_column = kind == kScalePacked ? column >> 2 : column;
  if (storage_column >= num_columns) return;
  const int64_t element = row * row_stride + storage_column * column_stride;
  if (kind == kScaleFp32) {
    float* target = static_cast<float*>(base) + element;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row + i * row_step < num_rows) target[i * row_step * row_stride] = scales[i];
    }
  } else {
    const int size = kind == kScalePacked ? 4 : 1;
    uint8_t* target = static_cast<uint8_t*>(base) + size * element + (kind == kScalePacked ? column & 3 : 0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t byte = kind == kScalePacked ? bits_of(scales[i]) >> 23 : encode_e4m3x2(scales[i], 0.0f);
      if (row + i * row_step < num_rows) target[size * i * row_step * row_stride] = static_cast<uint8_t>(byte);
    }
  }
}

// The bits of a scale as they are stored; decode_scale makes fp32 of them. Two functions, so that nothing waits for
// the first of many loads.
__device__ __forceinline__ uint32_t load_scale(const void* base, int64_t row_stride, int64_t column_stride, int row,
                                               int column, int kind) {
  const int storage_column = kind == kScalePacked ? column >> 2 : column;
  const int64_t element = row * row_stride + storage_column * column_stride;
  if (kind == kScaleFp32) return static_cast<const uint32_t*>(base)[element];
  return static_cast<const uint8_t*>(base)[kind == kScalePacked ? 4 * element + (column & 3) : element];
}

__device__ __forceinline__ float decode_scale(uint32_t bits, int kind) {
  if (kind == kScaleFp32) return float_of(bits);
  return kind == kScalePacked ? float_of(bits << 23) : __low2float(decode_e4m3x2(bits));
}

__device__ __forceinline__ float reciprocal(float value) { return __frcp_rn(value); }

// The exponent of a power of two.
__device__ __forceinline__ int exact_log2(int value) { return 31 - __clz(value); }

// index / size, by a shift where size is a power of two, as block sizes usually are.
__device__ __forceinline__ int divide(int index, int size) {
  return (size & (size - 1)) == 0 ? index >> exact_log2(size)
                                  : static_cast<int>(static_cast<uint32_t>(index) / static_cast<uint32_t>(size));
}

}  // namespace tk
