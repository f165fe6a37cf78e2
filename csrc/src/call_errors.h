// The messages of call.cpp and of tk_preload.
#pragma once

#include "device.h"

namespace tk {

[[gnu::cold]] tk_status fail_param_dtype(const Frame& frame, const ParamDesc& param, int32_t tensor);
[[gnu::cold]] tk_status fail_no_data(const Frame& frame, int32_t tensor);
[[gnu::cold]] tk_status fail_no_shape(const Frame& frame, int32_t tensor);
[[gnu::cold]] tk_status fail_misaligned(const Frame& frame, int32_t tensor);
[[gnu::cold]] tk_status fail_overlap(const Frame& frame, int32_t tensor);
[[gnu::cold]] tk_status fail_other_device(const Frame& frame, int32_t tensor, int32_t first);
[[gnu::cold]] tk_status fail_other_dtype(const Frame& frame, int32_t tensor, int32_t first);
[[gnu::cold]] tk_status fail_axis_value(const Frame& frame, const AxisDesc& axis, int32_t value);
[[gnu::cold]] tk_status fail_axis_tensor(const Frame& frame, const AxisDesc& axis);
[[gnu::cold]] tk_status fail_not_cuda(const Frame& frame, const tk_tensor& first);
[[gnu::cold]] tk_status fail_current_device(const Frame& frame, const tk_tensor& first, const Device& device);

// No variant of these axis values (index of the label per axis, -1: any) is in the library.
[[gnu::cold]] tk_status fail_not_built(const KernelDesc& kernel, const int32_t* digits);

// Variants are there, but for the archs of this set (bits of kArchs) only. kernel: null for the library as a whole.
[[gnu::cold]] tk_status fail_no_arch(const KernelDesc& kernel, const Device& device, uint32_t archs);
[[gnu::cold]] tk_status fail_library_arch(const Device& device);

}  // namespace tk
