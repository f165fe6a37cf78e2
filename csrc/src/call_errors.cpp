#include "call_errors.h"

#include <cstring>

#include "arch.h"
#include "call.h"
#include "check.h"
#include "message.h"
#include "record.h"

namespace tk {

namespace {

Message start(const Frame& frame, const char* name) {
  Message message;
  message.add("%s: %s ", frame.kernel->name, name);
  return message;
}

void add_device(Message& message, tk_device device) {
  switch (device.device_type) {
    case TK_CPU: message.add("cpu"); break;
    case TK_CUDA: message.add("cuda:%d", static_cast<int>(device.device_id)); break;
    case TK_CUDA_HOST: message.add("pinned memory of the cpu"); break;
    case TK_CUDA_MANAGED: message.add("managed memory of cuda:%d", static_cast<int>(device.device_id)); break;
    default: message.add("a device of type %d", static_cast<int>(device.device_type));
  }
}

void add_labels(Message& message, const AxisDesc& axis) {
  for (int32_t i = 0; i < axis.num_values; ++i)
    message.add_separator(i, axis.num_values, "or").add("%s", axis.labels[i]);
}

// "scoring=softmax, fmt=e4m3"
void add_config(Message& message, const KernelDesc& kernel, const int32_t* digits) {
  for (int32_t i = 0; i < kernel.num_axes; ++i) {
    const AxisDesc& axis = kernel.axes[i];
    message.add("%s%s=%s", i == 0 ? "" : ", ", axis.name, digits[i] < 0 ? "any" : axis.labels[digits[i]]);
  }
}

void add_built_configs(Message& message, const KernelDesc& kernel) {
  constexpr int32_t kMaxShown = 8;
  int32_t num_built = 0;
  for (int32_t key = 0; key < kernel.num_keys; ++key) {
    if (kernel.keys[key].num == 0 || ++num_built > kMaxShown) continue;
    int32_t digits[kMaxAxes];
    for (int32_t i = kernel.num_axes - 1, rest = key; i >= 0; --i) {
      digits[i] = rest % kernel.axes[i].num_values;
      rest /= kernel.axes[i].num_values;
    }
    message.add(num_built == 1 ? "(" : "), (");
    add_config(message, kernel, digits);
  }
  message.add(num_built == 0 ? "nothing" : ")");
  if (num_built > kMaxShown) message.add(" and %d more", static_cast<int>(num_built - kMaxShown));
}

// "built for sm_80 and sm_90a, none of which runs"
void add_archs(Message& message, uint32_t archs) {
  int32_t count = 0, index = 0;
  for (int32_t i = 0; i < kNumArchs; ++i) count += archs >> i & 1;
  for (int32_t i = 0; i < kNumArchs; ++i) {
    if ((archs >> i & 1) != 0) message.add_separator(index++, count, "and").add("%s", kArchs[i]);
  }
  message.add(count == 0 ? "no GPU, so nothing runs" : count == 1 ? ", which does not run" : ", none of which runs");
}

// What the device is, and what to install or build for it.
void add_remedy(Message& message, const Device& device) {
  message.add(" on cuda:%d (%s, compute capability %d.%d)", static_cast<int>(device.ordinal), device.name,
              static_cast<int>(device.major), static_cast<int>(device.minor));
  const char* wanted = wanted_arch(device.major, device.minor);
  if (wanted == nullptr) {
    message.add("; tilekernels supports compute capabilities 8.0 to 12.1");
    return;
  }
  // 0.1.0+cu130.sm80 with another GPU in its label; "sm_90a" is written "sm90a" there.
  const char* version = tk_version();
  const int public_length = static_cast<int>(std::strcspn(version, "+"));
  message.add(
      "; that GPU needs %s: install tilekernels==%.*s+cu%d.sm%s (NVIDIA driver >= %s) or build it by `make wheel "
      "ARCHS=%s`",
      wanted, public_length, version, static_cast<int>(kBuildInfo.cuda_version / 100), wanted + 3,
      driver_branch(kBuildInfo.cuda_version), wanted);
}

}  // namespace

tk_status fail_args(const KernelDesc& kernel, const size_t* given_size, size_t known) {
  Message message;
  message.add("%s: the arguments must be a struct whose size field is sizeof that struct, %zu here, got ", kernel.name,
              known);
  if (given_size == nullptr) {
    message.add("null");
  } else if (*given_size > known && *given_size <= kMaxArgsBytes && *given_size % alignof(void*) == 0) {
    message.add("%zu: a field is set that this library does not know, it is older than the header", *given_size);
  } else {
    message.add("%zu", *given_size);
  }
  return TK_INVALID_ARGUMENT;
}

tk_status fail_no_shape(const Frame& frame, int32_t tensor) {
  start(frame, tensor_param(*frame.kernel, tensor).name)
      .add("must have a shape of %d dimensions, got a null pointer", static_cast<int>(frame.tensors[tensor]->ndim));
  return TK_INVALID_ARGUMENT;
}

tk_status fail_misaligned(const Frame& frame, int32_t tensor) {
  const tk_tensor& view = *frame.tensors[tensor];
  Message message = start(frame, tensor_param(*frame.kernel, tensor).name);
  message.add("must start at a multiple of %d bytes, as ", static_cast<int>(itemsize_of(dtype_of(view))));
  message.add_dtype(dtype_of(view)).add(" does, got address %p", data_of(&view));
  return TK_INVALID_ARGUMENT;
}

tk_status fail_param_dtype(const Frame& frame, const ParamDesc& param, int32_t tensor) {
  if (!param.raw) return fail_dtype(frame, tensor, param.dtypes, param.num_dtypes);
  Message message = start(frame, param.name);
  message.add("must have elements of ");
  for (int32_t i = 0; i < param.num_dtypes; ++i) {
    message.add_separator(i, param.num_dtypes, "or").add("%d", static_cast<int>(itemsize_of(param.dtypes[i])));
  }
  const DType dtype = dtype_of(*frame.tensors[tensor]);
  message.add(" bytes, got ").add_dtype(dtype).add(" of %d", static_cast<int>(itemsize_of(dtype)));
  return TK_INVALID_TYPE;
}

tk_status fail_no_data(const Frame& frame, int32_t tensor) {
  start(frame, tensor_param(*frame.kernel, tensor).name).add("must have data, got a null pointer");
  return TK_INVALID_ARGUMENT;
}

tk_status fail_overlap(const Frame& frame, int32_t tensor) {
  Message message = start(frame, tensor_param(*frame.kernel, tensor).name);
  message.add("must not overlap itself, as it is written; got strides (");
  const tk_tensor& view = *frame.tensors[tensor];
  for (int32_t axis = 0; axis < view.ndim; ++axis) {
    message.add(axis == 0 ? "%lld" : ", %lld", static_cast<long long>(view.strides[axis]));
  }
  message.add(")");
  return TK_INVALID_ARGUMENT;
}

tk_status fail_other_device(const Frame& frame, int32_t tensor, int32_t first) {
  Message message = start(frame, tensor_param(*frame.kernel, tensor).name);
  message.add("must be on ");
  add_device(message, frame.tensors[first]->device);
  message.add(" like %s, got ", tensor_param(*frame.kernel, first).name);
  add_device(message, frame.tensors[tensor]->device);
  return TK_INVALID_ARGUMENT;
}

tk_status fail_other_dtype(const Frame& frame, int32_t tensor, int32_t first) {
  Message message = start(frame, tensor_param(*frame.kernel, tensor).name);
  message.add("must be ").add_dtype(dtype_of(*frame.tensors[first]));
  message.add(" like %s, got ", tensor_param(*frame.kernel, first).name).add_dtype(dtype_of(*frame.tensors[tensor]));
  return TK_INVALID_TYPE;
}

tk_status fail_axis_value(const Frame& frame, const AxisDesc& axis, int32_t value) {
  Message message = start(frame, axis.name);
  message.add("must be ");
  add_labels(message, axis);
  message.add(axis.kind == TK_AXIS_CHOICE ? ", got number %d" : ", got %d", static_cast<int>(value));
  return TK_INVALID_ARGUMENT;
}

tk_status fail_axis_tensor(const Frame& frame, const AxisDesc& axis) {
  if (frame.tensors[axis.tensor] == nullptr) return fail_absent(frame, axis.tensor);
  const DType dtype = dtype_of(*frame.tensors[axis.tensor]);
  Message message = start(frame, tensor_param(*frame.kernel, axis.tensor).name);
  message.add(axis.kind == TK_AXIS_ITEMSIZE_OF ? "must have elements of " : "must be ");
  for (int32_t i = 0; i < axis.num_values; ++i) {
    message.add_separator(i, axis.num_values, "or");
    if (axis.kind == TK_AXIS_ITEMSIZE_OF) {
      message.add("%d", static_cast<int>(axis.values[i]));
    } else {
      message.add_dtype(static_cast<DType>(axis.values[i]));
    }
  }
  message.add(axis.kind == TK_AXIS_ITEMSIZE_OF ? " bytes, got " : ", got ").add_dtype(dtype);
  return TK_INVALID_TYPE;
}

tk_status fail_not_cuda(const Frame& frame, const tk_tensor& first) {
  Message message;
  message.add("%s: tensors must be on a CUDA device, got ", frame.kernel->name);
  add_device(message, first.device);
  return TK_INVALID_ARGUMENT;
}

tk_status fail_current_device(const Frame& frame, const tk_tensor& first, const Device& device) {
  Message message;
  message.add("%s: tensors must be on cuda:%d, the device of the current context, got ", frame.kernel->name,
              static_cast<int>(device.ordinal));
  add_device(message, first.device);
  return TK_INVALID_ARGUMENT;
}

tk_status fail_not_built(const KernelDesc& kernel, const int32_t* digits) {
  Message message;
  message.add("%s: not built for ", kernel.name);
  if (kernel.num_axes == 0) message.add("any GPU");
  add_config(message, kernel, digits);
  message.add("; built: ");
  add_built_configs(message, kernel);
  // One line of TOML, and what to do with it. The library was built from the profile that is named.
  message.add("; a profile with the line `\"%s\" = {", kernel.name);
  add_profile_values(message, kernel, digits);
  message.add(
      "}` builds it: `make pack PROFILE=FILE.toml` beside this library, or extend the profile '%s' and `make wheel`",
      kBuildInfo.profile);
  return TK_NOT_BUILT;
}

tk_status fail_no_arch(const KernelDesc& kernel, const Device& device, uint32_t archs) {
  Message message;
  message.add("%s: built for ", kernel.name);
  add_archs(message, archs);
  add_remedy(message, device);
  return TK_NO_KERNEL_FOR_DEVICE;
}

tk_status fail_library_arch(const Device& device) {
  Message message;
  message.add("this library holds kernels for ");
  add_archs(message, kNumArchs >= 32 ? ~0u : (1u << kNumArchs) - 1);
  add_remedy(message, device);
  return TK_NO_KERNEL_FOR_DEVICE;
}

}  // namespace tk
