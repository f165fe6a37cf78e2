// Scores and weights of the expert gates, in the roundings of plain fp32: what is not a call of the math library is one
// operation after the other, so that the compiler fuses no multiplication into an addition and torch's operators give
// the same bits.
#pragma once

#include <cstdint>

namespace tk {

__device__ __forceinline__ float sigmoid(float x) { return __frcp_rn(__fadd_rn(1.0f, expf(-x))); }

__device__ __forceinline__ float sqrt_softplus(float x) { return __fsqrt_rn(x > 20.0f ? x : log1pf(expf(x))); }

// One instance of the code for a lane's scores one after the other: what is unrolled over them has to fit the
// instruction cache. An index that is not known would move them out of the registers, so they go around instead.
template <int kSlots, typename Function>
__device__ __forceinline__ void each_slot_in_turn(float* x, Function function) {
#pragma unroll 1
  for (int turn = 0; turn < kSlots; ++turn) {
    const float value = function(x[0]);
#pragma unroll
    for (int slot = 0; slot + 1 < kSlots; ++slot) x[slot] = x[slot + 1];
    x[kSlots - 1] = value;
  }
}

// The same for a lane's scores at once: kSlots of experts lane, lane + 32, ... below num_experts. IEEE division and
// root carry a branch each for numbers near the ends of the range; tested for all together here, they are four
// instructions.
template <int kSlots>
__device__ __forceinline__ void sigmoid_of_slots(void* values, int num_experts) {
  float* x = static_cast<float*>(values);
  bool ordinary = true;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) ordinary &= !(x[slot] < -80.0f);
  if (__all_sync(0xffffffffu, ordinary)) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (slot * 32 >= num_experts) continue;
      const float divisor = __fadd_rn(1.0f, expf(-x[slot]));
      float inverse;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
      x[slot] = __fmaf_rn(inverse, __fmaf_rn(-divisor, inverse, 1.0f), inverse);
    }
    return;
  }
  each_slot_in_turn<kSlots>(x, [](float score) { return sigmoid(score); });
}

template <int kSlots>
__device__ __forceinline__ void sqrt_softplus_of_slots(void* values, int num_experts) {
  float* x = static_cast<float*>(values);
  bool ordinary = true;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) ordinary &= !(x[slot] < -69.0f || x[slot] > 1e38f);
  if (__all_sync(0xffffffffu, ordinary)) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (slot * 32 >= num_experts) continue;
      const float square = x[slot] > 20.0f ? x[slot] : log1pf(expf(x[slot]));
      float inverse;
      asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(square));
      const float root = __fmul_rn(square, inverse);
      x[slot] = __fmaf_rn(__fmaf_rn(-root, root, square), __fmul_rn(inverse, 0.5f), root);
    }
    return;
  }
  each_slot_in_turn<kSlots>(x, [](float score) { return sqrt_softplus(score); });
}

// The numerator of softmax; `largest` is the row's largest logit.
__device__ __forceinline__ float softmax_part(float x, float largest) { return expf(__fsub_rn(x, largest)); }

__device__ __forceinline__ float quotient(float x, float y) { return __fdiv_rn(x, y); }
__device__ __forceinline__ float product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ float sum(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ float difference(float x, float y) { return __fsub_rn(x, y); }

// du/dx of u = sqrt(softplus(x)), from u: (1 - exp(-u^2)) / 2u. Below 1 a polynomial in u^2 keeps the digits that 1 -
// exp loses (largest relative error 8e-9).
__device__ __forceinline__ float sqrt_softplus_slope(float u) {
  const float v = __fmul_rn(u, u);
  if (v < 1.0f) {
    const float half = __fmul_rn(0.5f, u);
    float q = 0.000129130945f;
    q = __fadd_rn(__fmul_rn(q, v), -0.00130112655f);
    q = __fadd_rn(__fmul_rn(q, v), 0.00827621203f);
    q = __fadd_rn(__fmul_rn(q, v), -0.041647464f);
    q = __fadd_rn(__fmul_rn(q, v), 0.166663632f);
    q = __fadd_rn(__fmul_rn(q, v), -0.499999821f);
    return __fadd_rn(half, __fmul_rn(__fmul_rn(half, v), q));
  }
  return __fmul_rn(0.5f, __fdiv_rn(__fsub_rn(1.0f, expf(-v)), u));
}

// Which of an expert's `count` replicas serves a token: floor modulo of ep_rank + token * 23333; -1 if there are none.
__device__ __forceinline__ int64_t replica_of(int ep_rank, int64_t token, int count) {
  if (count <= 0) return -1;
  const int64_t rest = (ep_rank + token * 23333) % count;
  return rest < 0 ? rest + count : rest;
}

// The number that a physical expert has on the ranks of tensor-parallel rank `tp_rank`; -1 for experts of other ranks.
__device__ __forceinline__ int local_expert(int expert, int experts_per_rank, int tp_rank, int num_tp_ranks) {
  if (expert < 0 || experts_per_rank <= 0 || num_tp_ranks <= 0) return -1;
  if (num_tp_ranks == 1 && tp_rank == 0) return expert;  // two divisions less
  const int rank = expert / experts_per_rank;
  if (rank % num_tp_ranks != tp_rank) return -1;
  const int shifted = expert - tp_rank * experts_per_rank;
  return shifted - rank / num_tp_ranks * (num_tp_ranks - 1) * experts_per_rank;
}

}  // namespace tk
