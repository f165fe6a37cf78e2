// Copies from global to shared memory that the threads do not wait for.
#pragma once

#include <cstdint>

namespace tk {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes; zeros where `is_valid` is false. L2 fetches the 256 bytes around them.
__device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool is_valid = true) {
  const int size = is_valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(size)
               : "memory");
}

// The same through L1, for what other warps of the SM copy too.
__device__ __forceinline__ void copy_async_cached(uint32_t target, const void* source, bool is_valid) {
  const int size = is_valid ? 16 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(size) : "memory");
}

// 4 bytes.
__device__ __forceinline__ void copy_word_async(uint32_t target, const void* source, bool is_valid = true) {
  const int size = is_valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(size) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

__device__ __forceinline__ float load_shared_word(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_word(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace tk
