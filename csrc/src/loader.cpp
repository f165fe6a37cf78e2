#include "loader.h"

#include <cstdlib>

#include "check.h"
#include "message.h"

namespace tk {

namespace {

// Loaded units, indexed like kBlobs. Only touched under SetupLock; never unloaded, since kernels may run until exit.
CUlibrary* libraries = nullptr;

constexpr uint32_t kPortableClusterSize = 8;  // larger ones need opting in

// A failure on the way: which kernel, which unit, where.
struct Loading {
  const Driver& driver;
  const Device& device;
  const KernelDesc& kernel;
  const VariantDesc& variant;

  tk_status failed(const char* call, CUresult result) const {
    const Blob& blob = kBlobs[variant.unit];
    Message message;
    message.add("%s: loading %s (%s, %zu bytes) on cuda:%d: ", kernel.name, variant.id, blob.id, blob.size,
                static_cast<int>(device.ordinal));
    return add_driver_error(message, driver, call, result);
  }
};

tk_status find_library(const Loading& loading, CUlibrary* library) {
  if (libraries == nullptr) {
    libraries = static_cast<CUlibrary*>(std::calloc(static_cast<size_t>(kNumBlobs), sizeof(CUlibrary)));
    if (libraries == nullptr) return fail(TK_OUT_OF_MEMORY, "%s: no host memory to load it", loading.kernel.name);
  }
  CUlibrary& entry = libraries[loading.variant.unit];
  if (entry == nullptr) {
    CUlibraryOption options[] = {CU_LIBRARY_BINARY_IS_PRESERVED};
    int preserved = 1;
    void* values[] = {&preserved};
    const CUresult result = loading.driver.cuLibraryLoadData(&entry, kBlobs[loading.variant.unit].data, nullptr,
                                                             nullptr, 0, options, values, 1);
    if (result != CUDA_SUCCESS) {
      entry = nullptr;
      return loading.failed("cuLibraryLoadData", result);
    }
  }
  *library = entry;
  return TK_OK;
}

// Opts in to all the shared memory that the kernel leaves free, since the amount of a launch may depend on its shapes.
tk_status set_attributes(const Loading& loading, const LaunchDesc& launch, CUkernel kernel) {
  const Driver& driver = loading.driver;
  const CUdevice device = loading.device.ordinal;
  int static_smem = 0;
  CUresult result = driver.cuKernelGetAttribute(&static_smem, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel, device);
  if (result != CUDA_SUCCESS) return loading.failed("cuKernelGetAttribute", result);
  result = driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                       loading.device.max_smem - static_smem, kernel, device);
  if (result != CUDA_SUCCESS) return loading.failed("cuKernelSetAttribute", result);
  if (launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > kPortableClusterSize) {
    result = driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel, device);
    if (result != CUDA_SUCCESS) return loading.failed("cuKernelSetAttribute", result);
  }
  return TK_OK;
}

}  // namespace

tk_status load_kernel(const Driver& driver, const Device& device, const KernelDesc& kernel, const VariantDesc& variant,
                      int32_t index, CUkernel* loaded) {
  const Loading loading{driver, device, kernel, variant};
  const LaunchDesc& launch = variant.launches[index];
  LaunchState& state = variant.states[index];
  const SetupLock lock;
  *loaded = state.kernel.load(std::memory_order_relaxed);
  if (*loaded == nullptr) {
    CUlibrary library = nullptr;
    TK_RETURN_IF_ERROR(find_library(loading, &library));
    const CUresult result = driver.cuLibraryGetKernel(loaded, library, launch.symbol);
    if (result != CUDA_SUCCESS) return loading.failed("cuLibraryGetKernel", result);
    state.kernel.store(*loaded, std::memory_order_relaxed);
  }
  const uint64_t bit = uint64_t{1} << device.ordinal;
  if ((state.ready.load(std::memory_order_relaxed) & bit) != 0) return TK_OK;
  TK_RETURN_IF_ERROR(set_attributes(loading, launch, *loaded));
  state.ready.fetch_or(bit, std::memory_order_release);
  return TK_OK;
}

}  // namespace tk
