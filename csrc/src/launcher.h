// What a variant's generated launch function calls: tensor maps and the launch itself.
#pragma once

#include "registry.h"

namespace tk {

struct Device;
struct Driver;

struct Geometry {
  int64_t grid[3];
  int64_t block[3];
  int64_t smem;  // dynamic shared memory, bytes
};

// Nothing to do: the launch is skipped, before any tensor map is made (the driver refuses empty ones).
constexpr bool is_empty(const Geometry& geometry) {
  return geometry.grid[0] <= 0 || geometry.grid[1] <= 0 || geometry.grid[2] <= 0;
}

constexpr int kMaxMapRank = 5;

// A driver CUtensorMap.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// The fixed part of a tensor map; the numbers are the driver's enums.
struct TensorMapDesc {
  int32_t tensor;  // index among the tensors
  DType dtype;     // element type
  int32_t rank;
  uint32_t box_dim[kMaxMapRank];
  uint32_t element_stride[kMaxMapRank];
  int32_t interleave, swizzle, l2_promotion, oob_fill;
};

// What an argument is, so that the next call like this one can do without the launch function.
struct ArgumentDesc {
  int8_t tensor;  // the address of that tensor (an index among them); -1: a value that a like call has too
  int8_t size;    // bytes, at most 8
};

struct ReadyCall;

// One call on its way to one device and stream.
class Launcher {
 public:
  // functions: those of the current context for the first Plan::kMaxLaunches launches, null where unknown.
  // ready: where to note the launches for calls like this one, or null.
  Launcher(const Driver& driver, const Device& device, const VariantDesc& variant, tk_stream stream,
           void* const* functions, ReadyCall* ready)
      : driver_(driver), device_(device), variant_(variant), stream_(stream), functions_(functions), ready_(ready) {}

  // global_dim: rank elements, innermost first. global_stride: rank - 1, in bytes, without the innermost.
  tk_status make_map(const Frame& frame, const TensorMapDesc& desc, const int64_t* global_dim,
                     const int64_t* global_stride, TensorMap* map);

  // Launches variant.launches[index]; arguments: pointers to the kernel's parameters, in its order; descs: what they
  // are, null where that cannot be said (tensor maps). An empty grid is skipped.
  tk_status launch(const Frame& frame, int index, const Geometry& geometry, void** arguments,
                   const ArgumentDesc* descs = nullptr, int num_descs = 0);

 private:
  const Driver& driver_;
  const Device& device_;
  const VariantDesc& variant_;
  tk_stream stream_;
  void* const* functions_;
  ReadyCall* ready_;
};

// The message of a launch that the driver refused.
[[gnu::cold]] tk_status fail_launch(const Driver& driver, const KernelDesc& kernel, const Device& device,
                                    const LaunchDesc& launch, int result);

}  // namespace tk
