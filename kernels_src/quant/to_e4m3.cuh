// The end of kernels that compute, then cast to e4m3 with fp32 or packed scales: fewer instructions than casts that are
// bound by memory need, as these kernels are bound by both.
#pragma once

#include "cast.cuh"
#include "scale.cuh"

namespace tk {

// A kernel file says by it how a helper uses a tensor that may be null, whose pointer it is handed elsewhere.
__device__ __forceinline__ void touch(const void*) {}

// Four e4m3 bytes in one word, without moves between the two conversions.
__device__ __forceinline__ uint32_t pack_e4m3x4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint32_t word;
  asm("{\n\t.reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
#else
  const float values[4] = {a, b, c, d};
  return encode_e4m3x4(values);
#endif
}

// words = e4m3(values * factor), eight values of a kind at a time.
template <typename Kind, int N>
__device__ __forceinline__ void scale_to_e4m3(const void* values, float factor, void* words) {
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    float scaled[8];
    load_x8(Kind{}, static_cast<const uint32_t*>(values), block, factor, scaled);
    uint32_t* target = static_cast<uint32_t*>(words) + 2 * block;
    target[0] = pack_e4m3x4(scaled[0], scaled[1], scaled[2], scaled[3]);
    target[1] = pack_e4m3x4(scaled[4], scaled[5], scaled[6], scaled[7]);
  }
}

// Store a scale that is fp32, or of which the exponent alone goes to byte `column` of a row of packed words.
__device__ __forceinline__ void store_scale(void* base, int64_t row_stride, int64_t column_stride, int num_columns,
                                            int row, int column, bool is_packed, float scale) {
  const int storage_column = is_packed ? column >> 2 : column;
  if (storage_column >= num_columns) return;
  float* target = static_cast<float*>(base) + (row * row_stride + storage_column * column_stride);
  if (is_packed) {
    reinterpret_cast<uint8_t*>(target)[column & 3] = static_cast<uint8_t>(bits_of(scale) >> 23);
  } else {
    *target = scale;
  }
}

}  // namespace tk
