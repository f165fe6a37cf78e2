// Number formats of the casts: fp32 to e4m3, e2m1 and e5m6 and back, on registers. Rounding is to nearest even and
// saturating. Sources and targets are arrays of 32-bit words, first element in the low bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

namespace tk {

__device__ __forceinline__ uint32_t bits_of(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

// ---- e4m3 -----------------------------------------------------------------------------------------------------------

// One e4m3 byte by integer arithmetic, for GPUs that cannot convert.
__device__ __forceinline__ uint32_t encode_e4m3_software(float value) {
  const uint32_t sign = (bits_of(value) >> 24) & 0x80u;
  const uint32_t bits = bits_of(value) & 0x7fffffffu;
  if (bits > 0x7f800000u) return 0x7fu;
  const uint32_t clamped = min(bits, bits_of(448.0f));
  // Below 2^-6 the spacing is 2^-9, which is the spacing of fp32 at 2^14.
  if (clamped < bits_of(0x1p-6f)) return sign | (bits_of(float_of(clamped) + 0x1p14f) - bits_of(0x1p14f));
  return sign | (((clamped + 0x7ffffu + ((clamped >> 20) & 1u)) >> 20) - (120u << 3));
}

// Two e4m3 bytes; NaN becomes 0x7f.
__device__ __forceinline__ uint32_t encode_e4m3x2(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return encode_e4m3_software(first) | (encode_e4m3_software(second) << 8);
#endif
}

__device__ __forceinline__ uint32_t encode_e4m3x4(const float* values) {
  return __byte_perm(encode_e4m3x2(values[0], values[1]), encode_e4m3x2(values[2], values[3]), 0x5410);
}

// Two e4m3 bytes (low 16 bits) as fp16, exact.
__device__ __forceinline__ __half2 decode_e4m3x2(uint32_t pair) {
  uint32_t halves;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
#else
  // e4m3 has fp16's layout with three mantissa bits and another bias: the multiplication corrects it, subnormals
  // included.
  const uint32_t spread = __byte_perm(pair, 0, 0x1404);
  const uint32_t moved = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  const __half2 scaled = __hmul2(*reinterpret_cast<const __half2*>(&moved), __float2half2_rn(256.0f));
  halves = *reinterpret_cast<const uint32_t*>(&scaled);
  if ((pair & 0x7fu) == 0x7fu) halves |= 0x7fffu;
  if ((pair & 0x7f00u) == 0x7f00u) halves |= 0x7fff0000u;
#endif
  return *reinterpret_cast<__half2*>(&halves);
}

// ---- e2m1 -----------------------------------------------------------------------------------------------------------

constexpr uint32_t kE2m1Base = 0x4a800000u;  // bits of 2^22

// 2^22 + the code (0 to 7) of |value| as fp32 bits; NaN counts as 6. Adding 2^22, 2^23 and 2^24 rounds to steps of
// 0.5, 1 and 2, the format's steps below 2, below 4 and above; each sum is offset such that it holds codes, and the
// smallest of the three is right. Three additions run on the fp32 pipe; the integer minima are fused with the
// subtractions from sm_90 on.
__device__ __forceinline__ uint32_t encode_e2m1_magnitude(float value) {
  const float magnitude = fabsf(value);
  const int32_t halves = __float_as_int(magnitude + 4194304.0f);
  const int32_t ones = __float_as_int(magnitude + 8388610.0f);
  const int32_t twos = __float_as_int(magnitude + 16777224.0f);
  const int32_t code = min(min(halves, ones - 0x00800000), twos - 0x01000000);
  return static_cast<uint32_t>(min(code, static_cast<int32_t>(kE2m1Base + 7u)));
}

// Eight codes without sign, the first in the low nibble.
__device__ __forceinline__ uint32_t encode_e2m1_magnitudes(const float* values) {
  uint32_t sum = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) sum = sum * 16u + encode_e2m1_magnitude(values[i]);
  return sum - kE2m1Base * 0x11111111u;
}

// Eight codes without sign of |value| / 8, from 0 to 1, in the same way: numbers of 7 and more give code 8 at first.
__device__ __forceinline__ uint32_t encode_e2m1_eighths(const float* eighths) {
  constexpr uint32_t kBase = 0x49000000u;  // bits of 2^19
  uint32_t sum = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const int32_t halves = __float_as_int(eighths[i] + 524288.0f);
    const int32_t ones = __float_as_int(eighths[i] + 1048576.25f);
    const int32_t twos = __float_as_int(eighths[i] + 2097153.0f);
    sum = sum * 16u + static_cast<uint32_t>(min(min(halves, ones - 0x00800000), twos - 0x01000000));
  }
  sum -= kBase * 0x11111111u;
  return sum - ((sum & 0x88888888u) >> 3);
}

// The signs of eight channels, each the highest bit of a byte, at the sign bits of eight nibbles.
__device__ __forceinline__ uint32_t e2m1_signs(uint32_t first, uint32_t second) {
  const uint32_t even = __byte_perm(first, second, 0x6420), odd = __byte_perm(first, second, 0x7531);
  return ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

// The signs of eight values at the sign bits of eight nibbles.
__device__ __forceinline__ uint32_t e2m1_signs(const float* values) {
  const uint32_t even = __byte_perm(__byte_perm(bits_of(values[0]), bits_of(values[2]), 0x0073),
                                    __byte_perm(bits_of(values[4]), bits_of(values[6]), 0x0073), 0x5410);
  const uint32_t odd = __byte_perm(__byte_perm(bits_of(values[1]), bits_of(values[3]), 0x0073),
                                   __byte_perm(bits_of(values[5]), bits_of(values[7]), 0x0073), 0x5410);
  return ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

__device__ __forceinline__ uint32_t encode_e2m1x8(const float* values) {
  return encode_e2m1_magnitudes(values) | e2m1_signs(values);
}

// The e2m1 magnitudes as the high bytes of fp16 numbers: a table for byte permutation.
constexpr uint32_t kE2m1HalvesLow = 0x3e3c3800u;   // 0, 0.5, 1, 1.5
constexpr uint32_t kE2m1HalvesHigh = 0x46444240u;  // 2, 3, 4, 6

// The magnitude of one code (0 to 7).
__device__ __forceinline__ float decode_e2m1_magnitude(uint32_t code) {
  const uint32_t half_bits = (__byte_perm(kE2m1HalvesLow, kE2m1HalvesHigh, code) & 0xffu) << 8;
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half_bits)));
}

// Eight values out of one word of codes.
__device__ __forceinline__ void decode_e2m1x8(uint32_t codes, float* values) {
  const uint32_t selectors = codes & 0x77777777u;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const uint32_t bytes = __byte_perm(kE2m1HalvesLow, kE2m1HalvesHigh, selectors >> (16 * part));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t half_bits = ((bytes >> (8 * i)) & 0xffu) << 8;
      const uint32_t sign = (codes << (28 - 4 * (4 * part + i))) & 0x80000000u;
      const float magnitude = __half2float(__ushort_as_half(static_cast<unsigned short>(half_bits)));
      values[4 * part + i] = float_of(bits_of(magnitude) | sign);
    }
  }
}

// Codes of four neighbours, one a byte, to four nibbles of each half-word pair: eight nibbles out of two such words.
__device__ __forceinline__ uint32_t pack_nibbles(uint32_t first, uint32_t second) {
  return __byte_perm(first | (first >> 4), second | (second >> 4), 0x6420);
}

// ---- e5m6 -----------------------------------------------------------------------------------------------------------

// Twelve bits: an fp16 truncated to six mantissa bits, plus the rounding rule of the format. Below 2^-14 the rule
// reads bits that are not the dropped ones; that is the definition.
__device__ __forceinline__ uint32_t encode_e5m6(float value) {
  const uint32_t truncated = __half_as_ushort(__float2half_rz(value)) >> 4;
  const uint32_t low = bits_of(value) & 0x1ffffu;
  return (truncated + ((truncated & 1u) + low > 0x10000u ? 1u : 0u)) & 0xfffu;
}

// Eight values to three words: codes one after another, each with its highest bit first, cut into words.
__device__ __forceinline__ void encode_e5m6x8(const float* values, uint32_t* words) {
  uint32_t codes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i] = encode_e5m6(values[i]);
  words[0] = (codes[0] << 20) | (codes[1] << 8) | (codes[2] >> 4);
  words[1] = (codes[2] << 28) | (codes[3] << 16) | (codes[4] << 4) | (codes[5] >> 8);
  words[2] = (codes[5] << 24) | (codes[6] << 12) | codes[7];
}

// ---- stochastic rounding --------------------------------------------------------------------------------------------

// The random word of four neighbouring scaled values; `group` is their column divided by four.
__device__ __forceinline__ uint32_t stochastic_word(const float* values, uint32_t group) {
  uint32_t hash = bits_of(values[0]) * 0x5671d42bu + bits_of(values[1]) * 0x9995e499u +
                  bits_of(values[2]) * 0xace1b8a5u + bits_of(values[3]) * 0xe153538du + group;
  hash ^= hash >> 23;
  hash *= 0x7feb352du;
  hash ^= hash >> 16;
  hash *= 0x846ca68bu;
  return hash ^ (hash >> 11);
}

// Code of |value| in a format with the given mantissa bits, bias and largest code: 16 random bits are added to the
// top 16 bits of the discarded fraction, a carry rounds up. A subnormal number of the format gets the smallest
// normal one added, which makes its fraction start at the same bit; what that addition drops lies below the 16 bits.
template <int kMantissaBits, int kBias, uint32_t kLargest>
__device__ __forceinline__ uint32_t encode_stochastic(float value, uint32_t random) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
  const float magnitude = fabsf(value);
  const bool is_normal = magnitude >= float_of(kSmallestNormal);
  const float shifted = is_normal ? magnitude : __fadd_rz(magnitude, float_of(kSmallestNormal));
  const uint32_t code = (bits_of(shifted) + (random << (kDropped - 16))) >> kDropped;
  return min(code - (static_cast<uint32_t>(is_normal ? 127 - kBias : 128 - kBias) << kMantissaBits), kLargest);
}

// The same for e4m3 as an fp32 number, which the conversion then takes as it is: 20 bits are dropped, `random` holds 16
// bits above four zeros. Saturates; NaN stays NaN.
__device__ __forceinline__ float round_to_e4m3_stochastic(float value, uint32_t random) {
  const float offset = fabsf(value) < 0x1p-6f ? 0x1p-6f : 0.0f;
  const uint32_t sum = __viaddmin_u32(bits_of(__fadd_rz(fabsf(value), offset)), random, 0x7fffffffu);
  return copysignf(float_of(sum & 0xfff00000u) - offset, value);
}

// Four values to four codes, one a byte, sign in the highest bit of the code.
template <bool kIsE4m3>
__device__ __forceinline__ uint32_t encode_stochastic_x4(const float* values, uint32_t group) {
  const uint32_t word = stochastic_word(values, group);
  const uint32_t reversed = __brev(word);  // its halves are the reversed halves of word, exchanged
  if (kIsE4m3) {
    const float rounded[4] = {round_to_e4m3_stochastic(values[0], (word << 4) & 0xffff0u),
                              round_to_e4m3_stochastic(values[1], (reversed >> 12) & 0xffff0u),
                              round_to_e4m3_stochastic(values[2], (word >> 12) & 0xffff0u),
                              round_to_e4m3_stochastic(values[3], (reversed << 4) & 0xffff0u)};
    return encode_e4m3x4(rounded);
  }
  const uint32_t random[4] = {word & 0xffffu, reversed >> 16, word >> 16, reversed & 0xffffu};
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = encode_stochastic<1, 1, 7u>(values[i], random[i]) | ((bits_of(values[i]) >> 28) & 0x8u);
    codes |= code << (8 * i);
  }
  return codes;
}

}  // namespace tk
