#include "launcher.h"

#include "check.h"
#include "loader.h"
#include "message.h"
#include "pdl.h"
#include "plans.h"

namespace tk {

namespace {

constexpr int64_t kMaxGridX = 2147483647, kMaxGridYZ = 65535;

tk_status fail_grid(const Frame& frame, const Geometry& geometry) {
  return fail(TK_INVALID_ARGUMENT,
              "%s: the tensors are too large for one launch: its grid would be (%lld, %lld, %lld), the largest is "
              "(2147483647, 65535, 65535)",
              frame.kernel->name, static_cast<long long>(geometry.grid[0]), static_cast<long long>(geometry.grid[1]),
              static_cast<long long>(geometry.grid[2]));
}

tk_status fail_smem(const Frame& frame, const Device& device, int64_t smem) {
  return fail(TK_INVALID_ARGUMENT, "%s: needs %lld bytes of shared memory a block, cuda:%d (%s) has %d",
              frame.kernel->name, static_cast<long long>(smem), static_cast<int>(device.ordinal), device.name,
              static_cast<int>(device.max_smem));
}

bool is_tma_dtype(DType dtype, CUtensorMapDataType* type) {
  struct Pair {
    DType dtype;
    CUtensorMapDataType type;
  };
  constexpr Pair kPairs[] = {
      {DType::uint16, CU_TENSOR_MAP_DATA_TYPE_UINT16},     {DType::int16, CU_TENSOR_MAP_DATA_TYPE_UINT16},
      {DType::uint32, CU_TENSOR_MAP_DATA_TYPE_UINT32},     {DType::int32, CU_TENSOR_MAP_DATA_TYPE_INT32},
      {DType::uint64, CU_TENSOR_MAP_DATA_TYPE_UINT64},     {DType::int64, CU_TENSOR_MAP_DATA_TYPE_INT64},
      {DType::float16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16},   {DType::float32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32},
      {DType::bfloat16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}, {DType::float64, CU_TENSOR_MAP_DATA_TYPE_FLOAT64},
  };
  for (const Pair& pair : kPairs) {
    if (pair.dtype != dtype) continue;
    *type = pair.type;
    return true;
  }
  // Every one-byte format travels as bytes.
  *type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return itemsize_of(dtype) == 1;
}

tk_status fail_map(const Driver& driver, const Frame& frame, const TensorMapDesc& desc, const int64_t* global_dim,
                   const int64_t* global_stride, CUresult result) {
  Message message;
  message.add("%s: the tensor map of %s (address %p, sizes", frame.kernel->name,
              tensor_param(*frame.kernel, desc.tensor).name, data_of(frame.tensors[desc.tensor]));
  for (int32_t i = 0; i < desc.rank; ++i) message.add(" %lld", static_cast<long long>(global_dim[i]));
  message.add(", strides in bytes");
  for (int32_t i = 0; i + 1 < desc.rank; ++i) message.add(" %lld", static_cast<long long>(global_stride[i]));
  message.add("): ");
  return add_driver_error(message, driver, "cuTensorMapEncodeTiled", result);
}

// One answer of the occupancy query, packed into a word so that it is read and written whole:
// valid 1 | device 6 | threads 11 | shared memory 18 | blocks 16 bits.
constexpr int kResidencyBlockBits = 16;

uint64_t residency_key(const Device& device, int64_t threads, int64_t smem) {
  const uint64_t key = (uint64_t{1} << 6 | static_cast<uint64_t>(device.ordinal)) << 29 |
                       static_cast<uint64_t>(threads) << 18 | static_cast<uint64_t>(smem);
  return key << kResidencyBlockBits;
}

// All blocks of a cooperative launch wait for each other, so all must be on the GPU at once.
tk_status check_residency(const Driver& driver, const Device& device, const Frame& frame, LaunchState& state,
                          CUkernel kernel, const Geometry& geometry) {
  const int64_t threads = geometry.block[0] * geometry.block[1] * geometry.block[2];
  const uint64_t key = residency_key(device, threads, geometry.smem);
  std::atomic<uint64_t>& slot = state.residency[device.ordinal % LaunchState::kResidencySlots];
  uint64_t entry = slot.load(std::memory_order_relaxed);
  if (entry >> kResidencyBlockBits != key >> kResidencyBlockBits) {
    int blocks = 0;
    const CUresult result = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, kernel, static_cast<int>(threads), static_cast<size_t>(geometry.smem));
    if (result != CUDA_SUCCESS) {
      Message message;
      message.add("%s: ", frame.kernel->name);
      return add_driver_error(message, driver, "cuOccupancyMaxActiveBlocksPerMultiprocessor", result);
    }
    entry = key | static_cast<uint64_t>(blocks);
    slot.store(entry, std::memory_order_relaxed);
  }
  const int64_t resident = static_cast<int64_t>(entry & ((1 << kResidencyBlockBits) - 1)) * device.num_sms;
  const int64_t wanted = geometry.grid[0] * geometry.grid[1] * geometry.grid[2];
  if (wanted <= resident) return TK_OK;
  return fail(TK_INVALID_ARGUMENT,
              "%s: its %lld blocks must run at the same time, cuda:%d (%s) holds %lld of them; ask for fewer SMs",
              frame.kernel->name, static_cast<long long>(wanted), static_cast<int>(device.ordinal), device.name,
              static_cast<long long>(resident));
}

unsigned fill_attributes(const LaunchDesc& launch, CUlaunchAttribute* attributes) {
  unsigned count = 0;
  if (launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > 1) {
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
  }
  if (launch.pdl && is_pdl_on()) count += fill_pdl(&attributes[count]);
  if (launch.cooperative) {
    CUlaunchAttribute& attribute = attributes[count++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute.value.cooperative = 1;
  }
  return count;
}

}  // namespace

tk_status Launcher::make_map(const Frame& frame, const TensorMapDesc& desc, const int64_t* global_dim,
                             const int64_t* global_stride, TensorMap* map) {
  uint64_t dims[kMaxMapRank] = {}, strides[kMaxMapRank] = {};
  for (int32_t i = 0; i < desc.rank; ++i) dims[i] = static_cast<uint64_t>(global_dim[i]);
  for (int32_t i = 0; i + 1 < desc.rank; ++i) strides[i] = static_cast<uint64_t>(global_stride[i]);
  CUtensorMapDataType type;
  if (!is_tma_dtype(desc.dtype, &type)) {
    return fail(TK_DRIVER_ERROR, "%s: tensor maps of %s do not exist", frame.kernel->name, dtype_name(desc.dtype));
  }
  const CUresult result = driver_.cuTensorMapEncodeTiled(
      map, type, static_cast<uint32_t>(desc.rank), data_of(frame.tensors[desc.tensor]), dims, strides, desc.box_dim,
      desc.element_stride, desc.interleave, desc.swizzle, desc.l2_promotion, desc.oob_fill);
  if (result == CUDA_SUCCESS) [[likely]]
    return TK_OK;
  return fail_map(driver_, frame, desc, global_dim, global_stride, result);
}

tk_status Launcher::launch(const Frame& frame, int index, const Geometry& geometry, void** arguments,
                           const ArgumentDesc* descs, int num_descs) {
  if (is_empty(geometry)) return TK_OK;
  if (geometry.grid[0] > kMaxGridX || geometry.grid[1] > kMaxGridYZ || geometry.grid[2] > kMaxGridYZ) [[unlikely]] {
    return fail_grid(frame, geometry);
  }
  if (geometry.smem > device_.max_smem) [[unlikely]]
    return fail_smem(frame, device_, geometry.smem);
  const LaunchDesc& launch = variant_.launches[index];
  CUfunction kernel = functions_ != nullptr && index < Plan::kMaxLaunches ? functions_[index] : nullptr;
  if (kernel == nullptr) TK_RETURN_IF_ERROR(find_kernel(driver_, device_, *frame.kernel, variant_, index, &kernel));
  if (launch.cooperative) {
    TK_RETURN_IF_ERROR(check_residency(driver_, device_, frame, variant_.states[index], kernel, geometry));
  }
  CUlaunchAttribute attributes[3];
  const CUlaunchConfig config = {
      .gridDimX = static_cast<unsigned>(geometry.grid[0]),
      .gridDimY = static_cast<unsigned>(geometry.grid[1]),
      .gridDimZ = static_cast<unsigned>(geometry.grid[2]),
      .blockDimX = static_cast<unsigned>(geometry.block[0]),
      .blockDimY = static_cast<unsigned>(geometry.block[1]),
      .blockDimZ = static_cast<unsigned>(geometry.block[2]),
      .sharedMemBytes = static_cast<unsigned>(geometry.smem),
      .hStream = stream_,
      .attrs = attributes,
      .numAttrs = fill_attributes(launch, attributes),
  };
  const CUresult result = driver_.cuLaunchKernelEx(&config, kernel, arguments, nullptr);
  if (result != CUDA_SUCCESS) [[unlikely]]
    return fail_launch(driver_, *frame.kernel, device_, launch, result);
  if (ready_ != nullptr) note_launch(config, launch, index, arguments, descs, num_descs, ready_);
  return TK_OK;
}

tk_status fail_launch(const Driver& driver, const KernelDesc& kernel, const Device& device, const LaunchDesc& launch,
                      int result) {
  Message message;
  message.add("%s: launching %s on cuda:%d: ", kernel.name, launch.symbol, static_cast<int>(device.ordinal));
  return add_driver_error(message, driver, "cuLaunchKernelEx", static_cast<CUresult>(result));
}

}  // namespace tk
