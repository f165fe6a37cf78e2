// How a tile of sums leaves a block, alone or as one part of a cluster's sum; and the dot products of a single row.
#pragma once

#include <cstdint>

namespace tk {

// ---- a tile of fp32 sums in shared memory -> out -------------------------------------------------------------------

__device__ __forceinline__ float4 load_of_block(const float* mine, int rank) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
  uint32_t remote;
  float4 value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(remote));
  return value;
}

// Four neighbouring sums, added up over the blocks of a cluster in the order of their ranks.
template <int kSplit>
__device__ __forceinline__ float4 load_sums(const float* tile) {
  if constexpr (kSplit == 1) return *reinterpret_cast<const float4*>(tile);
  float4 sum = load_of_block(tile, 0);
#pragma unroll
  for (int rank = 1; rank < kSplit; ++rank) {
    const float4 part = load_of_block(tile, rank);
    sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
  }
  return sum;
}

// Write the tile whose first element is out[row, col]; each block of the cluster writes the rows of its rank. Accesses
// of 16 bytes where out's base, stride and edge allow.
template <int kRows, int kCols, int kPitch, int kSplit, int kThreads, typename Out>
__device__ __forceinline__ void store_tile(const float* tile, Out* out, int64_t stride, int row, int col, int num_rows,
                                           int num_cols, int rank, int thread) {
  constexpr int kVector = 16 / sizeof(Out);
  constexpr int kChunks = kCols / kVector;
  constexpr int kRowsOfRank = (kRows + kSplit - 1) / kSplit;
  const bool aligned = (reinterpret_cast<uintptr_t>(out) % 16 == 0) && (stride * sizeof(Out) % 16 == 0);
  const int end = min(min(kRowsOfRank, kRows - rank * kRowsOfRank), num_rows - row - rank * kRowsOfRank) * kChunks;
  for (int i = thread; i < end; i += kThreads) {
    const int tile_row = rank * kRowsOfRank + i / kChunks, tile_col = i % kChunks * kVector;
    const int left = num_cols - col - tile_col;
    if (left <= 0) continue;
    float sums[kVector];
#pragma unroll
    for (int j = 0; j < kVector; j += 4) {
      *reinterpret_cast<float4*>(sums + j) = load_sums<kSplit>(tile + tile_row * kPitch + tile_col + j);
    }
    alignas(16) Out values[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) values[j] = static_cast<Out>(sums[j]);
    Out* target = out + (row + tile_row) * stride + col + tile_col;
    if (aligned && left >= kVector) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(values);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (j < left) target[j] = values[j];
      }
    }
  }
}

// ---- one row of a --------------------------------------------------------------------------------------------------

// Of 16 bytes of either.
template <typename In>
__device__ __forceinline__ float sum_of_products(const In* a, const In* b) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(static_cast<float>(a[i]), static_cast<float>(b[i]), sum);
  return sum;
}

}  // namespace tk
