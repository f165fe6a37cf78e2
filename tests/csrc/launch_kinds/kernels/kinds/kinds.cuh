// What the kernels of kinds.py do beside TileLang: read a neighbour's shared memory, keep and follow addresses.
#pragma once

#include <cstdint>

namespace kinds {

__device__ __forceinline__ float of_block(const float* mine, int rank) {
  uint32_t remote;
  float value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(mine))), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote));
  return value;
}

__device__ __forceinline__ float follow(int64_t address, int index) {
  return reinterpret_cast<const float*>(address)[index];
}

}  // namespace kinds
