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

// One call on its way to one device and stream.
class Launcher {
 public:
  // functions: those of the current context for the first Plan::kMaxLaunches launches, null where unknown
  Launcher(const Driver& driver, const Device& device, const VariantDesc& variant, tk_stream stream,
           void* const* functions = nullptr)
      : driver_(driver), device_(device), variant_(variant), stream_(stream), functions_(functions) {}

  // global_dim: rank elements, innermost first. global_stride: rank - 1, in bytes, without the innermost.
  tk_status make_map(const Frame& frame, const TensorMapDesc& desc, const int64_t* global_dim,
                     const int64_t* global_stride, TensorMap* map);

  // Launches variant.launches[index]; arguments: pointers to the kernel's parameters, in its order. An empty grid is
  // skipped.
  tk_status launch(const Frame& frame, int index, const Geometry& geometry, void** arguments);

 private:
  const Driver& driver_;
  const Device& device_;
  const VariantDesc& variant_;
  tk_stream stream_;
  void* const* functions_;
};

}  // namespace tk
