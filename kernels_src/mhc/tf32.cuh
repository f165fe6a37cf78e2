// Products of tensor cores in tf32, and bf16 as their operand.
#pragma once

#include <cstdint>

namespace tk {

// sums += a (16 x 8, rows) * b (8 x 8, columns). The tensor core drops the low 13 bits of a and b.
__device__ __forceinline__ void multiply_tf32(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds to tf32, halves away from zero, once the tensor core has dropped the low bits.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t bits) { return bits + 0x1000u; }

__device__ __forceinline__ uint32_t low_half(uint32_t pair) { return pair << 16; }
__device__ __forceinline__ uint32_t high_half(uint32_t pair) { return pair & 0xffff0000u; }

// The rounded number itself, for products outside of a tensor core.
__device__ __forceinline__ float as_tf32(float value) {
  return __uint_as_float(round_to_tf32(__float_as_uint(value)) & 0xffffe000u);
}

}  // namespace tk
