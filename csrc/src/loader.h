// Kernels from the blobs of the library into the driver: once per unit and process, attributes once per device.
#pragma once

#include "device.h"

namespace tk {

// The slow path of find_kernel: loads under SetupLock. Nothing is remembered of a failure, the next call tries again.
[[gnu::cold]] tk_status load_kernel(const Driver& driver, const Device& device, const KernelDesc& kernel,
                                    const VariantDesc& variant, int32_t index, CUkernel* loaded);

// The kernel of variant.launches[index], ready to be launched on `device`. One atomic load after first use.
inline tk_status find_kernel(const Driver& driver, const Device& device, const KernelDesc& kernel,
                             const VariantDesc& variant, int32_t index, CUkernel* loaded) {
  const LaunchState& state = variant.states[index];
  if ((state.ready.load(std::memory_order_acquire) >> device.ordinal & 1) != 0) [[likely]] {
    *loaded = state.kernel.load(std::memory_order_relaxed);
    return TK_OK;
  }
  return load_kernel(driver, device, kernel, variant, index, loaded);
}

}  // namespace tk
