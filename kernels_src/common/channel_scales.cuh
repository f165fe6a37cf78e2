// Scales that a channel has for its neighbouring tokens: the steps of a block of threads on a tile of 128 tokens and
// kWidth channels. A thread holds kColumns neighbouring channels of kRows neighbouring tokens, so kWidth / kColumns
// lanes lie along a row. 128 or 32 tokens share a scale: a whole number of warps. Sources are tags of cast.cuh.
#pragma once

#include "cast.cuh"
#include "scale.cuh"

namespace tk {

constexpr int kTile = 128;  // tokens

// ---- four e4m3 bytes of a word, without moves between the conversions of its halves
// ----------------------------------

__device__ __forceinline__ void decode_e4m3x4(uint32_t word, float factor, float* values) {
  __half2 halves[2];
#if __CUDA_ARCH__ >= 890
  asm("{\n\t.reg .b16 low, high;\n\t"
      "mov.b32 {low, high}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n\t"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
      : "=r"(*reinterpret_cast<uint32_t*>(&halves[0])), "=r"(*reinterpret_cast<uint32_t*>(&halves[1]))
      : "r"(word));
#else
  halves[0] = decode_e4m3x2(word & 0xffffu);
  halves[1] = decode_e4m3x2(word >> 16);
#endif
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair = __half22float2(halves[i]);
    values[2 * i] = pair.x * factor;
    values[2 * i + 1] = pair.y * factor;
  }
}

__device__ __forceinline__ uint32_t encode_e4m3_word(const float* values) {
#if __CUDA_ARCH__ >= 890
  uint32_t word;
  asm("{\n\t.reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t}"
      : "=r"(word)
      : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]));
  return word;
#else
  return encode_e4m3x4(values);
#endif
}

// ---- largest magnitude of each channel over a warp's tokens --------------------------------------------------------

template <int kRows, int kColumns, int kWidth>
__device__ __forceinline__ void warp_column_maxima(Bf16, const uint32_t* words, const float*, float* maxima) {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(words);
#pragma unroll
  for (int j = 0; j < kColumns / 2; ++j) {
    __nv_bfloat162 most = __habs2(pairs[j]);
#pragma unroll
    for (int i = 1; i < kRows; ++i) most = __hmax2(most, __habs2(pairs[i * (kColumns / 2) + j]));
#pragma unroll
    for (int distance = kWidth / kColumns; distance < 32; distance *= 2)
      most = __hmax2(most, __shfl_xor_sync(0xffffffffu, most, distance));
    maxima[2 * j] = __low2float(most);
    maxima[2 * j + 1] = __high2float(most);
  }
}

template <int kColumns, int kWidth>
__device__ __forceinline__ void share_among_rows(float* maxima) {
#pragma unroll
  for (int distance = kWidth / kColumns; distance < 32; distance *= 2) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) maxima[j] = fmaxf(maxima[j], __shfl_xor_sync(0xffffffffu, maxima[j], distance));
  }
}

template <int kRows, int kColumns, int kWidth>
__device__ __forceinline__ void warp_column_maxima(Fp32, const uint32_t* words, const float*, float* maxima) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    maxima[j] = fabsf(float_of(words[j]));
#pragma unroll
    for (int i = 1; i < kRows; ++i) maxima[j] = fmaxf(maxima[j], fabsf(float_of(words[i * kColumns + j])));
  }
  share_among_rows<kColumns, kWidth>(maxima);
}

// Products are compared as they are rounded: data * factor.
template <int kRows, int kColumns, int kWidth>
__device__ __forceinline__ void warp_column_maxima(E4m3, const uint32_t* words, const float* factors, float* maxima) {
#pragma unroll
  for (int block = 0; block < kColumns / 4; ++block) {
#pragma unroll
    for (int j = 0; j < 4; ++j) maxima[4 * block + j] = 0.0f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float values[4];
      decode_e4m3x4(words[i * (kColumns / 4) + block], factors[i], values);
#pragma unroll
      for (int j = 0; j < 4; ++j) maxima[4 * block + j] = fmaxf(maxima[4 * block + j], fabsf(values[j]));
    }
  }
  share_among_rows<kColumns, kWidth>(maxima);
}

// The scales of a thread's tokens in one column of the scales of x, 0 for negative rows. The kind is tested once for
// all, so that the loads follow each other.
template <int kRows>
__device__ __forceinline__ void load_factors(const void* base, int64_t row_stride, int64_t column_stride,
                                             const int* rows, int column, int kind, float* factors) {
  if (kind == kScaleFp32) {
    const float* source = static_cast<const float*>(base) + column * column_stride;
#pragma unroll
    for (int i = 0; i < kRows; ++i) factors[i] = rows[i] >= 0 ? source[rows[i] * row_stride] : 0.0f;
  } else {
    const bool is_packed = kind == kScalePacked;
    const int size = is_packed ? 4 : 1;
    const uint8_t* source = static_cast<const uint8_t*>(base) +
                            size * ((is_packed ? column >> 2 : column) * column_stride) + (is_packed ? column & 3 : 0);
    uint32_t bytes[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) bytes[i] = rows[i] >= 0 ? source[size * (rows[i] * row_stride)] : 0u;
#pragma unroll
    for (int i = 0; i < kRows; ++i) factors[i] = decode_scale(bytes[i], kind);
  }
}

// Row `warp` of shared maxima (warps, kWidth) = those of the warp's tokens.
template <typename Source, int kRows, int kColumns, int kWidth>
__device__ __forceinline__ void store_column_maxima(const void* source, const float* factors, void* shared) {
  float maxima[kColumns];
  warp_column_maxima<kRows, kColumns, kWidth>(Source{}, static_cast<const uint32_t*>(source), factors, maxima);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane < kWidth / kColumns) {
    float4* target = reinterpret_cast<float4*>(static_cast<float*>(shared) + warp * kWidth + lane * kColumns);
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i)
      target[i] = make_float4(maxima[4 * i], maxima[4 * i + 1], maxima[4 * i + 2], maxima[4 * i + 3]);
  }
}

// ---- scales ---------------------------------------------------------------------------------------------------------

// Scales of block `row` of all `num_rows` blocks of tokens. Packed: four blocks of one channel in a word; the bytes of
// the last word that belong to no block become 0.
__device__ __forceinline__ void store_channel_scale(void* out_sf, int row, int num_rows, int channel, int num_channels,
                                                    int kind, float scale) {
  if (kind == kScaleFp32) {
    static_cast<float*>(out_sf)[static_cast<int64_t>(row) * num_channels + channel] = scale;
    return;
  }
  uint8_t* word = static_cast<uint8_t*>(out_sf) + 4 * (static_cast<int64_t>(row >> 2) * num_channels + channel);
  word[row & 3] = static_cast<uint8_t>(bits_of(scale) >> 23);
  if (row == num_rows - 1) {
    for (int i = (row & 3) + 1; i < 4; ++i) word[i] = 0;
  }
}

// From shared maxima (kWarps, kWidth) to inverses (128 / num_per_tokens, kWidth) behind them, and to out_sf.
template <int kWarps, int kWidth>
__device__ __forceinline__ void make_channel_scales(void* shared, int num_per_tokens, float clamp_min, bool round_sf,
                                                    void* out_sf, int kind, int tile_row, int tile_col, int num_tokens,
                                                    int hidden) {
  const float* maxima = static_cast<const float*>(shared);
  float* inverses = static_cast<float*>(shared) + kWarps * kWidth;
  const int num_blocks = num_per_tokens == kTile ? 1 : 4;
  const int num_warps = num_per_tokens == kTile ? kWarps : kWarps / 4;
  const int num_rows = (num_tokens + num_per_tokens - 1) / num_per_tokens;
  for (int i = threadIdx.x; i < num_blocks * kWidth; i += 32 * kWarps) {
    const int block = i / kWidth, column = i % kWidth;
    const float* column_maxima = maxima + block * num_warps * kWidth + column;
    float most = column_maxima[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) {
      if (warp < num_warps) most = fmaxf(most, column_maxima[warp * kWidth]);
    }
    float scale;
    make_scales<1>(&most, clamp_min, 448.0f, round_sf, kScaleFp32, &scale, inverses + i);
    const int row = tile_row * num_blocks + block, channel = tile_col * kWidth + column;
    if (row < num_rows && channel < hidden) {
      store_channel_scale(out_sf, row, num_rows, channel, hidden, kind, scale);
    }
  }
}

// The inverses of a thread's channels.
template <int kWarps, int kColumns, int kWidth>
__device__ __forceinline__ void load_inverses(const void* shared, int num_per_tokens, float* inverses) {
  constexpr int kAcross = kWidth / kColumns;
  const int warp = threadIdx.x / 32, across = threadIdx.x % kAcross;
  const int block = num_per_tokens == kTile ? 0 : warp / (kWarps / 4);
  const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(shared) + kWarps * kWidth +
                                                         block * kWidth + across * kColumns);
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) reinterpret_cast<float4*>(inverses)[i] = source[i];
}

// ---- conversion to e4m3 ---------------------------------------------------------------------------------------------

template <int kColumns>
__device__ __forceinline__ void load_channels(Bf16, const uint32_t* words, float, float* values) {
#pragma unroll
  for (int j = 0; j < kColumns / 2; ++j) {
    values[2 * j] = float_of(words[j] << 16);
    values[2 * j + 1] = float_of(words[j] & 0xffff0000u);
  }
}

template <int kColumns>
__device__ __forceinline__ void load_channels(Fp32, const uint32_t* words, float, float* values) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) values[j] = float_of(words[j]);
}

template <int kColumns>
__device__ __forceinline__ void load_channels(E4m3, const uint32_t* words, float factor, float* values) {
#pragma unroll
  for (int block = 0; block < kColumns / 4; ++block) decode_e4m3x4(words[block], factor, values + 4 * block);
}

// One token: target = convert((source * factor) * inverse), two roundings; plain sources have no factor.
template <typename Source, int kColumns>
__device__ __forceinline__ void convert_channels(const void* source, float factor, const float* inverses,
                                                 void* target) {
  float values[kColumns];
  load_channels<kColumns>(Source{}, static_cast<const uint32_t*>(source), factor, values);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) values[j] *= inverses[j];
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) static_cast<uint32_t*>(target)[i] = encode_e4m3_word(values + 4 * i);
}

// ---- transposition --------------------------------------------------------------------------------------------------

// A tile of e4m3 in shared memory is 128 tokens of each channel in pieces of eight; this is where a piece lies.
// Exclusive or spreads what 16 neighbouring lanes store, kColumns channels each, over all banks.
template <int kColumns>
__device__ __forceinline__ int piece_of(int channel, int tokens) {
  return channel * 16 + (tokens ^ (channel / kColumns % 16));
}

// kColumns bf16 channels of eight tokens become as many pieces.
template <int kColumns, int kWidth>
__device__ __forceinline__ void store_transposed(const void* source, const float* inverses, void* tile) {
  const uint32_t* words = static_cast<const uint32_t*>(source);
  const int across = threadIdx.x % (kWidth / kColumns), down = threadIdx.x / (kWidth / kColumns);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = words[kColumns / 2 * i + j / 2];
      values[i] = float_of(j % 2 == 0 ? word << 16 : word & 0xffff0000u) * inverses[j];
    }
    static_cast<uint2*>(tile)[piece_of<kColumns>(across * kColumns + j, down)] =
        make_uint2(encode_e4m3_word(values), encode_e4m3_word(values + 4));
  }
}

// Sixteen tokens of a channel: the pieces 2 * pair and 2 * pair + 1.
template <int kColumns>
__device__ __forceinline__ void load_transposed(const void* tile, int channel, int pair, void* target) {
  const uint4 words = static_cast<const uint4*>(tile)[piece_of<kColumns>(channel, 2 * pair) / 2];
  const bool is_swapped = channel / kColumns % 2 != 0;
  *static_cast<uint4*>(target) = is_swapped ? make_uint4(words.z, words.w, words.x, words.y) : words;
}

}  // namespace tk
