// One call, in order: parameters against the tables, axes, key, bind, device, variant, launch; or the plan of an
// earlier call like it. Nothing here allocates, locks or makes text unless the call fails.
#include "call.h"

#include "arch.h"
#include "call_errors.h"
#include "check.h"
#include "launcher.h"
#include "loader.h"
#include "message.h"
#include "pack.h"
#include "plans.h"
#include "record.h"

namespace tk {

namespace {

bool is_allowed(const ParamDesc& param, DType dtype) {
  for (int32_t i = 0; i < param.num_dtypes; ++i) {
    if (param.raw ? itemsize_of(param.dtypes[i]) == itemsize_of(dtype) : param.dtypes[i] == dtype) return true;
  }
  return false;
}

bool may_be_absent(const ParamDesc& param, const Frame& frame) {
  return param.nullable || param.optional || (param.written && frame.check_only);
}

// What the tables know of each tensor: presence, dtype, rank, one device for all, one dtype for all raw ones.
tk_status check_params(const Frame& frame, const tk_tensor** first) {
  const KernelDesc& kernel = *frame.kernel;
  int32_t tensor = -1, first_index = -1, raw_index = -1;
  for (int32_t i = 0; i < kernel.num_params; ++i) {
    const ParamDesc& param = kernel.params[i];
    if (!param.tensor) continue;
    const tk_tensor* view = frame.tensors[++tensor];
    if (view == nullptr) {
      if (!may_be_absent(param, frame)) [[unlikely]]
        return fail_absent(frame, tensor);
      continue;
    }
    const DType dtype = dtype_of(*view);
    if (!is_allowed(param, dtype)) [[unlikely]]
      return fail_param_dtype(frame, param, tensor);
    if (param.rank >= 0 && view->ndim != param.rank) [[unlikely]]
      return fail_rank(frame, tensor, param.rank);
    if (view->ndim > kMaxRank || view->ndim < 0) [[unlikely]]
      return fail_rank(frame, tensor, kMaxRank);
    if (view->shape == nullptr && view->ndim > 0) [[unlikely]]
      return fail_no_shape(frame, tensor);
    if (has_too_many_elements(*view)) [[unlikely]]
      return fail_too_many_elements(frame, tensor);
    if (view->data == nullptr && has_elements(*view) && !frame.check_only) [[unlikely]]
      return fail_no_data(frame, tensor);
    if (!aligned(view, itemsize_of(dtype)) && has_elements(*view)) [[unlikely]]
      return fail_misaligned(frame, tensor);
    if (first_index < 0) {
      first_index = tensor;
      *first = view;
    } else if (view->device.device_id != (*first)->device.device_id ||
               view->device.device_type != (*first)->device.device_type) [[unlikely]] {
      return fail_other_device(frame, tensor, first_index);
    }
    if (!param.raw) continue;
    if (raw_index < 0) {
      raw_index = tensor;
    } else if (dtype != dtype_of(*frame.tensors[raw_index])) [[unlikely]] {
      return fail_other_dtype(frame, tensor, raw_index);
    }
  }
  return TK_OK;
}

// Digits of the key, one per axis; kOpen where the tensor that an axis is read from is not there yet.
constexpr int32_t kOpen = -1;

int32_t find_value(const AxisDesc& axis, int64_t value) {
  for (int32_t i = 0; i < axis.num_values; ++i) {
    if (axis.values[i] == value) return i;
  }
  return kOpen;
}

tk_status find_digits(const Frame& frame, const int32_t* axes, int32_t* digits) {
  const KernelDesc& kernel = *frame.kernel;
  for (int32_t i = 0; i < kernel.num_axes; ++i) {
    const AxisDesc& axis = kernel.axes[i];
    if (axis.tensor < 0) {
      digits[i] = find_value(axis, *axes);
      if (digits[i] < 0) [[unlikely]]
        return fail_axis_value(frame, axis, *axes);
      ++axes;
      continue;
    }
    const tk_tensor* view = frame.tensors[axis.tensor];
    const DType dtype = view != nullptr ? dtype_of(*view) : DType::none;
    digits[i] = kOpen;
    if (view == nullptr && frame.check_only && tensor_param(kernel, axis.tensor).written) continue;
    digits[i] = find_value(axis, axis.kind == TK_AXIS_ITEMSIZE_OF ? itemsize_of(dtype) : static_cast<int64_t>(dtype));
    if (digits[i] < 0) [[unlikely]]
      return fail_axis_tensor(frame, axis);
  }
  return TK_OK;
}

int32_t key_of(const KernelDesc& kernel, const int32_t* digits) {
  int32_t key = 0;
  for (int32_t i = 0; i < kernel.num_axes; ++i) key = key * kernel.axes[i].num_values + digits[i];
  return key;
}

void start(Frame& frame, const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
           bool check_only) {
  frame.kernel = &kernel;
  frame.tensors = tensors;
  frame.scalars = scalars;
  frame.signature = nullptr;
  frame.check_only = check_only;
  frame.bound = 0;
}

// Elements of a written tensor that share memory would race.
tk_status check_overlap(const Frame& frame) {
  const KernelDesc& kernel = *frame.kernel;
  int32_t tensor = -1;
  for (int32_t i = 0; i < kernel.num_params; ++i) {
    if (!kernel.params[i].tensor) continue;
    const tk_tensor* view = frame.tensors[++tensor];
    if (!kernel.params[i].written || view == nullptr || view->strides == nullptr || !has_elements(*view)) continue;
    for (int32_t axis = 0; axis < view->ndim; ++axis) {
      if (view->strides[axis] == 0 && view->shape[axis] > 1) [[unlikely]]
        return fail_overlap(frame, tensor);
    }
  }
  return TK_OK;
}

tk_status bind_key(Frame& frame, const KeyDesc& key) {
  frame.signature = &frame.kernel->signatures[key.signature];
  frame.bound = 0;
  for (int32_t i = 0; i < frame.signature->num_symbols; ++i) frame.symbols[i] = 0;
  TK_RETURN_IF_ERROR(frame.signature->bind(frame));
  return check_overlap(frame);
}

// The first form of the best arch whose guards hold.
tk_status find_variant(const Frame& frame, const Device& device, const KeyDesc& key, const VariantDesc** variant) {
  const VariantDesc* variants = frame.kernel->variants + key.first;
  uint32_t archs = 0;
  for (int32_t i = 0; i < key.num; ++i) archs |= 1u << variants[i].arch;
  const int32_t arch = best_arch(device, archs);
  if (arch < 0) [[unlikely]]
    return fail_no_arch(*frame.kernel, device, archs);
  const char* failed = nullptr;
  for (int32_t i = 0; i < key.num; ++i) {
    if (variants[i].arch != arch) continue;
    failed = variants[i].guard != nullptr ? variants[i].guard(frame) : nullptr;
    if (failed == nullptr) {
      *variant = &variants[i];
      return TK_OK;
    }
  }
  return fail_guard(frame, failed);
}

tk_status check_on_gpu(const Frame& frame, const tk_tensor* first, const Device& device) {
  if (first == nullptr) return TK_OK;
  if (first->device.device_type != TK_CUDA && first->device.device_type != TK_CUDA_MANAGED) [[unlikely]] {
    return fail_not_cuda(frame, *first);
  }
  return first->device.device_id == device.ordinal ? TK_OK : fail_current_device(frame, *first, device);
}

// Advances the open digits like a counter, last axis fastest; false after the last combination.
bool next_digits(const KernelDesc& kernel, const bool* open, int32_t* digits) {
  for (int32_t i = kernel.num_axes - 1; i >= 0; --i) {
    if (!open[i]) continue;
    if (++digits[i] < kernel.axes[i].num_values) return true;
    digits[i] = 0;
  }
  return false;
}

// For TILEKERNELS_RECORD: words for what the library does not hold, whatever GPU is there.
[[gnu::cold]] tk_status missing(const KernelDesc& kernel, const int32_t* digits) {
  if (recording()) {
    const Driver* driver = nullptr;
    const Device* device = nullptr;
    const bool known = find_driver(&driver) == TK_OK && find_current_device(*driver, &device) == TK_OK;
    record(kernel.name, &kernel, digits, known ? wanted_arch(device->major, device->minor) : nullptr, false);
  }
  return fail_not_built(kernel, digits);
}

// Likewise a GPU that the kernel is not built for, and a call that only the last form takes.
[[gnu::cold]] void record_choice(const KernelDesc& kernel, const int32_t* digits, const Device& device, tk_status found,
                                 const VariantDesc* variant) {
  if (found == TK_NO_KERNEL_FOR_DEVICE)
    record(kernel.name, &kernel, digits, wanted_arch(device.major, device.minor), false);
  if (found == TK_OK && kernel.num_forms > 1 && variant->form == kernel.num_forms - 1)
    record(kernel.name, &kernel, digits, kArchs[variant->arch], true);
}

struct Choice {
  const Driver* driver;
  const Device* device;
  const VariantDesc* variant;
};

// Checks a call and binds the frame to it.
tk_status choose(Frame& frame, const int32_t* axes, Choice* choice) {
  const KernelDesc& kernel = *frame.kernel;
  const tk_tensor* first = nullptr;
  TK_RETURN_IF_ERROR(check_params(frame, &first));
  int32_t digits[kMaxAxes];
  TK_RETURN_IF_ERROR(find_digits(frame, axes, digits));
  const KeyDesc& key = kernel.keys[key_of(kernel, digits)];
  if (key.num == 0) [[unlikely]]
    return missing(kernel, digits);
  TK_RETURN_IF_ERROR(bind_key(frame, key));
  if (first != nullptr && first->device.device_type == TK_CPU) [[unlikely]]
    return fail_not_cuda(frame, *first);
  TK_RETURN_IF_ERROR(find_driver(&choice->driver));
  TK_RETURN_IF_ERROR(find_current_device(*choice->driver, &choice->device));
  TK_RETURN_IF_ERROR(check_on_gpu(frame, first, *choice->device));
  const tk_status found = find_variant(frame, *choice->device, key, &choice->variant);
  if (recording()) [[unlikely]]
    record_choice(kernel, digits, *choice->device, found, choice->variant);
  return found;
}

tk_status launch_plan(const Plan& plan, const Driver& driver, const tk_tensor* const* tensors, const tk_scalar* scalars,
                      tk_stream stream) {
  Frame frame;
  start(frame, *plan.kernel, tensors, scalars, false);
  frame.signature = plan.signature;
  frame.bound = plan.bound;
  for (int32_t i = 0; i < plan.signature->num_symbols; ++i) frame.symbols[i] = plan.symbols[i];
  Launcher launcher(driver, *plan.device, *plan.variant, stream, plan.functions, nullptr);
  return plan.variant->launch(frame, launcher);
}

}  // namespace

tk_status call(const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars, const int32_t* axes,
               tk_stream stream) {
  CallKey key;
  Plan* plan = nullptr;
  const Driver* driver = open_driver_table.load(std::memory_order_acquire);
  if (driver != nullptr && make_key(*driver, kernel, tensors, scalars, axes, &key)) [[likely]] {
    plan = &plan_of(key);
    if (is_plan_of(*plan, kernel, key)) [[likely]] {
      if (plan->ready.num_launches >= 0) [[likely]]
        return launch_ready(*plan, *driver, tensors, stream);
      return launch_plan(*plan, *driver, tensors, scalars, stream);
    }
  }
  Frame frame;
  Choice choice = {};
  start(frame, kernel, tensors, scalars, false);
  const tk_status chosen = choose(frame, axes, &choice);
  if (chosen != TK_OK) [[unlikely]]
    return launch_by_pack(kernel, tensors, scalars, axes, stream, chosen);
  if (plan != nullptr) start_plan(plan);
  Launcher launcher(*choice.driver, *choice.device, *choice.variant, stream, nullptr,
                    plan != nullptr ? &plan->ready : nullptr);
  TK_RETURN_IF_ERROR(choice.variant->launch(frame, launcher));
  if (plan != nullptr) keep_plan(*choice.driver, frame, *choice.device, *choice.variant, key, plan);
  return TK_OK;
}

tk_status check(const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                const int32_t* axes) {
  Frame frame;
  const tk_status status = check_frame(frame, kernel, tensors, scalars, axes);
  if (status == TK_OK) [[likely]]
    return TK_OK;
  return check_by_pack(kernel, tensors, scalars, axes, status);
}

tk_status check_frame(Frame& frame, const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                      const int32_t* axes) {
  start(frame, kernel, tensors, scalars, true);
  const tk_tensor* first = nullptr;
  TK_RETURN_IF_ERROR(check_params(frame, &first));
  int32_t digits[kMaxAxes];
  TK_RETURN_IF_ERROR(find_digits(frame, axes, digits));
  bool open[kMaxAxes];
  for (int32_t i = 0; i < kernel.num_axes; ++i) {
    open[i] = digits[i] == kOpen;
    if (open[i]) digits[i] = 0;
  }
  // Some output that the caller can still choose must make the call valid.
  tk_status status = TK_NOT_BUILT;
  bool built = false;
  do {
    const KeyDesc& key = kernel.keys[key_of(kernel, digits)];
    if (key.num == 0) continue;
    built = true;
    status = bind_key(frame, key);
    if (status == TK_OK) return TK_OK;
  } while (next_digits(kernel, open, digits));
  if (built) return status;
  for (int32_t i = 0; i < kernel.num_axes; ++i) {
    if (open[i]) digits[i] = kOpen;
  }
  return missing(kernel, digits);
}

}  // namespace tk
