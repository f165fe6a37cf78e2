// Remainders of 64-bit numbers by a 32-bit size that many of them share.
#pragma once

#include <cstdint>

namespace tk {

// floor((2^64 - 1) / |size|); for the size 0, which has no remainders, any number.
__device__ __forceinline__ uint64_t reciprocal_of(int32_t size) {
  const uint32_t magnitude = size < 0 ? 0u - static_cast<uint32_t>(size) : static_cast<uint32_t>(size);
  return ~uint64_t{0} / (magnitude == 0 ? 1u : magnitude);
}

// The remainder with the sign of `size`, as floor division leaves it. For u < 2^63 and r = floor((2^64 - 1) / d) the
// high word of u * r is the quotient or one less, so that the rest is below 2 * d and fits 32 bits.
__device__ __forceinline__ int32_t floor_mod(int64_t value, int32_t size, uint64_t reciprocal) {
  const bool is_mirrored = size < 0;
  const uint32_t divisor = is_mirrored ? 0u - static_cast<uint32_t>(size) : static_cast<uint32_t>(size);
  // floor_mod(a, -d) = -floor_mod(-a, d), wrapping as the mix itself does
  const int64_t mirrored = static_cast<int64_t>(0 - static_cast<uint64_t>(value));
  const int64_t dividend = is_mirrored ? mirrored : value;
  const uint64_t folded = static_cast<uint64_t>(dividend < 0 ? ~dividend : dividend);
  const uint32_t quotient = static_cast<uint32_t>(__umul64hi(folded, reciprocal));
  uint32_t rest = static_cast<uint32_t>(folded) - quotient * divisor;
  rest = rest >= divisor ? rest - divisor : rest;
  const uint32_t result = dividend < 0 ? divisor - 1u - rest : rest;
  return static_cast<int32_t>(is_mirrored ? 0u - result : result);
}

}  // namespace tk
