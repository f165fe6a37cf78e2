#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include "check.h"
#include "message.h"

namespace tk {

std::atomic<const Driver*> open_driver_table;

namespace {

constexpr char kLibrary[] = "libcuda.so.1";

pthread_mutex_t setup_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_once_t fork_handler_once = PTHREAD_ONCE_INIT;
std::atomic<bool> initialised;  // cuInit was called in this process
std::atomic<bool> forked;       // ... and this is a child of it
Driver driver_table;

// A child cannot use its parent's CUDA state: calls into the driver would hang or fail oddly.
void after_fork_in_child() {
  setup_mutex = PTHREAD_MUTEX_INITIALIZER;
  if (!initialised.load(std::memory_order_relaxed)) return;
  forked.store(true, std::memory_order_relaxed);
  open_driver_table.store(nullptr, std::memory_order_release);
}

void install_fork_handler() { pthread_atfork(nullptr, nullptr, after_fork_in_child); }

tk_status fail_forked() {
  return fail(TK_FORKED,
              "the CUDA driver cannot be used in a process forked after it was initialised; start worker processes "
              "with the 'spawn' method");
}

tk_status open_library(void** library) {
  *library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (*library != nullptr) return TK_OK;
  return fail(TK_NO_DRIVER, "the NVIDIA driver is not usable: %s; install a driver >= %s", dlerror(),
              driver_branch(kBuildInfo.cuda_version));
}

tk_status fail_too_old(int32_t version, const char* missing) {
  Message message;
  message.add(
      "the NVIDIA driver is too old: kernels of this library need CUDA %d.%d (driver >= %s), the driver has CUDA %d.%d",
      kBuildInfo.cuda_version / 1000, kBuildInfo.cuda_version % 1000 / 10, driver_branch(kBuildInfo.cuda_version),
      version / 1000, version % 1000 / 10);
  if (missing != nullptr) message.add(" and no %s", missing);
  return TK_DRIVER_TOO_OLD;
}

tk_status version_of(void* library, int32_t* version) {
  const auto get = reinterpret_cast<CUresult (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  if (get == nullptr) return fail(TK_NO_DRIVER, "%s has no cuDriverGetVersion: it is not an NVIDIA driver", kLibrary);
  int value = 0;
  const CUresult result = get(&value);
  *version = value;
  return result == CUDA_SUCCESS ? TK_OK : fail(TK_DRIVER_ERROR, "cuDriverGetVersion failed with error %d", result);
}

tk_status fill_table(void* library, int32_t version) {
#define TK_FIND_FUNCTION(symbol, member, parameters)                                       \
  driver_table.member = reinterpret_cast<CUresult(*) parameters>(dlsym(library, #symbol)); \
  if (driver_table.member == nullptr) return fail_too_old(version, #symbol);
  TK_DRIVER_FUNCTIONS(TK_FIND_FUNCTION)
#undef TK_FIND_FUNCTION
  return TK_OK;
}

tk_status initialise() {
  initialised.store(true, std::memory_order_relaxed);
  const CUresult result = driver_table.cuInit(0);
  if (result == CUDA_SUCCESS) return TK_OK;
  initialised.store(false, std::memory_order_relaxed);
  if (result == CUDA_ERROR_NO_DEVICE) {
    return fail(TK_NO_DEVICE, "the NVIDIA driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES");
  }
  // This is what the driver says in a child of a process in which somebody else has initialised it.
  if (result == CUDA_ERROR_NOT_INITIALIZED) return fail_forked();
  Message message;
  message.add("initialising the NVIDIA driver: ");
  return add_driver_error(message, driver_table, "cuInit", result);
}

}  // namespace

const char* driver_branch(int32_t cuda_version) {
  struct Branch {
    int32_t cuda_major;
    const char* number;
  };
  // First driver branch of each CUDA major; within one, later drivers load code of every minor.
  constexpr Branch kBranches[] = {{12, "525"}, {13, "580"}};
  for (const Branch& branch : kBranches) {
    if (branch.cuda_major == cuda_version / 1000) return branch.number;
  }
  return "of that CUDA version";
}

tk_status driver_version(int32_t* version) {
  void* library = nullptr;
  TK_RETURN_IF_ERROR(open_library(&library));
  const tk_status status = version_of(library, version);
  dlclose(library);
  return status;
}

tk_status open_driver(const Driver** driver) {
  pthread_once(&fork_handler_once, install_fork_handler);
  if (forked.load(std::memory_order_relaxed)) return fail_forked();
  const SetupLock lock;
  *driver = open_driver_table.load(std::memory_order_acquire);
  if (*driver != nullptr) return TK_OK;
  // A failure is not remembered: a driver that appears later is found. Nor is the library closed again after cuInit.
  void* library = nullptr;
  int32_t version = 0;
  TK_RETURN_IF_ERROR(open_library(&library));
  TK_RETURN_IF_ERROR(version_of(library, &version));
  if (version < kBuildInfo.cuda_version) return fail_too_old(version, nullptr);
  TK_RETURN_IF_ERROR(fill_table(library, version));
  TK_RETURN_IF_ERROR(initialise());
  *driver = &driver_table;
  open_driver_table.store(&driver_table, std::memory_order_release);
  return TK_OK;
}

tk_status add_driver_error(Message& message, const Driver& driver, const char* call, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) text = "no description";
  message.add("%s failed with %d: %s (%s)", call, result, name, text);
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY: return TK_OUT_OF_MEMORY;
    case CUDA_ERROR_NO_DEVICE: return TK_NO_DEVICE;
    case CUDA_ERROR_INVALID_CONTEXT: return TK_NO_CONTEXT;
    case CUDA_ERROR_CONTEXT_IS_DESTROYED: return TK_CONTEXT_DESTROYED;
    default: return TK_DRIVER_ERROR;
  }
}

SetupLock::SetupLock() { pthread_mutex_lock(&setup_mutex); }
SetupLock::~SetupLock() { pthread_mutex_unlock(&setup_mutex); }

}  // namespace tk
