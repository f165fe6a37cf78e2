#include "device.h"

#include "arch.h"
#include "check.h"
#include "message.h"

namespace tk {

namespace {

// Written under SetupLock, then published by the flag.
struct Entry {
  std::atomic<bool> known;
  std::atomic<CUcontext> primary;
  Device device = {};
};
constinit Entry entries[kMaxDevices];

tk_status fail_reading(const Driver& driver, int32_t ordinal, const char* call, CUresult result) {
  Message message;
  message.add("reading the properties of cuda:%d: ", static_cast<int>(ordinal));
  return add_driver_error(message, driver, call, result);
}

tk_status read_attribute(const Driver& driver, int32_t ordinal, CUdevice_attribute attribute, int32_t* value) {
  int read = 0;
  const CUresult result = driver.cuDeviceGetAttribute(&read, attribute, ordinal);
  *value = read;
  return result == CUDA_SUCCESS ? TK_OK : fail_reading(driver, ordinal, "cuDeviceGetAttribute", result);
}

tk_status read_device(const Driver& driver, int32_t ordinal, Device* device) {
  device->ordinal = ordinal;
  const CUresult result = driver.cuDeviceGetName(device->name, sizeof(device->name), ordinal);
  if (result != CUDA_SUCCESS) return fail_reading(driver, ordinal, "cuDeviceGetName", result);
  TK_RETURN_IF_ERROR(read_attribute(driver, ordinal, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &device->major));
  TK_RETURN_IF_ERROR(read_attribute(driver, ordinal, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &device->minor));
  TK_RETURN_IF_ERROR(read_attribute(driver, ordinal, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &device->num_sms));
  TK_RETURN_IF_ERROR(
      read_attribute(driver, ordinal, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &device->max_smem));
  for (int32_t i = 0; i < kNumArchs; ++i) device->rank[i] = arch_rank(kArchs[i], device->major, device->minor);
  return TK_OK;
}

tk_status check_ordinal(const Driver& driver, int32_t ordinal) {
  int count = 0;
  const CUresult result = driver.cuDeviceGetCount(&count);
  if (result != CUDA_SUCCESS) return fail_reading(driver, ordinal, "cuDeviceGetCount", result);
  const int32_t usable = count < kMaxDevices ? count : kMaxDevices;
  if (ordinal >= 0 && ordinal < usable) return TK_OK;
  return fail(TK_NO_DEVICE, "there is no device cuda:%d: the NVIDIA driver sees %d of them", static_cast<int>(ordinal),
              count);
}

}  // namespace

tk_status find_device(const Driver& driver, int32_t ordinal, const Device** device) {
  if (ordinal >= 0 && ordinal < kMaxDevices && entries[ordinal].known.load(std::memory_order_acquire)) [[likely]] {
    *device = &entries[ordinal].device;
    return TK_OK;
  }
  TK_RETURN_IF_ERROR(check_ordinal(driver, ordinal));
  Entry& entry = entries[ordinal];
  const SetupLock lock;
  if (!entry.known.load(std::memory_order_relaxed)) {
    TK_RETURN_IF_ERROR(read_device(driver, ordinal, &entry.device));
    entry.known.store(true, std::memory_order_release);
  }
  *device = &entry.device;
  return TK_OK;
}

tk_status find_current_device(const Driver& driver, const Device** device) {
  CUdevice ordinal = -1;
  // The id is what a destroyed context refuses; the driver (580.159) ends the process in a later call.
  unsigned long long id = 0;
  const char* call = "cuCtxGetId";
  CUresult result = driver.cuCtxGetId(nullptr, &id);
  if (result == CUDA_SUCCESS) {
    call = "cuCtxGetDevice";
    result = driver.cuCtxGetDevice(&ordinal);
  }
  if (result == CUDA_SUCCESS) [[likely]]
    return find_device(driver, ordinal, device);
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    return fail(TK_NO_CONTEXT,
                "no CUDA context is current in this thread; make one current (cuCtxSetCurrent, cudaSetDevice) or call "
                "tk_enter_device first");
  }
  if (result == CUDA_ERROR_CONTEXT_IS_DESTROYED) {
    return fail(TK_CONTEXT_DESTROYED,
                "the CUDA context that is current in this thread was destroyed; make another one current "
                "(cuCtxSetCurrent, cudaSetDevice) or call tk_enter_device first");
  }
  Message message;
  message.add("asking for the current device: ");
  return add_driver_error(message, driver, call, result);
}

tk_status find_primary_context(const Driver& driver, const Device& device, CUcontext* context) {
  Entry& entry = entries[device.ordinal];
  *context = entry.primary.load(std::memory_order_acquire);
  if (*context != nullptr) [[likely]]
    return TK_OK;
  const SetupLock lock;
  *context = entry.primary.load(std::memory_order_relaxed);
  if (*context != nullptr) return TK_OK;
  const CUresult result = driver.cuDevicePrimaryCtxRetain(context, device.ordinal);
  if (result != CUDA_SUCCESS) {
    Message message;
    message.add("making the primary context of cuda:%d: ", static_cast<int>(device.ordinal));
    return add_driver_error(message, driver, "cuDevicePrimaryCtxRetain", result);
  }
  entry.primary.store(*context, std::memory_order_release);
  return TK_OK;
}

int32_t best_arch(const Device& device, uint32_t archs) {
  int32_t best = -1, best_rank = 0;
  for (int32_t i = 0; i < kNumArchs; ++i) {
    if ((archs >> i & 1) == 0 || device.rank[i] <= best_rank) continue;
    best = i;
    best_rank = device.rank[i];
  }
  return best;
}

}  // namespace tk
