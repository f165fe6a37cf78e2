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

// Message of a typed entry whose argument struct is null or has no size.
[[gnu::cold]] tk_status fail_args(const KernelDesc& kernel);

}  // namespace tk
