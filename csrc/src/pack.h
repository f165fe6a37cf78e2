// Overlay packs: shared objects with variants that this library does not hold, found through TILEKERNELS_PACK_PATH or
// given to tk_load_pack. A pack is a library of its own, built from the same sources with other variants (`make pack`),
// and is reached through the C interface: it makes the checks of this library, and nothing else crosses.
#pragma once

#include "registry.h"

namespace tk {

// The functions of a pack.
struct Pack {
  char path[512];
  decltype(&tk_last_error) last_error;
  decltype(&tk_version) version;
  decltype(&tk_abi_version) abi_version;
  decltype(&tk_find) find;
  decltype(&tk_launch) launch;
  decltype(&tk_check) check;
  decltype(&tk_preload) preload;
  decltype(&tk_workspace_size) workspace_size;
  decltype(&tk_num_kernels) num_kernels;
  decltype(&tk_kernel_at) kernel_at;
  decltype(&tk_describe_kernel) describe_kernel;
  decltype(&tk_describe_param) describe_param;
  decltype(&tk_param_dtype) param_dtype;
  decltype(&tk_describe_axis) describe_axis;
  decltype(&tk_describe_variant) describe_variant;
  decltype(&tk_covers) covers;
  decltype(&tk_set_thread_pdl) set_thread_pdl;
};

constexpr int32_t kMaxPacks = 16, kMaxPackKernels = 256;

// Packs that were loaded. The first call loads those of TILEKERNELS_PACK_PATH.
int32_t num_packs();
const Pack& pack_at(int32_t index);

// Kernels that only packs have: behind this library's own, in the order of the packs.
int32_t num_pack_kernels();
const tk_kernel* pack_kernel_at(int32_t index);

// The pack whose handle this is; null for kernels of this library.
const Pack* pack_of(const tk_kernel* kernel);

// tk_launch of a pack, which follows this library's choice of dependent launches.
tk_status launch_in_pack(const Pack& pack, const tk_kernel* kernel, const tk_tensor* const* tensors,
                         const tk_scalar* scalars, const int32_t* axes, tk_stream stream);

// The status of a pack's function, with the pack's words as this thread's message.
tk_status from_pack(const Pack& pack, tk_status status);

// A call that this library refused with `own` (its words are this thread's message): the first pack that has it runs
// it.
tk_status launch_by_pack(const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                         const int32_t* axes, tk_stream stream, tk_status own);
tk_status check_by_pack(const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                        const int32_t* axes, tk_status own);
tk_status workspace_by_pack(const KernelDesc& kernel, int32_t param, const tk_tensor* const* tensors,
                            const tk_scalar* scalars, const int32_t* axes, int32_t num_sms, tk_workspace_info* info,
                            tk_status own);

}  // namespace tk
