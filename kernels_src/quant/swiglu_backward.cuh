// Gradients of SwiGLU of a row by a block: eight neighbouring channels of both halves for each thread at a time, with
// addresses that move on from tile to tile.
#pragma once

#include "swiglu_row.cuh"

namespace tk {

// What is written beside the gradients in `Out`, where x is quantised.
struct SwigluCast {
  uint8_t* data;  // e4m3, (rows, 2 * hidden)
  uint8_t* scales;
  int64_t row_stride, column_stride;
  int num_per_channels;
  float clamp_min;
  bool round_sf, is_packed;
};

// The cast of one half of a row, `start` channels from its start, by the thread whose first channel is `channel`.
template <int kThreads, bool kIsAligned>
__device__ __forceinline__ Fp8Tiles<8, kIsAligned> cast_of_half(const SwigluCast& cast, int row, int hidden, int start,
                                                                int channel, bool is_padding) {
  const int shift = exact_log2(cast.num_per_channels), packing = cast.is_packed ? 2 : 0;
  const int group = (start + channel) >> shift;
  const int64_t element = row * cast.row_stride + (group >> packing) * cast.column_stride;
  Fp8Tiles<8, kIsAligned> tiles;
  tiles.target = cast.data + static_cast<int64_t>(row) * 2 * hidden + start + channel;
  tiles.step = kThreads * 8;
  tiles.scales = cast.scales + 4 * element + (cast.is_packed ? group & 3 : 0);
  tiles.scales_step = 4 * cast.column_stride * (kThreads * 8 >> shift >> packing);
  tiles.scales_end = hidden;
  tiles.scale_mask = is_padding ? 0u : 0xffffffffu;
  tiles.num_per_channels = cast.num_per_channels;
  tiles.clamp_min = cast.clamp_min;
  tiles.round_sf = cast.round_sf;
  tiles.is_packed = cast.is_packed;
  return tiles;
}

// Returns this thread's share of the sum of grad * silu(gate) * up. x_sf, act_out and `cast` may be null; rows of
// padding are not read and get zeros.
template <typename Source, typename Grad, typename Out, int kThreads, bool kIsAligned>
__device__ __forceinline__ float swiglu_backward_tiles(const uint8_t* x, const float* x_sf, const uint8_t* grad,
                                                       uint8_t* x_grad, uint8_t* act_out, const SwigluCast* cast,
                                                       int row, int hidden, bool is_padding, bool has_limit,
                                                       float limit, float weight) {
  constexpr int kBytes = 8 * kItemsize<Source>, kGradBytes = 8 * kItemsize<Grad>, kOutBytes = 8 * kItemsize<Out>;
  const int thread = static_cast<int>(threadIdx.x);
  int channel = thread * 8;
  const uint8_t* source = x + (static_cast<int64_t>(row) * 2 * hidden + channel) * kItemsize<Source>;
  const uint8_t* source_grad = grad + (static_cast<int64_t>(row) * hidden + channel) * kItemsize<Grad>;
  uint8_t* target = x_grad + (static_cast<int64_t>(row) * 2 * hidden + channel) * kItemsize<Out>;
  uint8_t* target_act = act_out + (static_cast<int64_t>(row) * hidden + channel) * kItemsize<Out>;
  const int64_t half = static_cast<int64_t>(hidden) * kItemsize<Source>;
  const int64_t out_half = static_cast<int64_t>(hidden) * kItemsize<Out>;
  Fp8Tiles<8, kIsAligned> gate_tiles, up_tiles;
  int shift = 0, num_groups = 0;
  if (cast != nullptr) {
    gate_tiles = cast_of_half<kThreads, kIsAligned>(*cast, row, hidden, 0, channel, is_padding);
    up_tiles = cast_of_half<kThreads, kIsAligned>(*cast, row, hidden, hidden, channel, is_padding);
    shift = exact_log2(cast->num_per_channels);
    num_groups = hidden >> shift;
    x_sf += static_cast<int64_t>(row) * 2 * num_groups;
  }
  float dot = 0.0f;
#pragma unroll 1
  for (int first = 0; first < hidden; first += kThreads * 8) {
    const bool is_inside = channel < hidden;
    float gate_grads[8] = {}, up_grads[8] = {}, results[8] = {};
    if (is_inside && !is_padding) {
      uint32_t gates[kBytes / 4], ups[kBytes / 4], grads[kGradBytes / 4];
      load_words<kBytes, kIsAligned>(source, gates);
      load_words<kBytes, kIsAligned>(source + half, ups);
      load_words<kGradBytes, kIsAligned>(source_grad, grads);
      float gate_scale = 1.0f, up_scale = 1.0f;
      if (cast != nullptr) {
        const int group = channel >> shift;
        gate_scale = __ldg(x_sf + group);
        up_scale = __ldg(x_sf + num_groups + group);
      }
      swiglu_gradient<Source, Grad>(gates, ups, gate_scale, up_scale, grads, has_limit, limit, weight, gate_grads,
                                    up_grads, results, &dot);
    }
    if (is_inside) {
      uint32_t words[kOutBytes / 4];
      round_to<8>(Out{}, gate_grads, words);
      store_words<kOutBytes, kIsAligned>(target, words);
      round_to<8>(Out{}, up_grads, words);
      store_words<kOutBytes, kIsAligned>(target + out_half, words);
      if (act_out != nullptr) {
        round_to<8>(Out{}, results, words);
        store_words<kOutBytes, kIsAligned>(target_act, words);
      }
    }
    if (cast != nullptr) {
      gate_tiles.take(gate_grads, channel, is_inside);
      up_tiles.take(up_grads, channel, is_inside);
    }
    channel += kThreads * 8;
    source += kThreads * kBytes;
    source_grad += kThreads * kGradBytes;
    target += kThreads * kOutBytes;
    target_act += kThreads * kOutBytes;
  }
  return dot;
}

template <typename Source, typename Out, int kThreads, bool kIsAligned>
__device__ __forceinline__ float swiglu_backward(const void* x, const void* grad, void* x_grad, void* act_out, int row,
                                                 int hidden, bool is_padding, bool has_limit, float limit,
                                                 float weight) {
  return swiglu_backward_tiles<Source, Source, Out, kThreads, kIsAligned>(
      static_cast<const uint8_t*>(x), nullptr, static_cast<const uint8_t*>(grad), static_cast<uint8_t*>(x_grad),
      static_cast<uint8_t*>(act_out), nullptr, row, hidden, is_padding, has_limit, limit, weight);
}

template <typename Grad, int kThreads, bool kIsAligned>
__device__ __forceinline__ float swiglu_backward_and_cast(const void* x, const void* x_sf, const void* grad,
                                                          void* x_grad, void* data, void* scales, int64_t row_stride,
                                                          int64_t column_stride, int num_per_channels, float clamp_min,
                                                          bool round_sf, bool is_packed, void* act_out, int row,
                                                          int hidden, bool is_padding, bool has_limit, float limit,
                                                          float weight) {
  const SwigluCast cast = {static_cast<uint8_t*>(data),
                           static_cast<uint8_t*>(scales),
                           row_stride,
                           column_stride,
                           num_per_channels,
                           clamp_min,
                           round_sf,
                           is_packed};
  return swiglu_backward_tiles<E4m3, Grad, Bf16, kThreads, kIsAligned>(
      static_cast<const uint8_t*>(x), static_cast<const float*>(x_sf), static_cast<const uint8_t*>(grad),
      static_cast<uint8_t*>(x_grad), static_cast<uint8_t*>(act_out), &cast, row, hidden, is_padding, has_limit, limit,
      weight);
}

}  // namespace tk
