// The one way into a kernel, for typed entries and tk_launch alike.
#pragma once

#include "registry.h"

namespace tk {

// Arguments as tk_launch has them.
tk_status call(const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars, const int32_t* axes,
               tk_stream stream);

// Arguments as tk_check has them.
tk_status check(const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                const int32_t* axes);

// Checks and binds as tk_check does, into a frame of the caller, whose tensors are looked at until it is read no more.
tk_status check_frame(Frame& frame, const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                      const int32_t* axes);

// What the tensor `tensor` (an index among the tensors) must be; arguments as tk_workspace_size has them.
tk_status workspace_size(const KernelDesc& kernel, int32_t tensor, const tk_tensor* const* tensors,
                         const tk_scalar* scalars, const int32_t* axes, int32_t num_sms, tk_workspace_info* info);

// Message of a typed entry whose argument struct read_args does not take; known: sizeof that struct here.
[[gnu::cold]] tk_status fail_args(const KernelDesc& kernel, const size_t* given_size, size_t known);

}  // namespace tk
