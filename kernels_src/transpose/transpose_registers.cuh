// Transposes of small square blocks in a thread's registers, by byte permutation: a row of the block is 16 bytes on
// either side.
#pragma once

#include <cstdint>

namespace tk {

// 4 x 4 elements of 4 bytes.
__device__ __forceinline__ void transpose_registers_b4(const void* source, void* target) {
  const uint32_t* in = static_cast<const uint32_t*>(source);
  uint32_t* out = static_cast<uint32_t*>(target);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) out[4 * j + i] = in[4 * i + j];
  }
}

// 8 x 8 elements of 2 bytes: two rows give the halves of an output word.
__device__ __forceinline__ void transpose_registers_b2(const void* source, void* target) {
  const uint32_t* in = static_cast<const uint32_t*>(source);
  uint32_t* out = static_cast<uint32_t*>(target);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t upper = in[4 * (2 * i) + j], lower = in[4 * (2 * i + 1) + j];
      out[4 * (2 * j) + i] = __byte_perm(upper, lower, 0x5410);
      out[4 * (2 * j + 1) + i] = __byte_perm(upper, lower, 0x7632);
    }
  }
}

// 16 x 16 elements of 1 byte: 4 x 4 bytes at a time, eight permutations each.
__device__ __forceinline__ void transpose_registers_b1(const void* source, void* target) {
  const uint32_t* in = static_cast<const uint32_t*>(source);
  uint32_t* out = static_cast<uint32_t*>(target);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t row0 = in[4 * (4 * i) + j], row1 = in[4 * (4 * i + 1) + j];
      const uint32_t row2 = in[4 * (4 * i + 2) + j], row3 = in[4 * (4 * i + 3) + j];
      const uint32_t low01 = __byte_perm(row0, row1, 0x5140), high01 = __byte_perm(row0, row1, 0x7362);
      const uint32_t low23 = __byte_perm(row2, row3, 0x5140), high23 = __byte_perm(row2, row3, 0x7362);
      out[4 * (4 * j) + i] = __byte_perm(low01, low23, 0x5410);
      out[4 * (4 * j + 1) + i] = __byte_perm(low01, low23, 0x7632);
      out[4 * (4 * j + 2) + i] = __byte_perm(high01, high23, 0x5410);
      out[4 * (4 * j + 3) + i] = __byte_perm(high01, high23, 0x7632);
    }
  }
}

// ---- words of 4 bytes
// ------------------------------------------------------------------------------------------------

// 2 x 2 elements of 2 bytes.
__device__ __forceinline__ void transpose_word_b2(const void* source, void* target) {
  const uint32_t* in = static_cast<const uint32_t*>(source);
  uint32_t* out = static_cast<uint32_t*>(target);
  out[0] = __byte_perm(in[0], in[1], 0x5410);
  out[1] = __byte_perm(in[0], in[1], 0x7632);
}

// 4 x 4 elements of 1 byte.
__device__ __forceinline__ void transpose_word_b1(const void* source, void* target) {
  const uint32_t* in = static_cast<const uint32_t*>(source);
  uint32_t* out = static_cast<uint32_t*>(target);
  const uint32_t low01 = __byte_perm(in[0], in[1], 0x5140), high01 = __byte_perm(in[0], in[1], 0x7362);
  const uint32_t low23 = __byte_perm(in[2], in[3], 0x5140), high23 = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(low01, low23, 0x5410);
  out[1] = __byte_perm(low01, low23, 0x7632);
  out[2] = __byte_perm(high01, high23, 0x5410);
  out[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace tk
