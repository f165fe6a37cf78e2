// SwiGLU of a thread's channels: gate / (1 + exp(-gate)) * up, in the roundings of plain fp32, and the counts of what a
// clamp changes.
#pragma once

#include "to_e4m3.cuh"

namespace tk {

// ---- one value ------------------------------------------------------------------------------------------------------

// Minimum and maximum that NaN passes through, as it does in torch.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Gates whose 1 + exp(-gate) and its reciprocal are normal numbers.
constexpr float kLargestPlainGate = 87.0f;

// The correctly rounded 1 / value for 1 <= value < 2^126, up to the last bit.
__device__ __forceinline__ float plain_reciprocal(float value) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(value));
  return __fmaf_rn(guess, __fmaf_rn(-value, guess, 1.0f), guess);
}

// x / y, correctly rounded, out of such a reciprocal: without the tests and the branch that a division has for numbers
// at the ends of the range. The signs are such that -0 / y stays -0.
__device__ __forceinline__ float plain_quotient(float x, float y, float reciprocal) {
  float quotient = __fmul_rn(x, reciprocal);
  quotient = __fmaf_rn(-reciprocal, __fmaf_rn(y, quotient, -x), quotient);
  return __fmaf_rn(-reciprocal, __fmaf_rn(y, quotient, -x), quotient);
}

__device__ __forceinline__ float silu(float gate, bool is_plain) {
  // The exponential ends in a multiplication by a power of two, so that fused with the addition it gives the same sum
  const float divisor = 1.0f + expf(-gate);
  return is_plain ? plain_quotient(gate, divisor, plain_reciprocal(divisor)) : __fdiv_rn(gate, divisor);
}

// ---- a thread's channels --------------------------------------------------------------------------------------------

// values = silu(min(gate, limit)) * clamp(up, -limit, limit) * weight; without has_limit nothing is clamped, without
// has_weight nothing weighted.
template <typename Source, int N>
__device__ __forceinline__ void swiglu(const void* gates, const void* ups, bool has_limit, float limit, bool has_weight,
                                       float weight, void* values) {
  const uint32_t* gate_words = static_cast<const uint32_t*>(gates);
  const uint32_t* up_words = static_cast<const uint32_t*>(ups);
  const bool is_plain = largest<N>(Source{}, gate_words) <= kLargestPlainGate;
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    float gate[8], up[8];
    float* target = static_cast<float*>(values) + 8 * block;
    load_x8(Source{}, gate_words, block, 1.0f, gate);
    load_x8(Source{}, up_words, block, 1.0f, up);
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
    for (int i = 0; i < N; ++i) static_cast<float*>(values)[i] = __fmul_rn(static_cast<float*>(values)[i], weight);
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

template <typename Source, int N>
__device__ __forceinline__ void count_clamped(const void* gates, const void* ups, float limit, void* counts) {
  count_clamped<N>(Source{}, static_cast<const uint32_t*>(gates), static_cast<const uint32_t*>(ups), limit,
                   static_cast<uint32_t*>(counts));
}

// Move the halves of a thread's counts to 32-bit totals, before they overflow.
__device__ __forceinline__ void flush_counts(void* counts, void* totals) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    uint32_t& count = static_cast<uint32_t*>(counts)[i];
    static_cast<uint32_t*>(totals)[i] += (count & 0xffffu) + (count >> 16);
    count = 0u;
  }
}

// ---- gradients ------------------------------------------------------------------------------------------------------

// Reciprocal of 1 + exp(-gate) and gate times it, each as a division would round.
__device__ __forceinline__ void sigmoid_and_silu(float gate, bool is_plain, float* sigmoid, float* silu) {
  const float divisor = 1.0f + expf(-gate);
  *sigmoid = is_plain ? plain_reciprocal(divisor) : __frcp_rn(divisor);
  *silu = is_plain ? plain_quotient(gate, divisor, *sigmoid) : __fdiv_rn(gate, divisor);
}

// Eight channels of a row: the gradients of gates and ups, silu(gate) * up * weight, and the sum of grad * silu(gate) *
// up added to `dot`. Gates and ups are multiplied by their scales first.
template <typename Source, typename Grad>
__device__ __forceinline__ void swiglu_gradient(const void* gates, const void* ups, float gate_scale, float up_scale,
                                                const void* grads, bool has_limit, float limit, float weight,
                                                void* gate_grads, void* up_grads, void* results, void* dot) {
  float gate[8], up[8], grad[8];
  load_x8(Source{}, static_cast<const uint32_t*>(gates), 0, gate_scale, gate);
  load_x8(Source{}, static_cast<const uint32_t*>(ups), 0, up_scale, up);
  load_x8(Grad{}, static_cast<const uint32_t*>(grads), 0, 1.0f, grad);
  const bool is_plain = largest<8>(Fp32{}, reinterpret_cast<const uint32_t*>(gate)) <= kLargestPlainGate;
  float sum = 0.0f;
  const auto differentiate = [&](bool plain) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      bool gate_is_clamped = false, up_is_clamped = false;
      if (has_limit) {
        gate_is_clamped = gate[i] > limit;
        up_is_clamped = up[i] > limit || up[i] < -limit;
        gate[i] = min_or_nan(gate[i], limit);
        up[i] = max_or_nan(min_or_nan(up[i], limit), -limit);
      }
      float sigmoid, silu;
      sigmoid_and_silu(gate[i], plain, &sigmoid, &silu);
      const float result = __fmul_rn(silu, up[i]);
      sum = fmaf(grad[i], result, sum);
      static_cast<float*>(results)[i] = __fmul_rn(result, weight);
      const float inner = __fmul_rn(__fmul_rn(grad[i], weight), sigmoid);
      const float slope = __fmaf_rn(gate[i], __fsub_rn(1.0f, sigmoid), 1.0f);
      static_cast<float*>(gate_grads)[i] = gate_is_clamped ? 0.0f : __fmul_rn(__fmul_rn(inner, up[i]), slope);
      static_cast<float*>(up_grads)[i] = up_is_clamped ? 0.0f : __fmul_rn(inner, gate[i]);
    }
  };
  if (is_plain) {
    differentiate(true);
  } else {
    differentiate(false);
  }
  *static_cast<float*>(dot) += sum;
}

// ---- which rows -----------------------------------------------------------------------------------------------------

// Whether a segment holds the row. Segment e starts where the one before it ends, rounded up to `alignment`, and ends
// before ends[e]. All lanes of a warp ask for the same row.
__device__ __forceinline__ int is_in_segment(const void* ends, int num_segments, int alignment, int row) {
  const int32_t* segment_ends = static_cast<const int32_t*>(ends);
  bool found = false;
#pragma unroll 1
  for (int segment = threadIdx.x % 32; segment < num_segments; segment += 32) {
    const int before = segment == 0 ? 0 : segment_ends[segment - 1];
    found |= row < segment_ends[segment] && row >= divide(before + alignment - 1, alignment) * alignment;
  }
  return __any_sync(0xffffffffu, found);
}

// Whether the row fills up a segment: it lies behind its end, and before the next one starts.
__device__ __forceinline__ int is_padding(const void* ends, int num_segments, int alignment, int row) {
  const int32_t* segment_ends = static_cast<const int32_t*>(ends);
  bool found = false;
#pragma unroll 1
  for (int segment = threadIdx.x % 32; segment < num_segments; segment += 32) {
    const int end = segment_ends[segment];
    found |= row >= end && row < divide(end + alignment - 1, alignment) * alignment;
  }
  return __any_sync(0xffffffffu, found);
}

}  // namespace tk
