// What a thread does with its neighbouring channels: their largest magnitude, and their conversion with one factor.
// Tags name the sources (Bf16, Fp32, E4m3, E2m1) and the targets (E4m3, E2m1, E5m6); N counts channels, a multiple
// of 8.
#pragma once

#include <type_traits>

#include "formats.cuh"

namespace tk {

struct Bf16 {};
struct Fp32 {};
struct E4m3 {};
struct E2m1 {};
struct E5m6 {};

// ---- eight channels of a source as fp32, times a factor ------------------------------------------------------------

__device__ __forceinline__ void load_x8(Bf16, const uint32_t* words, int block, float factor, float* values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = words[4 * block + i];
    values[2 * i] = float_of(word << 16) * factor;
    values[2 * i + 1] = float_of(word & 0xffff0000u) * factor;
  }
}

__device__ __forceinline__ void load_x8(Fp32, const uint32_t* words, int block, float factor, float* values) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = float_of(words[8 * block + i]) * factor;
}

__device__ __forceinline__ void load_x8(E4m3, const uint32_t* words, int block, float factor, float* values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(decode_e4m3x2((words[2 * block + i / 2] >> (16 * (i % 2))) & 0xffffu));
    values[2 * i] = pair.x * factor;
    values[2 * i + 1] = pair.y * factor;
  }
}

__device__ __forceinline__ void load_x8(E2m1, const uint32_t* words, int block, float factor, float* values) {
  decode_e2m1x8(words[block], values);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] *= factor;
}

// Signs of eight channels at the sign bits of eight nibbles.
__device__ __forceinline__ uint32_t signs_x8(Bf16, const uint32_t* words, int block) {
  return e2m1_signs(__byte_perm(words[4 * block], words[4 * block + 1], 0x7531),
                    __byte_perm(words[4 * block + 2], words[4 * block + 3], 0x7531));
}

__device__ __forceinline__ uint32_t signs_x8(Fp32, const uint32_t* words, int block) {
  const uint32_t* eight = words + 8 * block;
  return e2m1_signs(
      __byte_perm(__byte_perm(eight[0], eight[1], 0x0073), __byte_perm(eight[2], eight[3], 0x0073), 0x5410),
      __byte_perm(__byte_perm(eight[4], eight[5], 0x0073), __byte_perm(eight[6], eight[7], 0x0073), 0x5410));
}

__device__ __forceinline__ uint32_t signs_x8(E4m3, const uint32_t* words, int block) {
  return e2m1_signs(words[2 * block], words[2 * block + 1]);
}

// ---- largest magnitude, exact; NaN is passed over -------------------------------------------------------------------

template <int N>
__device__ __forceinline__ float largest(Bf16, const uint32_t* words) {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(words);
  __nv_bfloat162 most = __habs2(pairs[0]);
#pragma unroll
  for (int i = 1; i < N / 2; ++i) most = __hmax2(most, __habs2(pairs[i]));
  return fmaxf(__low2float(most), __high2float(most));
}

template <int N>
__device__ __forceinline__ float largest(Fp32, const uint32_t* words) {
  float most = fabsf(float_of(words[0]));
#pragma unroll
  for (int i = 1; i < N; ++i) most = fmaxf(most, fabsf(float_of(words[i])));
  return most;
}

template <int N>
__device__ __forceinline__ float largest_but_nan(E4m3, const uint32_t* words) {
  __half2 most = __habs2(decode_e4m3x2(words[0] & 0xffffu));
#pragma unroll
  for (int i = 1; i < N / 2; ++i)
    most = __hmax2(most, __habs2(decode_e4m3x2((words[i / 2] >> (16 * (i % 2))) & 0xffffu)));
  return fmaxf(__low2float(most), __high2float(most));
}

// Magnitudes are ordered as their codes are. Two channels at a time as 16-bit numbers, whose low bytes do not matter.
template <int N>
__device__ __forceinline__ float largest(E4m3, const uint32_t* words) {
  uint32_t odd = 0, even = 0;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const uint32_t magnitudes = words[i] & 0x7f7f7f7fu;
    odd = __vmaxu2(odd, magnitudes);
    even = __vmaxu2(even, magnitudes * 256u);
  }
  const uint32_t most = __vmaxu2(odd, even);
  const uint32_t code = max(most >> 24, (most >> 8) & 0xffu);
  return code == 0x7fu ? largest_but_nan<N>(E4m3{}, words) : __low2float(decode_e4m3x2(code));
}

// Magnitudes are ordered as their codes are: the largest code of two columns of nibbles at a time.
template <int N>
__device__ __forceinline__ float largest(E2m1, const uint32_t* words) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
#pragma unroll
    for (int nibble = 0; nibble < 4; ++nibble) most = __vmaxu2(most, (words[i] >> (4 * nibble)) & 0x00070007u);
  }
  return decode_e2m1_magnitude(max(most & 7u, most >> 16));
}

template <typename Source, int N>
__device__ __forceinline__ float largest_magnitude(const void* words) {
  return largest<N>(Source{}, static_cast<const uint32_t*>(words));
}

// Share kCount maxima among the lanes of a group, kChannels channels each. Steps beyond the group are taken and
// dropped: straight code lets the maxima overlap.
template <int kCount, int kChannels>
__device__ __forceinline__ void group_maxima(float* maxima, int num_per_channels) {
#pragma unroll
  for (int step = 0; (kChannels << step) < 128; ++step) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, maxima[i], 1 << step);
      maxima[i] = (kChannels << step) < num_per_channels ? fmaxf(maxima[i], other) : maxima[i];
    }
  }
}

// ---- conversion -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_x8(E4m3, const float* values, int block, uint32_t* words) {
  words[2 * block] = encode_e4m3x4(values);
  words[2 * block + 1] = encode_e4m3x4(values + 4);
}

__device__ __forceinline__ void store_x8(E2m1, const float* values, int block, uint32_t* words) {
  words[block] = encode_e2m1x8(values);
}

__device__ __forceinline__ void store_x8(E5m6, const float* values, int block, uint32_t* words) {
  encode_e5m6x8(values, words + 3 * block);
}

__device__ __forceinline__ void store_stochastic_x8(E4m3, const float* values, int block, uint32_t group,
                                                    uint32_t* words) {
  words[2 * block] = encode_stochastic_x4<true>(values, group);
  words[2 * block + 1] = encode_stochastic_x4<true>(values + 4, group + 1);
}

__device__ __forceinline__ void store_stochastic_x8(E2m1, const float* values, int block, uint32_t group,
                                                    uint32_t* words) {
  words[block] =
      pack_nibbles(encode_stochastic_x4<false>(values, group), encode_stochastic_x4<false>(values + 4, group + 1));
}

__device__ __forceinline__ void store_stochastic_x8(E5m6, const float*, int, uint32_t, uint32_t*) {}  // not offered

// e4m3 to e2m1 with a power of two: two channels at a time in fp16, which holds e4m3 times 2^-8 by a shift of its code.
// Products are exact; 2^9, 2^10 and 2^11 stand for the steps 0.5, 1 and 2 as in convert_bf16_to_e2m1_by_power.
template <int N>
__device__ __forceinline__ void convert_e4m3_to_e2m1_by_power(const uint32_t* words, uint32_t* target, float factor) {
  const __half2 factors = __float2half2_rn(factor * 256.0f);
  const auto rounded = [factors](uint32_t magnitudes, float offset) {
    const __half2 sums = __hfma2(*reinterpret_cast<const __half2*>(&magnitudes), factors, __float2half2_rn(offset));
    return *reinterpret_cast<const uint32_t*>(&sums);
  };
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    uint32_t sum = 0, signs = 0;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      // Channels i and i + 4: their codes are four nibbles apart
      const uint32_t pair = __byte_perm(words[2 * block], words[2 * block + 1], 0x0400 + 0x0101 * i);
      const uint32_t magnitudes = (pair * 128u) & 0x3f803f80u;
      uint32_t codes = __viaddmin_s16x2(rounded(magnitudes, 1026.0f), 0xfc00fc00u, rounded(magnitudes, 512.0f));
      codes = __viaddmin_s16x2(rounded(magnitudes, 2056.0f), 0xf800f800u, codes);
      sum = sum * 16u + __vmins2(codes, 0x60076007u);
      const uint32_t sign = pair & 0x00800080u;
      signs = i > 0 ? signs * 16u + sign : signs + (sign >> 4);
    }
    target[block] = sum - 0x60006000u * 0x1111u + signs;
  }
}

// To e2m1 with any factor that an eighth of is a normal number: an eighth of each product goes up to one, and
// saturates for free. NaN becomes zero.
template <typename Source, int N>
__device__ __forceinline__ void convert_to_e2m1(const uint32_t* words, uint32_t* target, float factor) {
  const float eighth = factor * 0.125f;
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    float values[8];
    load_x8(Source{}, words, block, 1.0f, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = __saturatef(fabsf(values[i]) * eighth);
    target[block] = encode_e2m1_eighths(values) | signs_x8(Source{}, words, block);
  }
}

// Out = convert(source * factor).
template <typename Source, typename Target, int N>
__device__ __forceinline__ void convert(const void* source, void* target, float factor) {
  if constexpr (std::is_same_v<Source, E4m3> && std::is_same_v<Target, E2m1>) {
    // Such factors have all groups that hold a number of at least 6 / 128
    if ((bits_of(factor) & 0x7fffffu) == 0 && factor >= 0x1p-14f && factor <= 0x1p7f) {
      convert_e4m3_to_e2m1_by_power<N>(static_cast<const uint32_t*>(source), static_cast<uint32_t*>(target), factor);
      return;
    }
  }
  const uint32_t* words = static_cast<const uint32_t*>(source);
  if constexpr (std::is_same_v<Target, E2m1>) {
    if (factor >= 0x1p-122f) {
      convert_to_e2m1<Source, N>(words, static_cast<uint32_t*>(target), factor);
      return;
    }
  }
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    float values[8];
    load_x8(Source{}, words, block, factor, values);
    store_x8(Target{}, values, block, static_cast<uint32_t*>(target));
  }
}

// bf16 to e2m1 where the factor is a power of two: products are exact in bf16, so two channels are scaled and
// rounded at a time, in the way of encode_e2m1_magnitude with 2^6, 2^7 and 2^8 for the steps 0.5, 1 and 2.
template <int N>
__device__ __forceinline__ void convert_bf16_to_e2m1_by_power(const void* source, void* target, float factor) {
  const uint32_t* words = static_cast<const uint32_t*>(source);
  const __nv_bfloat162 factors = __float2bfloat162_rn(factor);
  const auto rounded = [factors](uint32_t magnitudes, float offset) {
    const __nv_bfloat162 sums =
        __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&magnitudes), factors, __float2bfloat162_rn(offset));
    return *reinterpret_cast<const uint32_t*>(&sums);
  };
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    uint32_t sum = 0;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      // Channels i and i + 4: their codes are four nibbles apart
      const uint32_t pair =
          __byte_perm(words[4 * block + i / 2], words[4 * block + 2 + i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
      const uint32_t magnitudes = pair & 0x7fff7fffu;
      uint32_t codes = __viaddmin_s16x2(rounded(magnitudes, 130.0f), 0xff80ff80u, rounded(magnitudes, 64.0f));
      codes = __viaddmin_s16x2(rounded(magnitudes, 264.0f), 0xff00ff00u, codes);
      codes = __vmins2(codes, 0x42874287u);
      sum = sum * 16u + (codes | ((pair >> 12) & 0x00080008u));
    }
    static_cast<uint32_t*>(target)[block] = sum - 0x42804280u * 0x1111u;
  }
}

// The same with stochastic rounding; `column` is that of the first channel.
template <typename Source, typename Target, int N>
__device__ __forceinline__ void convert_stochastic(const void* source, void* target, float factor, int column) {
  const uint32_t* words = static_cast<const uint32_t*>(source);
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    float values[8];
    load_x8(Source{}, words, block, factor, values);
    store_stochastic_x8(Target{}, values, block, static_cast<uint32_t>(column) / 4u + 2u * block,
                        static_cast<uint32_t*>(target));
  }
}

// e2m1 sources have eight magnitudes: convert those once, then look each channel up by byte permutation.
template <int N>
__device__ __forceinline__ void convert_by_table(E4m3, const uint32_t* words, uint32_t* target, float factor) {
  float values[8];
  decode_e2m1x8(0x76543210u, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] *= factor;
  const uint32_t low = encode_e4m3x4(values), high = encode_e4m3x4(values + 4);
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    const uint32_t codes = words[i], selectors = codes & 0x77777777u;
    // Signs from bit 3 of each nibble to bit 7 of each byte
    const uint32_t even = (codes << 4) & 0x80808080u, odd = codes & 0x80808080u;
    target[2 * i] = __byte_perm(low, high, selectors) | __byte_perm(even, odd, 0x5140);
    target[2 * i + 1] = __byte_perm(low, high, selectors >> 16) | __byte_perm(even, odd, 0x7362);
  }
}

template <int N>
__device__ __forceinline__ void convert_by_table(E2m1, const uint32_t* words, uint32_t* target, float factor) {
  float values[8];
  decode_e2m1x8(0x76543210u, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] *= factor;
  const uint32_t table = encode_e2m1_magnitudes(values);
  const uint32_t even = table & 0x0f0f0f0fu, odd = (table >> 4) & 0x0f0f0f0fu;
  const uint32_t low = __byte_perm(even, odd, 0x5140), high = __byte_perm(even, odd, 0x7362);
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    const uint32_t selectors = words[i] & 0x77777777u;
    target[i] = pack_nibbles(__byte_perm(low, high, selectors), __byte_perm(low, high, selectors >> 16)) |
                (words[i] & 0x88888888u);
  }
}

template <typename Target, int N>
__device__ __forceinline__ void convert_e2m1(const void* source, void* target, float factor) {
  convert_by_table<N>(Target{}, static_cast<const uint32_t*>(source), static_cast<uint32_t*>(target), factor);
}

}  // namespace tk
