// What the runtime knows of each GPU, read from the driver once per process.
#pragma once

#include "driver.h"

namespace tk {

constexpr int32_t kMaxDevices = 64;  // bits of LaunchState::ready

struct Device {
  int32_t ordinal;       // also the CUdevice
  int32_t major, minor;  // compute capability
  int32_t num_sms;
  int32_t max_smem;  // bytes a block may have after opting in
  char name[128];
  int32_t rank[kMaxArchs];  // arch_rank of kArchs[i] here
};

tk_status find_device(const Driver& driver, int32_t ordinal, const Device** device);

// The device of the current context; TK_NO_CONTEXT if there is none.
tk_status find_current_device(const Driver& driver, const Device** device);

// The primary context of a device, retained for the life of the process as cudart and torch do.
tk_status find_primary_context(const Driver& driver, const Device& device, CUcontext* context);

// Index in kArchs of the arch that suits the device best among those set in `archs` (bit per index); -1 if none runs.
int32_t best_arch(const Device& device, uint32_t archs);

}  // namespace tk
