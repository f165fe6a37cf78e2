// What a thread of the engram gate does with eight neighbouring channels, and what a block does with its sums.
// Pointers are to 16-byte pieces of shared memory or registers.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

namespace tk {

// Eight bf16 numbers of 16 bytes as fp32.
__device__ __forceinline__ void widen(const void* source, float* values) {
  const uint4 words = *static_cast<const uint4*>(source);
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(pairs[i] << 16);
    values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

// Rounded to nearest even.
__device__ __forceinline__ void narrow(const float* values, void* target) {
  __nv_bfloat162 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  *static_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(pairs);
}

// Four are read at once.
template <int kCount>
struct alignas(kCount % 4 == 0 ? 16 : 4) Sums {
  float values[kCount];
};

// The sums of kCount numbers over a block of whole warps, in every thread. The same order each time: lanes by
// butterfly, then warps from first to last. scratch holds two sets of sums used in turns, so that one barrier is
// enough.
template <int kCount, int kThreads>
__device__ __forceinline__ void block_sums(float* sums, float* scratch, int turn) {
  constexpr int kWarps = kThreads / 32;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], distance);
  }
  float* set = scratch + (turn & 1) * kCount * kWarps;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) set[threadIdx.x / 32 * kCount + i] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    Sums<kCount> part = *reinterpret_cast<const Sums<kCount>*>(set + warp * kCount);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = warp == 0 ? part.values[i] : sums[i] + part.values[i];
  }
}

// sums += {(x * w) * k, x * x, k * k}
__device__ __forceinline__ void add_products(float x, float k, float w, float* sums) {
  sums[0] = __fmaf_rn(x * w, k, sums[0]);
  sums[1] = __fmaf_rn(x, x, sums[1]);
  sums[2] = __fmaf_rn(k, k, sums[2]);
}

__device__ __forceinline__ void add_products_x8(const void* x, const void* k, const float* w, float* sums) {
  float xs[8], ks[8];
  widen(x, xs);
  widen(k, ks);
#pragma unroll
  for (int i = 0; i < 8; ++i) add_products(xs[i], ks[i], w[i], sums);
}

__device__ __forceinline__ float root_of_inverse(int hidden) {
  return __frcp_rn(__fsqrt_rn(static_cast<float>(hidden)));
}

// sums as add_products left them -> results = {gate, 1 / RMS of x, 1 / RMS of k}
__device__ __forceinline__ void find_gate(const float* sums, int hidden, float eps, float clamp_value, float* results) {
  const float inverse = __frcp_rn(static_cast<float>(hidden));
  const float rstd_x = rsqrtf(__fmaf_rn(sums[1], inverse, eps));
  const float rstd_k = rsqrtf(__fmaf_rn(sums[2], inverse, eps));
  const float logit = sums[0] * rstd_x * rstd_k * root_of_inverse(hidden);
  const float magnitude = fabsf(logit);
  // fmaxf would turn NaN into a number
  const float root = copysignf(__fsqrt_rn(magnitude < clamp_value ? clamp_value : magnitude), logit);
  results[0] = __frcp_rn(1.0f + expf(-root));
  results[1] = rstd_x;
  results[2] = rstd_k;
}

__device__ __forceinline__ void gate_x8(const void* x, const void* v, float gate, void* out) {
  float xs[8], vs[8];
  widen(x, xs);
  widen(v, vs);
#pragma unroll
  for (int i = 0; i < 8; ++i) xs[i] = __fmaf_rn(gate, vs[i], xs[i]);
  narrow(xs, out);
}

// ---- backward -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void add_dot_x8(const void* x, const void* y, float* sum) {
  float xs[8], ys[8];
  widen(x, xs);
  widen(y, ys);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[0] = __fmaf_rn(xs[i], ys[i], sum[0]);
}

// results = {r, what x is multiplied by, what k is multiplied by}, from the sum of grad_out * v and the saved numbers.
__device__ __forceinline__ void find_gate_gradient(float grad_gate, float dot, float gate, float rstd_x, float rstd_k,
                                                   int hidden, float clamp_value, float* results) {
  const float inverse = __frcp_rn(static_cast<float>(hidden));
  const float scale = root_of_inverse(hidden) * rstd_x * rstd_k;
  const float magnitude = fabsf(dot);
  const bool is_clamped = magnitude * scale < clamp_value;
  const float slope = grad_gate * gate * (1.0f - gate) * 0.5f * __fsqrt_rn(__fdiv_rn(scale, magnitude));
  results[0] = is_clamped ? 0.0f : slope;
  results[1] = dot * rstd_x * rstd_x * inverse;
  results[2] = dot * rstd_k * rstd_k * inverse;
}

// The same for four streams: sums[i] and factors[3 * i ...] are of stream i, numbers = {dot, gate, rstd_x, rstd_k} of
// stream lane % 4. Four lanes share the roots and divisions; gates[i] is the gate of stream i.
__device__ __forceinline__ void find_gate_gradients_x4(const float* sums, const float* numbers, int hidden,
                                                       float clamp_value, float* factors, float* gates) {
  const int stream = threadIdx.x % 4;
  const float sum = stream < 2 ? (stream == 0 ? sums[0] : sums[1]) : (stream == 2 ? sums[2] : sums[3]);
  float own[3];
  find_gate_gradient(sum, numbers[0], numbers[1], numbers[2], numbers[3], hidden, clamp_value, own);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 3; ++j) factors[3 * i + j] = __shfl_sync(0xffffffffu, own[j], i, 4);
    gates[i] = __shfl_sync(0xffffffffu, numbers[1], i, 4);
  }
}

struct GateGradients {
  float x, k;
};

__device__ __forceinline__ GateGradients gate_gradients(float grad_out, float x, float k, float w, const float* factors,
                                                        float* grad_w) {
  *grad_w = __fmaf_rn(factors[0] * x, k, *grad_w);
  return {__fmaf_rn(factors[0], k * w - x * factors[1], grad_out), factors[0] * (x * w - k * factors[2])};
}

// found = gradients of x and of k
__device__ __forceinline__ void gate_gradients_of(float grad_out, float x, float k, float w, const float* factors,
                                                  float* grad_w, float* found) {
  const GateGradients result = gate_gradients(grad_out, x, k, w, factors, grad_w);
  found[0] = result.x;
  found[1] = result.k;
}

__device__ __forceinline__ void gate_gradients_x8(const void* grad_out, const void* x, const void* k, const float* w,
                                                  const float* factors, float* grad_w, void* grad_x, void* grad_k) {
  float gs[8], xs[8], ks[8];
  widen(grad_out, gs);
  widen(x, xs);
  widen(k, ks);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const GateGradients found = gate_gradients(gs[i], xs[i], ks[i], w[i], factors, grad_w + i);
    gs[i] = found.x;
    ks[i] = found.k;
  }
  narrow(gs, grad_x);
  narrow(ks, grad_k);
}

// The sum over four streams, `step` elements apart, of grad_out times the stream's gate.
__device__ __forceinline__ void value_gradients_x8(const void* grad_out, int step, const float* gates, void* target) {
  float total[8] = {};
#pragma unroll
  for (int stream = 0; stream < 4; ++stream) {
    float gs[8];
    widen(static_cast<const __nv_bfloat16*>(grad_out) + stream * step, gs);
#pragma unroll
    for (int i = 0; i < 8; ++i) total[i] = __fmaf_rn(gs[i], gates[stream], total[i]);
  }
  narrow(total, target);
}

}  // namespace tk
