// Normal random numbers from Philox by the method of Box and Muller.
//
// Instructions are what they cost. Keys of the rounds are found once for a thread's calls, and the functions below know
// the range of their arguments. Coefficients are fits to least relative error (of the logarithm and sine) or absolute
// error (of the cosine), all 3e-8 or less.
#pragma once

#include "philox.cuh"

namespace tk {

// The keys of ten rounds, first and second words.
__device__ __forceinline__ void find_keys(int64_t seed, uint32_t* keys) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    keys[2 * round] = uint32_t(uint64_t(seed)) + 0x9E3779B9u * round;
    keys[2 * round + 1] = uint32_t(uint64_t(seed) >> 32) + 0xBB67AE85u * round;
  }
}

// Both words of a product. Written as a 64-bit product by a constant, each would cost an addition of zero.
__device__ __forceinline__ void multiply(uint32_t x, uint32_t y, uint32_t* low, uint32_t* high) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
  *low = uint32_t(product);
  *high = uint32_t(product >> 32);
}

// philox() with keys that are known.
__device__ __forceinline__ void philox_of_keys(uint32_t (&counter)[4], const uint32_t* keys) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint32_t even_low, even_high, odd_low, odd_high;
    multiply(0xD2511F53u, counter[0], &even_low, &even_high);
    multiply(0xCD9E8D57u, counter[2], &odd_low, &odd_high);
    counter[0] = odd_high ^ counter[1] ^ keys[2 * round];
    counter[1] = odd_low;
    counter[2] = even_high ^ counter[3] ^ keys[2 * round + 1];
    counter[3] = even_low;
  }
}

// -2 * ln(u) for normal u in (0, 1], near 1 as exact as elsewhere.
__device__ __forceinline__ float minus_two_log(float u) {
  // u = 2^exponent * (1 + f), f from sqrt(1/2) - 1 to sqrt(2) - 1
  const int bits = __float_as_int(u);
  const int exponent = (bits - 0x3f3504f3) >> 23;
  const float f = __fadd_rn(__int_as_float(bits - (exponent << 23)), -1.0f);
  // 1.5 * 2^23 + exponent has the exponent in its low bits
  const float whole = __fadd_rn(__int_as_float(0x4b400000 + exponent), -12582912.0f);
  float rest = -0.17469501f;
  rest = __fmaf_rn(rest, f, 0.28614965f);
  rest = __fmaf_rn(rest, f, -0.29835978f);
  rest = __fmaf_rn(rest, f, 0.33141029f);
  rest = __fmaf_rn(rest, f, -0.39924142f);
  rest = __fmaf_rn(rest, f, 0.50003511f);
  rest = __fmaf_rn(rest, f, -0.66667902f);
  rest = __fmaf_rn(rest, f, 0.99999982f);
  return __fmaf_rn(__fmul_rn(f, f), rest, __fmaf_rn(whole, -1.38629436f, -2.0f * f));
}

// Cosine and sine of half_turns * pi, for half_turns in [-1, 1].
__device__ __forceinline__ void cosine_and_sine(float half_turns, float* cosine, float* sine) {
  // The nearest quarter turn, in the low bits of a number near 1.5 * 2^23, and the angle from there
  const float shifted = __fmaf_rn(half_turns, 2.0f, 12582912.0f);
  const int quarter = __float_as_int(shifted);
  const float rest = __fmaf_rn(__fadd_rn(shifted, -12582912.0f), -0.5f, half_turns);
  const float square = __fmul_rn(rest, rest);
  float s = -0.58907866f;
  s = __fmaf_rn(s, square, 2.54976726f);
  s = __fmaf_rn(s, square, -5.16770792f);
  s = __fmul_rn(__fmaf_rn(s, square, 3.14159274f), rest);
  float c = -1.30727994f;
  c = __fmaf_rn(c, square, 4.05770159f);
  c = __fmaf_rn(c, square, -4.93479204f);
  c = __fmaf_rn(c, square, 1.0f);
  const bool is_odd = quarter & 1;
  // Signs from the second bit: of the sine in the lower half turn, of the cosine a quarter earlier
  *sine = __int_as_float(__float_as_int(is_odd ? c : s) ^ ((quarter & 2) << 30));
  *cosine = __int_as_float(__float_as_int(is_odd ? s : c) ^ (((quarter + 1) & 2) << 30));
}

// Two draws as two normal numbers: a radius from the first, an angle from the second.
__device__ __forceinline__ void box_muller(uint32_t first, uint32_t second, float* numbers) {
  float radius, sine, cosine;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(radius) : "f"(minus_two_log(uniform(first))));
  // Half turns in [-1, 1)
  cosine_and_sine(static_cast<float>(static_cast<int32_t>(second)) * 0x1p-31f, &cosine, &sine);
  numbers[0] = radius * cosine;
  numbers[1] = radius * sine;
}

__device__ __forceinline__ void normal_x4(const uint32_t* keys, int64_t offset, int64_t index, float* numbers) {
  uint32_t words[4] = {uint32_t(uint64_t(index)), uint32_t(uint64_t(index) >> 32), uint32_t(uint64_t(offset)),
                       uint32_t(uint64_t(offset) >> 32)};
  philox_of_keys(words, keys);
  box_muller(words[0], words[1], numbers);
  box_muller(words[2], words[3], numbers + 2);
}

}  // namespace tk
