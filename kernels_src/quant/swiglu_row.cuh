// SwiGLU of a row, or of a share of its tiles, by a warp. Written with addresses that move on from tile to tile:
// instructions bound these kernels as much as bytes do, and computed anew the addresses were one in six.
#pragma once

#include "swiglu.cuh"
#include "to_e4m3.cuh"

namespace tk {

// ---- words of a thread's channels -----------------------------------------------------------------------------------

template <typename Kind>
constexpr int kItemsize = 4;
template <>
constexpr int kItemsize<Bf16> = 2;
template <>
constexpr int kItemsize<E4m3> = 1;

template <int kBytes, bool kIsAligned>
__device__ __forceinline__ void load_words(const uint8_t* source, uint32_t* words) {
  if constexpr (kIsAligned && kBytes == 8) {
    const uint2 part = __ldg(reinterpret_cast<const uint2*>(source));
    words[0] = part.x;
    words[1] = part.y;
  } else if constexpr (kIsAligned) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 part = __ldg(reinterpret_cast<const uint4*>(source) + i);
      words[4 * i] = part.x;
      words[4 * i + 1] = part.y;
      words[4 * i + 2] = part.z;
      words[4 * i + 3] = part.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      words[i] = 0u;
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i] |= uint32_t{__ldg(source + 4 * i + j)} << (8 * j);
    }
  }
}

template <int kBytes, bool kIsAligned>
__device__ __forceinline__ void store_words(uint8_t* target, const uint32_t* words) {
  if constexpr (!kIsAligned) {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) target[i] = static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)));
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      reinterpret_cast<uint4*>(target)[i] =
          make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  }
}

template <int N>
__device__ __forceinline__ void round_to(Bf16, const float* values, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <int N>
__device__ __forceinline__ void round_to(Fp32, const float* values, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < N; ++i) words[i] = bits_of(values[i]);
}

constexpr int kTileChannels = 512;

// ---- values ---------------------------------------------------------------------------------------------------------

// Whether all gates are plain ones.
template <int N>
__device__ __forceinline__ bool are_plain(Bf16, const uint32_t* words) {
#if __CUDA_ARCH__ >= 890
  // Maximum of magnitudes, with signs that nobody looks at
  uint32_t most = words[0];
#pragma unroll
  for (int i = 1; i < N / 2; ++i) asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(words[i]));
  constexpr uint32_t kLimit = 0x42aeu;  // kLargestPlainGate
  return (most & 0x7fffu) <= kLimit && (most & 0x7fff0000u) <= (kLimit << 16);
#else
  return largest<N>(Bf16{}, words) <= kLargestPlainGate;
#endif
}

template <int N>
__device__ __forceinline__ bool are_plain(Fp32, const uint32_t* words) {
  return largest<N>(Fp32{}, words) <= kLargestPlainGate;
}

// Clamp in place, two bf16 numbers at a time; false if the limit is no bf16 number.
template <int N>
__device__ __forceinline__ bool clamp_words(Bf16, uint32_t* gates, uint32_t* ups, float limit) {
  if ((bits_of(limit) & 0xffffu) != 0u) return false;
  const __nv_bfloat162 most = __float2bfloat162_rn(limit), least = __hneg2(most);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    __nv_bfloat162& gate = reinterpret_cast<__nv_bfloat162*>(gates)[i];
    __nv_bfloat162& up = reinterpret_cast<__nv_bfloat162*>(ups)[i];
    gate = __hmin2_nan(gate, most);
    up = __hmax2_nan(__hmin2_nan(up, most), least);
  }
  return true;
}

template <int N>
__device__ __forceinline__ bool clamp_words(Fp32, uint32_t*, uint32_t*, float) {
  return false;
}

// values = silu(min(gate, limit)) * clamp(up, -limit, limit) * weight; without has_limit nothing is clamped, without
// has_weight nothing weighted. Gates and ups are changed.
template <typename Source, int N>
__device__ __forceinline__ void swiglu(uint32_t* gates, uint32_t* ups, bool has_limit, float limit, bool has_weight,
                                       float weight, float* values) {
  if (has_limit && clamp_words<N>(Source{}, gates, ups, limit)) has_limit = false;
  const bool is_plain = are_plain<N>(Source{}, gates);
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    float gate[8], up[8];
    float* target = values + 8 * block;
    load_x8(Source{}, gates, block, 1.0f, gate);
    load_x8(Source{}, ups, block, 1.0f, up);
    if (has_limit) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        gate[i] = min_or_nan(gate[i], limit);
        up[i] = max_or_nan(min_or_nan(up[i], limit), -limit);
      }
    }
    if (is_plain) {
#pragma unroll
      for (int i = 0; i < 8; ++i) target[i] = silu(gate[i], true);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) target[i] = silu(gate[i], false);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) target[i] = __fmul_rn(target[i], up[i]);
  }
  if (has_weight) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = __fmul_rn(values[i], weight);
  }
}

// ---- what a clamp changes -------------------------------------------------------------------------------------------

// Counts of (gate > limit, up > limit, up < -limit) are held as two halves a word.
//
// bf16: comparison gives 1 or 0 in either half; added to 128, whose last bit is 1, the sum's bits hold the count. For
// bf16 numbers x > limit is x > limit rounded down.
template <int N>
__device__ __forceinline__ void count_clamped(Bf16, const uint32_t* gates, const uint32_t* ups, float limit,
                                              uint32_t* counts) {
  const uint32_t upper = bits_of(limit) & 0xffff0000u, word = upper | (upper >> 16), negative = word ^ 0x80008000u;
  const __nv_bfloat162 most = *reinterpret_cast<const __nv_bfloat162*>(&word);
  const __nv_bfloat162 least = *reinterpret_cast<const __nv_bfloat162*>(&negative);
  const __nv_bfloat162* gate_pairs = reinterpret_cast<const __nv_bfloat162*>(gates);
  const __nv_bfloat162* up_pairs = reinterpret_cast<const __nv_bfloat162*>(ups);
  __nv_bfloat162 sums[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) sums[i] = __float2bfloat162_rn(128.0f);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    sums[0] = __hadd2(sums[0], __hgt2(gate_pairs[i], most));
    sums[1] = __hadd2(sums[1], __hgt2(up_pairs[i], most));
    sums[2] = __hadd2(sums[2], __hlt2(up_pairs[i], least));
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) counts[i] += *reinterpret_cast<const uint32_t*>(&sums[i]) - 0x43004300u;
}

template <int N>
__device__ __forceinline__ void count_clamped(Fp32, const uint32_t* gates, const uint32_t* ups, float limit,
                                              uint32_t* counts) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float gate = float_of(gates[i]), up = float_of(ups[i]);
    counts[0] += gate > limit ? 1u : 0u;
    counts[1] += up > limit ? 1u : 0u;
    counts[2] += up < -limit ? 1u : 0u;
  }
}

// ---- what becomes of the values of a tile ---------------------------------------------------------------------------

// A store as bf16 or fp32.
template <typename Target, int N, bool kIsAligned>
struct ValueTiles {
  uint8_t* target;
  int step;  // channels from one tile of the warp to the next

  __device__ __forceinline__ void take(const float* values, int, bool is_inside) {
    uint32_t words[N * kItemsize<Target> / 4];
    round_to<N>(Target{}, values, words);
    if (is_inside) store_words<N * kItemsize<Target>, kIsAligned>(target, words);
    target += step * kItemsize<Target>;
  }
};

// A cast to e4m3 with a scale for each group of 32 or 128 channels.
template <int N, bool kIsAligned>
struct Fp8Tiles {
  uint8_t* target;
  int step;
  uint8_t* scales;      // of the first channel of this thread
  int64_t scales_step;  // bytes
  int scales_end;       // the channel from which on no byte of a scale is stored
  uint32_t scale_mask;  // 0 for scales of zero
  int num_per_channels;
  float clamp_min;
  bool round_sf, is_packed;

  __device__ __forceinline__ void take(const float* values, int column, bool is_inside) {
    float most = largest<N>(Fp32{}, reinterpret_cast<const uint32_t*>(values));
#pragma unroll
    for (int lanes = 1; lanes < 32 / N; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    if (num_per_channels > 32) {
#pragma unroll
      for (int lanes = 32 / N; lanes < 128 / N; lanes *= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
      }
    }
    float scale, factor;
    make_scales<1>(&most, clamp_min, 448.0f, round_sf, kScaleFp32, &scale, &factor);
    if (is_inside) {
      uint32_t words[N / 4];
      scale_to_e4m3<Fp32, N>(values, factor, words);
      store_words<N, kIsAligned>(target, words);
    }
    // The first lane of a group stores; bytes of a packed word beyond the last group become 0
    if ((column & (num_per_channels - 1)) == 0 && column < scales_end) {
      const uint32_t bits = is_inside ? bits_of(scale) & scale_mask : 0u;
      if (is_packed) {
        *scales = static_cast<uint8_t>(bits >> 23);
      } else {
        *reinterpret_cast<uint32_t*>(scales) = bits;
      }
    }
    target += step;
    scales += scales_step;
  }
};

// The largest magnitude alone.
template <int N>
struct LargestTiles {
  float most;

  __device__ __forceinline__ void take(const float* values, int, bool is_inside) {
    if (is_inside) most = fmaxf(most, largest<N>(Fp32{}, reinterpret_cast<const uint32_t*>(values)));
  }
};

// A cast to e4m3 with a factor that is known.
template <int N, bool kIsAligned>
struct ScaledTiles {
  uint8_t* target;
  float factor;

  __device__ __forceinline__ void take(const float* values, int, bool is_inside) {
    uint32_t words[N / 4];
    scale_to_e4m3<Fp32, N>(values, factor, words);
    if (is_inside) store_words<N, kIsAligned>(target, words);
    target += kTileChannels;
  }
};

// ---- a row ----------------------------------------------------------------------------------------------------------

// The warp takes every num_parts-th run of 512 channels of a row, in one tile or in two halves of it.
template <typename Source, int N, bool kIsAligned, typename Tiles>
__device__ __forceinline__ void walk_row(const uint8_t* row, int hidden, int part, int num_parts, bool has_limit,
                                         float limit, bool has_weight, float weight, bool is_counted, int* counts,
                                         Tiles* tiles) {
  constexpr int kBytes = N * kItemsize<Source>;
  constexpr int kTiles = kTileChannels / (32 * N);
  const int num_runs = (hidden + kTileChannels - 1) / kTileChannels;
  const int64_t half = static_cast<int64_t>(hidden) * kItemsize<Source>;
  uint32_t clamped[3] = {0u, 0u, 0u};
  int column = part * kTileChannels + static_cast<int>(threadIdx.x % 32) * N;
  row += column * kItemsize<Source>;
#pragma unroll 1
  for (int run = part; run < num_runs; run += num_parts) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const bool is_inside = column < hidden;
      uint32_t gates[kBytes / 4] = {}, ups[kBytes / 4] = {};
      if (is_inside) {
        load_words<kBytes, kIsAligned>(row, gates);
        load_words<kBytes, kIsAligned>(row + half, ups);
      }
      if (is_counted) {
        if (is_inside) {
          count_clamped<N>(Source{}, gates, ups, limit, clamped);
          counts[3] += N;
        }
      }
      float values[N];
      swiglu<Source, N>(gates, ups, has_limit, limit, has_weight, weight, values);
      tiles[tile].take(values, column, is_inside);
      column += 32 * N;
      row += 32 * kBytes;
    }
    column += (num_parts - 1) * kTileChannels;
    row += (num_parts - 1) * kTileChannels * kItemsize<Source>;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) counts[i] = static_cast<int>((clamped[i] & 0xffffu) + (clamped[i] >> 16));
}

// SwiGLU of a row as bf16 or fp32.
template <typename Source, typename Target, int N, bool kIsAligned>
__device__ __forceinline__ void swiglu_row(const void* x, int64_t x_stride, void* out, int row, int hidden, int part,
                                           int num_parts, bool has_limit, float limit, bool has_weight, float weight,
                                           bool is_counted, void* counts) {
  constexpr int kTiles = kTileChannels / (32 * N);
  ValueTiles<Target, N, kIsAligned> tiles[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int column = part * kTileChannels + (tile * 32 + static_cast<int>(threadIdx.x % 32)) * N;
    tiles[tile].target = static_cast<uint8_t*>(out) + (static_cast<int64_t>(row) * hidden + column) * kItemsize<Target>;
    tiles[tile].step = num_parts * kTileChannels;
  }
  walk_row<Source, N, kIsAligned>(static_cast<const uint8_t*>(x) + row * x_stride * kItemsize<Source>, hidden, part,
                                  num_parts, has_limit, limit, has_weight, weight, is_counted,
                                  static_cast<int*>(counts), tiles);
}

// SwiGLU of a row, cast to e4m3.
template <typename Source, int N, bool kIsAligned>
__device__ __forceinline__ void swiglu_row_to_e4m3(const void* x, int64_t x_stride, void* out, void* out_sf,
                                                   int64_t sf_row_stride, int64_t sf_column_stride, int num_sf_columns,
                                                   bool is_packed, int num_per_channels, float clamp_min, bool round_sf,
                                                   int row, int hidden, int part, int num_parts, bool has_limit,
                                                   float limit, bool has_weight, float weight, bool is_counted,
                                                   void* counts) {
  constexpr int kTiles = kTileChannels / (32 * N);
  const int shift = exact_log2(num_per_channels), packing = is_packed ? 2 : 0;
  Fp8Tiles<N, kIsAligned> tiles[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int column = part * kTileChannels + (tile * 32 + static_cast<int>(threadIdx.x % 32)) * N;
    const int group = column >> shift;
    const int64_t element = row * sf_row_stride + (group >> packing) * sf_column_stride;
    tiles[tile].target = static_cast<uint8_t*>(out) + static_cast<int64_t>(row) * hidden + column;
    tiles[tile].step = num_parts * kTileChannels;
    tiles[tile].scales = static_cast<uint8_t*>(out_sf) + 4 * element + (is_packed ? group & 3 : 0);
    tiles[tile].scales_step = 4 * sf_column_stride * (num_parts * (kTileChannels >> shift >> packing));
    tiles[tile].scales_end = num_sf_columns << (shift + packing);
    tiles[tile].scale_mask = 0xffffffffu;
    tiles[tile].num_per_channels = num_per_channels;
    tiles[tile].clamp_min = clamp_min;
    tiles[tile].round_sf = round_sf;
    tiles[tile].is_packed = is_packed;
  }
  walk_row<Source, N, kIsAligned>(static_cast<const uint8_t*>(x) + row * x_stride * kItemsize<Source>, hidden, part,
                                  num_parts, has_limit, limit, has_weight, weight, is_counted,
                                  static_cast<int*>(counts), tiles);
}

// SwiGLU of a row, cast to e4m3 with one scale, which is the first byte of a packed word.
template <typename Source, int N, bool kIsAligned>
__device__ __forceinline__ void swiglu_row_to_e4m3_with_one_scale(const void* x, int64_t x_stride, void* out,
                                                                  void* out_sf, int64_t sf_row_stride, int64_t, int,
                                                                  bool is_packed, int, float clamp_min, bool round_sf,
                                                                  int row, int hidden, int part, int num_parts,
                                                                  bool has_limit, float limit, bool has_weight,
                                                                  float weight, bool is_counted, void* counts) {
  constexpr int kTiles = kTileChannels / (32 * N);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint8_t* start = static_cast<const uint8_t*>(x) + row * x_stride * kItemsize<Source>;
  LargestTiles<N> maxima[kTiles] = {};
  walk_row<Source, N, kIsAligned>(start, hidden, part, num_parts, has_limit, limit, has_weight, weight, is_counted,
                                  static_cast<int*>(counts), maxima);
  float most = maxima[0].most, scale;
#pragma unroll
  for (int tile = 1; tile < kTiles; ++tile) most = fmaxf(most, maxima[tile].most);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
  ScaledTiles<N, kIsAligned> tiles[kTiles];
  float factor;
  make_scales<1>(&most, clamp_min, 448.0f, round_sf, kScaleFp32, &scale, &factor);
  if (lane == 0) {
    static_cast<uint32_t*>(out_sf)[row * sf_row_stride] = is_packed ? bits_of(scale) >> 23 : bits_of(scale);
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    tiles[tile].target = static_cast<uint8_t*>(out) + static_cast<int64_t>(row) * hidden + (tile * 32 + lane) * N;
    tiles[tile].factor = factor;
  }
  int ignored[4] = {};
  walk_row<Source, N, kIsAligned>(start, hidden, part, num_parts, has_limit, limit, has_weight, weight, false, ignored,
                                  tiles);
}

}  // namespace tk
