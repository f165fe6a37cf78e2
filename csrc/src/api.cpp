// The exported functions that run or prepare kernels; api_describe.cpp has those that only tell.
#include <cstring>

#include "call.h"
#include "call_errors.h"
#include "check.h"
#include "loader.h"
#include "message.h"
#include "pack.h"
#include "record.h"

namespace tk {

namespace {

const KernelDesc* desc(const tk_kernel* kernel) { return reinterpret_cast<const KernelDesc*>(kernel); }

// kKernels is sorted by name.
const KernelDesc* find_by_name(const char* name) {
  int32_t low = 0, high = kNumKernels;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    const int order = std::strcmp(kKernels[middle]->name, name);
    if (order == 0) return kKernels[middle];
    if (order < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return nullptr;
}

tk_status fail_unknown(const char* name) {
  Message message;
  message.add("%s: no such kernel in this library; it holds ", name);
  constexpr int32_t kMaxShown = 40;
  const int32_t shown = kNumKernels < kMaxShown ? kNumKernels : kMaxShown;
  for (int32_t i = 0; i < shown; ++i) message.add_separator(i, kNumKernels, "and").add("%s", kKernels[i]->name);
  if (kNumKernels > shown) message.add(" and %d more", static_cast<int>(kNumKernels - shown));
  if (kNumKernels == 0) message.add("none");
  return TK_NOT_BUILT;
}

tk_status find(const char* name, const KernelDesc** kernel) {
  if (name == nullptr) return fail_null("tk_find", "name", "a text");
  *kernel = find_by_name(name);
  if (*kernel != nullptr) return TK_OK;
  record(name, nullptr, nullptr, nullptr, false);
  return fail_unknown(name);
}

// A kernel that only a pack has.
const tk_kernel* find_in_packs(const char* name) {
  for (int32_t i = 0; i < num_pack_kernels(); ++i) {
    const tk_kernel* kernel = pack_kernel_at(i);
    tk_kernel_info info = {};
    info.size = sizeof(info);
    if (pack_of(kernel)->describe_kernel(kernel, &info) == TK_OK && std::strcmp(info.name, name) == 0) return kernel;
  }
  return nullptr;
}

// What packs hold of the names (null: all they have) is loaded too. *loaded: whether any pack had all of them.
tk_status preload_packs(const char* const* names, int32_t num_names, bool* loaded) {
  for (int32_t i = 0; i < num_packs(); ++i) {
    if (names == nullptr) {
      *loaded |= pack_at(i).preload(nullptr, 0, -1) == TK_OK;
      continue;
    }
    for (int32_t j = 0; j < num_names; ++j) {
      const tk_kernel* kernel = nullptr;
      if (pack_at(i).find(names[j], &kernel) == TK_OK) *loaded |= pack_at(i).preload(&names[j], 1, -1) == TK_OK;
    }
  }
  return TK_OK;
}

// Loads into the context that is current, so that a first launch while capturing has nothing left to do.
tk_status load_variant(const Driver& driver, const Device& device, const KernelDesc& kernel,
                       const VariantDesc& variant) {
  for (int32_t i = 0; i < variant.num_launches; ++i) {
    CUkernel loaded = nullptr;
    CUfunction function = nullptr;
    TK_RETURN_IF_ERROR(find_kernel(driver, device, kernel, variant, i, &loaded));
    const CUresult result = driver.cuKernelGetFunction(&function, loaded);
    if (result != CUDA_SUCCESS) {
      Message message;
      message.add("%s: loading %s into the context of cuda:%d: ", kernel.name, variant.launches[i].symbol,
                  static_cast<int>(device.ordinal));
      return add_driver_error(message, driver, "cuKernelGetFunction", result);
    }
  }
  return TK_OK;
}

// Loads what a call on this device could choose. *archs: those the kernel is built for; *loaded: whether any fits.
tk_status load_kernel_variants(const Driver& driver, const Device& device, const KernelDesc& kernel, uint32_t* archs,
                               bool* loaded) {
  for (int32_t i = 0; i < kernel.num_keys; ++i) {
    const KeyDesc& key = kernel.keys[i];
    uint32_t key_archs = 0;
    for (int32_t j = key.first; j < key.first + key.num; ++j) key_archs |= 1u << kernel.variants[j].arch;
    *archs |= key_archs;
    const int32_t arch = best_arch(device, key_archs);
    for (int32_t j = key.first; j < key.first + key.num; ++j) {
      if (kernel.variants[j].arch != arch) continue;
      *loaded = true;
      TK_RETURN_IF_ERROR(load_variant(driver, device, kernel, kernel.variants[j]));
    }
  }
  return TK_OK;
}

tk_status preload_named(const Driver& driver, const Device& device, const char* const* names, int32_t num_names) {
  for (int32_t i = 0; i < num_names; ++i) {
    const KernelDesc* kernel = nullptr;
    uint32_t archs = 0;
    bool loaded = false;
    TK_RETURN_IF_ERROR(preload_packs(&names[i], 1, &loaded));
    if (loaded && find_by_name(names[i]) == nullptr) continue;
    TK_RETURN_IF_ERROR(find(names[i], &kernel));
    TK_RETURN_IF_ERROR(load_kernel_variants(driver, device, *kernel, &archs, &loaded));
    if (!loaded) return fail_no_arch(*kernel, device, archs);
  }
  return TK_OK;
}

tk_status preload_all(const Driver& driver, const Device& device) {
  bool loaded = false;
  TK_RETURN_IF_ERROR(preload_packs(nullptr, 0, &loaded));
  for (int32_t i = 0; i < kNumKernels; ++i) {
    uint32_t archs = 0;
    TK_RETURN_IF_ERROR(load_kernel_variants(driver, device, *kKernels[i], &archs, &loaded));
  }
  return loaded || kNumKernels == 0 ? TK_OK : fail_library_arch(device);
}

tk_status preload(const char* const* names, int32_t num_names) {
  const Driver* driver = nullptr;
  const Device* device = nullptr;
  TK_RETURN_IF_ERROR(find_driver(&driver));
  TK_RETURN_IF_ERROR(find_current_device(*driver, &device));
  return names != nullptr ? preload_named(*driver, *device, names, num_names) : preload_all(*driver, *device);
}

bool has_plain_axes(const KernelDesc& kernel) {
  for (int32_t i = 0; i < kernel.num_axes; ++i) {
    if (kernel.axes[i].tensor < 0) return true;
  }
  return false;
}

// The handle and the arrays of a call by name, those that the kernel has no parameters for left out.
tk_status check_arrays(const char* call, const tk_kernel* kernel, const tk_tensor* const* tensors,
                       const tk_scalar* scalars, const int32_t* axes) {
  if (kernel == nullptr) [[unlikely]]
    return fail_null(call, "kernel", "a handle from tk_find");
  if (pack_of(kernel) != nullptr) [[unlikely]]
    return TK_OK;  // it looks itself
  const KernelDesc& found = *desc(kernel);
  if (tensors == nullptr && found.num_tensors > 0) [[unlikely]]
    return fail_null(call, "tensors", "an array of pointers to tensors");
  if (scalars == nullptr && found.num_params > found.num_tensors) [[unlikely]]
    return fail_null(call, "scalars", "an array of scalars");
  if (axes == nullptr && has_plain_axes(found)) [[unlikely]]
    return fail_null(call, "axes", "an array of axis values");
  return TK_OK;
}

tk_status fail_context(const Driver& driver, const char* call, CUresult result) {
  Message message;
  message.add("changing the current context: ");
  return add_driver_error(message, driver, call, result);
}

}  // namespace

}  // namespace tk

using namespace tk;  // NOLINT: the functions below are the outer face of this namespace

const char* tk_last_error(void) { return last_message(); }

tk_status tk_find(const char* name, const tk_kernel** kernel) {
  if (kernel == nullptr) return fail_null("tk_find", "kernel", "where to put the handle");
  const KernelDesc* found = name != nullptr ? find_by_name(name) : nullptr;
  *kernel = reinterpret_cast<const tk_kernel*>(found);
  if (found != nullptr) return TK_OK;
  if (name != nullptr) *kernel = find_in_packs(name);
  return *kernel != nullptr ? TK_OK : find(name, &found);
}

tk_status tk_launch(const tk_kernel* kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                    const int32_t* axes, tk_stream stream) {
  TK_RETURN_IF_ERROR(check_arrays("tk_launch", kernel, tensors, scalars, axes));
  if (const Pack* pack = pack_of(kernel)) [[unlikely]]
    return from_pack(*pack, launch_in_pack(*pack, kernel, tensors, scalars, axes, stream));
  return call(*desc(kernel), tensors, scalars, axes, stream);
}

tk_status tk_check(const tk_kernel* kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                   const int32_t* axes) {
  TK_RETURN_IF_ERROR(check_arrays("tk_check", kernel, tensors, scalars, axes));
  if (const Pack* pack = pack_of(kernel)) [[unlikely]]
    return from_pack(*pack, pack->check(kernel, tensors, scalars, axes));
  return check(*desc(kernel), tensors, scalars, axes);
}

tk_status tk_workspace_size(const tk_kernel* kernel, int32_t param, const tk_tensor* const* tensors,
                            const tk_scalar* scalars, const int32_t* axes, int32_t num_sms, tk_workspace_info* info) {
  TK_RETURN_IF_ERROR(check_arrays("tk_workspace_size", kernel, tensors, scalars, axes));
  if (const Pack* pack = pack_of(kernel))
    return from_pack(*pack, pack->workspace_size(kernel, param, tensors, scalars, axes, num_sms, info));
  const KernelDesc& found = *desc(kernel);
  if (param < 0 || param >= found.num_params || !found.params[param].tensor) {
    return fail(TK_INVALID_ARGUMENT, "%s: param must be the index of a tensor parameter, from 0 to %d, got %d",
                found.name, static_cast<int>(found.num_params - 1), static_cast<int>(param));
  }
  int32_t tensor = 0;
  for (int32_t i = 0; i < param; ++i) tensor += found.params[i].tensor;
  const tk_status status = workspace_size(found, tensor, tensors, scalars, axes, num_sms, info);
  if (status == TK_OK) return TK_OK;
  return workspace_by_pack(found, param, tensors, scalars, axes, num_sms, info, status);
}

tk_status tk_preload(const char* const* names, int32_t num_names, int32_t device) {
  if (num_names < 0) {
    return fail(TK_INVALID_ARGUMENT, "tk_preload: num_names must be at least 0, got %d", static_cast<int>(num_names));
  }
  for (int32_t i = 0; names != nullptr && i < num_names; ++i) {
    if (names[i] == nullptr) return fail_null("tk_preload", "each of names", "a text");
  }
  if (device < 0) return preload(names, num_names);
  void* previous = nullptr;
  TK_RETURN_IF_ERROR(tk_enter_device(device, &previous));
  const tk_status status = preload(names, num_names);
  const tk_status left = tk_leave_device(previous);
  return status != TK_OK ? status : left;
}

tk_status tk_enter_device(int32_t ordinal, void** previous) {
  if (previous == nullptr) return fail_null("tk_enter_device", "previous", "where to put the context to restore");
  *previous = nullptr;
  const Driver* driver = nullptr;
  const Device* device = nullptr;
  CUcontext primary = nullptr, current = nullptr;
  TK_RETURN_IF_ERROR(find_driver(&driver));
  TK_RETURN_IF_ERROR(find_device(*driver, ordinal, &device));
  TK_RETURN_IF_ERROR(find_primary_context(*driver, *device, &primary));
  CUresult result = driver->cuCtxGetCurrent(&current);
  if (result != CUDA_SUCCESS) return fail_context(*driver, "cuCtxGetCurrent", result);
  if (current == primary) [[likely]]
    return TK_OK;
  // One that was destroyed meanwhile is not to be restored. Asked only where there is one: compute-sanitizer reports
  // every call that the driver refuses.
  unsigned long long id = 0;
  const bool is_alive = current != nullptr && driver->cuCtxGetId(nullptr, &id) == CUDA_SUCCESS;
  result = driver->cuCtxSetCurrent(primary);
  if (result != CUDA_SUCCESS) return fail_context(*driver, "cuCtxSetCurrent", result);
  *previous = is_alive ? current : nullptr;
  return TK_OK;
}

tk_status tk_leave_device(void* previous) {
  if (previous == nullptr) return TK_OK;
  const Driver* driver = nullptr;
  TK_RETURN_IF_ERROR(find_driver(&driver));
  const CUresult result = driver->cuCtxSetCurrent(previous);
  return result == CUDA_SUCCESS ? TK_OK : fail_context(*driver, "cuCtxSetCurrent", result);
}
