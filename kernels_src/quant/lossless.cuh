// Four tokens of a warp re-encoded from e2m1 to e4m3: exponents of the larger blocks, and the conversion.
#pragma once

#include "cast.cuh"
#include "scale.cuh"

namespace tk {

// The biased exponent of a stored scale.
__device__ __forceinline__ uint32_t exponent_of(uint32_t bits, int kind) {
  return kind == kScalePacked ? bits : (bits >> 23) & 0xffu;
}

// The exponent of a block whose largest exponent is `most`: e4m3 has room for six more binades than e2m1's largest.
__device__ __forceinline__ int block_exponent(uint32_t most) { return most > 6u ? static_cast<int>(most) - 6 : 0; }

__device__ __forceinline__ float scale_of_exponent(int exponent) {
  return float_of(static_cast<uint32_t>(exponent) << 23);
}

// most[t] = the largest among those of the token's block within the warp, two tokens to a word. Eight lanes hold
// sixteen channels each of a token; lane / 8 is the token modulo four, t counts fours.
__device__ __forceinline__ void share_exponents(uint32_t* most, int block_rows, int block_cols) {
  uint32_t pairs[2] = {most[0] | (most[1] << 16), most[2] | (most[3] << 16)};
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const bool is_shared = i < 3 ? (16 << i) < block_cols : (1 << (i - 3)) < block_rows;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, pairs[pair], 1 << i);
      if (is_shared) pairs[pair] = __vmaxu2(pairs[pair], other);
    }
  }
  if (block_rows > 4) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) pairs[pair] = __vmaxu2(pairs[pair], __byte_perm(pairs[pair], 0, 0x1032));
  }
  if (block_rows > 8) pairs[0] = pairs[1] = __vmaxu2(pairs[0], pairs[1]);
#pragma unroll
  for (int token = 0; token < 4; ++token) most[token] = (pairs[token / 2] >> (16 * (token % 2))) & 0xffffu;
}

// Target = source * 2^power. From -5 to 6 all products are normal numbers of e4m3, whose codes differ by eight a
// binade: a table of the eight magnitudes. Below, which is not lossless, products are rounded.
template <int N>
__device__ __forceinline__ void convert_e2m1_by_power(const void* source, void* target, int power) {
  if (power < -5) {
    convert_e2m1<E4m3, N>(source, target, scale_of_exponent(max(power + 127, 0)));
    return;
  }
  const uint32_t* words = static_cast<const uint32_t*>(source);
  const uint32_t low = 0x3c383000u + 0x08080800u * static_cast<uint32_t>(power);
  const uint32_t high = 0x4c484440u + 0x08080808u * static_cast<uint32_t>(power);
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    const uint32_t codes = words[i], selectors = codes & 0x77777777u;
    const uint32_t even = (codes << 4) & 0x80808080u, odd = codes & 0x80808080u;
    static_cast<uint32_t*>(target)[2 * i] = __byte_perm(low, high, selectors) | __byte_perm(even, odd, 0x5140);
    static_cast<uint32_t*>(target)[2 * i + 1] =
        __byte_perm(low, high, selectors >> 16) | __byte_perm(even, odd, 0x7362);
  }
}

// One channel: its code with a sign to e4m3.
__device__ __forceinline__ uint32_t convert_e2m1_code(uint32_t code, int power) {
  const float value = decode_e2m1_magnitude(code & 7u) * scale_of_exponent(max(power + 127, 0));
  return encode_e4m3x2(value, 0.0f) | ((code & 8u) << 4);
}

}  // namespace tk
