// The exported functions that tell what the library holds and what the machine has.
#include <cstring>

#include "answer.h"
#include "arch.h"
#include "check.h"
#include "device.h"
#include "message.h"
#include "pack.h"

#ifndef TILEKERNELS_VERSION
#error "pass -DTILEKERNELS_VERSION=\"...\" (CMakeLists.txt does)"
#endif

namespace tk {

namespace {

const KernelDesc* desc(const tk_kernel* kernel) { return reinterpret_cast<const KernelDesc*>(kernel); }

constexpr const char* kStatusNames[] = {
    "TK_OK",        "TK_INVALID_ARGUMENT", "TK_INVALID_TYPE",      "TK_NOT_BUILT",  "TK_NO_KERNEL_FOR_DEVICE",
    "TK_NO_DRIVER", "TK_DRIVER_TOO_OLD",   "TK_NO_DEVICE",         "TK_NO_CONTEXT", "TK_OUT_OF_MEMORY",
    "TK_FORKED",    "TK_DRIVER_ERROR",     "TK_CONTEXT_DESTROYED",
};

tk_status fail_index(const char* call, const KernelDesc& kernel, int32_t index, int32_t count) {
  return fail(TK_INVALID_ARGUMENT, "%s: index must be from 0 to %d for %s, got %d", call, static_cast<int>(count - 1),
              kernel.name, static_cast<int>(index));
}

tk_status fail_no_handle(const char* call) { return fail_null(call, "kernel", "a handle from tk_find"); }

bool in_range(int32_t index, int32_t count) { return index >= 0 && index < count; }

bool covers(const KernelDesc& kernel, int32_t key, const int32_t* labels) {
  for (int32_t i = kernel.num_axes - 1; labels != nullptr && i >= 0; --i) {
    if (labels[i] >= 0 && labels[i] != key % kernel.axes[i].num_values) return false;
    key /= kernel.axes[i].num_values;
  }
  return true;
}

}  // namespace

}  // namespace tk

using namespace tk;  // NOLINT: the functions below are the outer face of this namespace

const char* tk_status_name(tk_status status) {
  constexpr int32_t kCount = sizeof(kStatusNames) / sizeof(kStatusNames[0]);
  return in_range(status, kCount) ? kStatusNames[status] : "TK_UNKNOWN_STATUS";
}

const char* tk_version(void) { return TILEKERNELS_VERSION; }
int32_t tk_abi_version(void) { return TK_ABI_VERSION; }

// ---- Kernels -------------------------------------------------------------------------------------------------------

int32_t tk_num_kernels(void) { return kNumKernels + num_pack_kernels(); }

const tk_kernel* tk_kernel_at(int32_t index) {
  if (in_range(index - kNumKernels, num_pack_kernels())) return pack_kernel_at(index - kNumKernels);
  return in_range(index, kNumKernels) ? reinterpret_cast<const tk_kernel*>(kKernels[index]) : nullptr;
}

const char* tk_arch_at(int32_t index) { return in_range(index, kNumArchs) ? kArchs[index] : nullptr; }

tk_status tk_describe_kernel(const tk_kernel* kernel, tk_kernel_info* info) {
  if (kernel == nullptr) return fail_no_handle("tk_describe_kernel");
  if (const Pack* pack = pack_of(kernel)) return from_pack(*pack, pack->describe_kernel(kernel, info));
  const KernelDesc& found = *desc(kernel);
  tk_kernel_info value = {};
  value.name = found.name;
  value.num_params = found.num_params;
  value.num_axes = found.num_axes;
  value.num_variants = found.num_variants;
  return answer("tk_describe_kernel", value, info);
}

tk_status tk_describe_param(const tk_kernel* kernel, int32_t index, tk_param_info* info) {
  if (kernel == nullptr) return fail_no_handle("tk_describe_param");
  if (const Pack* pack = pack_of(kernel)) return from_pack(*pack, pack->describe_param(kernel, index, info));
  const KernelDesc& found = *desc(kernel);
  if (!in_range(index, found.num_params)) return fail_index("tk_describe_param", found, index, found.num_params);
  const ParamDesc& param = found.params[index];
  tk_param_info value = {};
  value.name = param.name;
  value.is_tensor = param.tensor;
  value.written = param.written;
  value.nullable = param.nullable || param.optional;
  value.raw = param.raw;
  value.rank = param.tensor ? param.rank : 0;
  value.num_dtypes = param.tensor ? param.num_dtypes : 1;
  value.optional = param.optional;
  return answer("tk_describe_param", value, info);
}

const char* tk_param_dtype(const tk_kernel* kernel, int32_t param, int32_t index) {
  if (kernel == nullptr) return nullptr;
  if (const Pack* pack = pack_of(kernel)) return pack->param_dtype(kernel, param, index);
  const KernelDesc& found = *desc(kernel);
  if (!in_range(param, found.num_params)) return nullptr;
  const ParamDesc& described = found.params[param];
  if (!described.tensor) return index == 0 ? scalar_name(described.scalar) : nullptr;
  return in_range(index, described.num_dtypes) ? dtype_name(described.dtypes[index]) : nullptr;
}

tk_status tk_describe_axis(const tk_kernel* kernel, int32_t index, tk_axis_info* info) {
  if (kernel == nullptr) return fail_no_handle("tk_describe_axis");
  if (const Pack* pack = pack_of(kernel)) return from_pack(*pack, pack->describe_axis(kernel, index, info));
  const KernelDesc& found = *desc(kernel);
  if (!in_range(index, found.num_axes)) return fail_index("tk_describe_axis", found, index, found.num_axes);
  const AxisDesc& axis = found.axes[index];
  tk_axis_info value = {};
  value.name = axis.name;
  value.kind = axis.kind;
  value.param = axis.tensor < 0 ? -1 : static_cast<int32_t>(&tensor_param(found, axis.tensor) - found.params);
  value.num_values = axis.num_values;
  value.labels = axis.labels;
  value.values = axis.kind == TK_AXIS_DTYPE_OF ? nullptr : axis.values;
  return answer("tk_describe_axis", value, info);
}

tk_status tk_describe_variant(const tk_kernel* kernel, int32_t index, tk_variant_info* info) {
  if (kernel == nullptr) return fail_no_handle("tk_describe_variant");
  if (const Pack* pack = pack_of(kernel)) return from_pack(*pack, pack->describe_variant(kernel, index, info));
  const KernelDesc& found = *desc(kernel);
  if (!in_range(index, found.num_variants)) return fail_index("tk_describe_variant", found, index, found.num_variants);
  const VariantDesc& variant = found.variants[index];
  tk_variant_info value = {};
  value.id = variant.id;
  value.arch = kArchs[variant.arch];
  value.symbol = variant.launches[0].symbol;
  value.num_launches = variant.num_launches;
  return answer("tk_describe_variant", value, info);
}

int32_t tk_covers(const tk_kernel* kernel, const int32_t* labels, const char* arch) {
  if (kernel == nullptr) return 0;
  if (const Pack* pack = pack_of(kernel)) return pack->covers(kernel, labels, arch);
  const KernelDesc& found = *desc(kernel);
  for (int32_t i = 0; i < found.num_variants; ++i) {
    const VariantDesc& variant = found.variants[i];
    if (arch != nullptr && std::strcmp(arch, kArchs[variant.arch]) != 0) continue;
    if (covers(found, variant.key, labels)) return 1;
  }
  for (int32_t i = 0; i < num_packs(); ++i) {
    const tk_kernel* other = nullptr;
    if (pack_at(i).find(found.name, &other) == TK_OK && pack_at(i).covers(other, labels, arch) != 0) return 1;
  }
  return 0;
}

// ---- The machine ---------------------------------------------------------------------------------------------------

tk_status tk_driver_version(int32_t* version) {
  if (version == nullptr) return fail_null("tk_driver_version", "version", "where to put the number");
  return driver_version(version);
}

int32_t tk_required_driver_version(void) { return kBuildInfo.cuda_version; }

tk_status tk_num_devices(int32_t* count) {
  if (count == nullptr) return fail_null("tk_num_devices", "count", "where to put the number");
  const Driver* driver = nullptr;
  TK_RETURN_IF_ERROR(find_driver(&driver));
  int value = 0;
  const CUresult result = driver->cuDeviceGetCount(&value);
  *count = value;
  if (result == CUDA_SUCCESS) return TK_OK;
  Message message;
  message.add("counting devices: ");
  return add_driver_error(message, *driver, "cuDeviceGetCount", result);
}

tk_status tk_describe_device(int32_t ordinal, tk_device_info* info) {
  const Driver* driver = nullptr;
  const Device* device = nullptr;
  TK_RETURN_IF_ERROR(find_driver(&driver));
  TK_RETURN_IF_ERROR(find_device(*driver, ordinal, &device));
  size_t total_memory = 0;
  const CUresult result = driver->cuDeviceTotalMem(&total_memory, ordinal);
  if (result != CUDA_SUCCESS) {
    Message message;
    message.add("reading the memory of cuda:%d: ", static_cast<int>(ordinal));
    return add_driver_error(message, *driver, "cuDeviceTotalMem", result);
  }
  const int32_t best = best_arch(*device, ~0u);
  tk_device_info value = {};
  std::memcpy(value.name, device->name, sizeof(value.name));
  value.compute_capability_major = device->major;
  value.compute_capability_minor = device->minor;
  value.num_sms = device->num_sms;
  value.max_shared_memory = device->max_smem;
  value.total_memory = total_memory;
  value.arch = best < 0 ? nullptr : kArchs[best];
  value.wanted_arch = wanted_arch(device->major, device->minor);
  return answer("tk_describe_device", value, info);
}
