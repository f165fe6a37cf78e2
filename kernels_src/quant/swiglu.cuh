// SwiGLU of single numbers: gate / (1 + exp(-gate)) * up and its gradients, in the roundings of plain fp32; and which
// rows belong to an expert.
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

// The correctly rounded 1 / value for 1 <= value < 2^126: what a division does without its tests and its branch.
__device__ __forceinline__ float plain_reciprocal(float value) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(value));
  return __fmaf_rn(guess, __fmaf_rn(-value, guess, 1.0f), guess);
}

// gate / divisor out of such a reciprocal. For divisors 1 + exp(-gate) it is correctly rounded: all 2^32 gates were
// compared on an H200. The signs are such that -0 / divisor stays -0.
__device__ __forceinline__ float plain_quotient(float gate, float divisor, float reciprocal) {
  const float quotient = __fmul_rn(gate, reciprocal);
  return __fmaf_rn(-reciprocal, __fmaf_rn(divisor, quotient, -gate), quotient);
}

__device__ __forceinline__ float silu(float gate, bool is_plain) {
  // The exponential ends in a multiplication by a power of two, so that fused with the addition it gives the same sum
  const float divisor = 1.0f + expf(-gate);
  return is_plain ? plain_quotient(gate, divisor, plain_reciprocal(divisor)) : __fdiv_rn(gate, divisor);
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
