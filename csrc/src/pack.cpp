#include "pack.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "driver.h"
#include "message.h"
#include "pdl.h"

// A library that is itself a pack says so, and has none.
#ifdef TILEKERNELS_PACK
extern "C" TK_API int32_t tk_is_pack(void);
int32_t tk_is_pack(void) { return 1; }
#endif

namespace tk {

namespace {

#ifdef TILEKERNELS_PACK
constexpr bool kIsPack = true;
#else
constexpr bool kIsPack = false;
#endif
constexpr size_t kTextBytes = 2048;

Pack packs[kMaxPacks];
std::atomic<int32_t> pack_count;
struct PackKernel {
  const tk_kernel* kernel;
  const Pack* pack;
};
PackKernel pack_kernels[kMaxPackKernels];
std::atomic<int32_t> pack_kernel_count;
std::atomic<bool> path_was_read;
char refused[kTextBytes];  // why files of TILEKERNELS_PACK_PATH were not loaded

tk_status fail_pack(const char* path, const char* why, const char* what = "") {
  return fail(TK_INVALID_ARGUMENT, "pack %s: %s%s", path, why, what);
}

template <class Function>
bool find_function(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

const char* find_functions(void* library, Pack* pack) {
#define TK_FIND(name) \
  if (!find_function(library, "tk_" #name, &pack->name)) return "tk_" #name
  TK_FIND(last_error);
  TK_FIND(version);
  TK_FIND(abi_version);
  TK_FIND(find);
  TK_FIND(launch);
  TK_FIND(check);
  TK_FIND(preload);
  TK_FIND(workspace_size);
  TK_FIND(num_kernels);
  TK_FIND(kernel_at);
  TK_FIND(describe_kernel);
  TK_FIND(describe_param);
  TK_FIND(param_dtype);
  TK_FIND(describe_axis);
  TK_FIND(describe_variant);
  TK_FIND(covers);
  TK_FIND(set_thread_pdl);
#undef TK_FIND
  return dlsym(library, "tk_is_pack") != nullptr ? nullptr : "tk_is_pack";
}

bool same(const char* first, const char* second) {
  return first == second || (first != nullptr && second != nullptr && std::strcmp(first, second) == 0);
}

// Version without its label: 0.1.0 of 0.1.0+cu130.sm90a.
bool same_version(const char* first, const char* second) {
  const size_t length = std::strcspn(first, "+");
  return length == std::strcspn(second, "+") && std::strncmp(first, second, length) == 0;
}

const KernelDesc* own_kernel(const char* name) {
  for (int32_t i = 0; i < kNumKernels; ++i) {
    if (std::strcmp(kKernels[i]->name, name) == 0) return kKernels[i];
  }
  return nullptr;
}

// Arguments of the C interface go by position: names and kinds must be those of this library, one by one.
bool same_params(const Pack& pack, const tk_kernel* kernel, const KernelDesc& own, int32_t num_params) {
  if (num_params != own.num_params) return false;
  for (int32_t i = 0; i < num_params; ++i) {
    tk_param_info info = {};
    info.size = sizeof(info);
    if (pack.describe_param(kernel, i, &info) != TK_OK) return false;
    if (!same(info.name, own.params[i].name) || (info.is_tensor != 0) != own.params[i].tensor) return false;
    if (!own.params[i].tensor && !same(pack.param_dtype(kernel, i, 0), scalar_name(own.params[i].scalar))) return false;
  }
  return true;
}

bool same_axes(const Pack& pack, const tk_kernel* kernel, const KernelDesc& own, int32_t num_axes) {
  if (num_axes != own.num_axes) return false;
  for (int32_t i = 0; i < num_axes; ++i) {
    tk_axis_info info = {};
    info.size = sizeof(info);
    if (pack.describe_axis(kernel, i, &info) != TK_OK) return false;
    const AxisDesc& axis = own.axes[i];
    if (!same(info.name, axis.name) || info.kind != axis.kind || info.num_values != axis.num_values) return false;
    for (int32_t label = 0; label < axis.num_values; ++label) {
      if (!same(info.labels[label], axis.labels[label])) return false;
    }
  }
  return true;
}

// Which kernels of the pack are new; null, or the name of one that differs from this library's.
const char* compare_kernels(const Pack& pack, int32_t* num_new, PackKernel* found) {
  for (int32_t i = 0; i < pack.num_kernels(); ++i) {
    const tk_kernel* kernel = pack.kernel_at(i);
    tk_kernel_info info = {};
    info.size = sizeof(info);
    if (pack.describe_kernel(kernel, &info) != TK_OK) return "one that it does not describe";
    if (const KernelDesc* own = own_kernel(info.name)) {
      const bool fits =
          same_params(pack, kernel, *own, info.num_params) && same_axes(pack, kernel, *own, info.num_axes);
      if (!fits) return info.name;
      continue;
    }
    bool known = false;
    for (int32_t other = 0; other < pack_kernel_count.load(std::memory_order_relaxed); ++other) {
      tk_kernel_info earlier = {};
      earlier.size = sizeof(earlier);
      pack_kernels[other].pack->describe_kernel(pack_kernels[other].kernel, &earlier);
      known = known || same(earlier.name, info.name);
    }
    if (!known && *num_new < kMaxPackKernels) found[(*num_new)++] = {kernel, nullptr};
  }
  return nullptr;
}

// Under SetupLock.
tk_status load(const char* path) {
  if (kIsPack) return fail_pack(path, "a pack holds no packs");
  const int32_t count = pack_count.load(std::memory_order_relaxed);
  if (count == kMaxPacks) return fail_pack(path, "too many packs are loaded");
  Pack& pack = packs[count];
  if (std::strlen(path) >= sizeof(pack.path)) return fail_pack(path, "its path is too long");
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return fail_pack(path, "", dlerror());
  const char* missing = find_functions(library, &pack);
  if (missing != nullptr) return fail_pack(path, "it is no pack of tilekernels: it has no ", missing);
  for (int32_t i = 0; i < count; ++i) {
    if (packs[i].find == pack.find) return TK_OK;  // loaded before
  }
  if (pack.abi_version() != TK_ABI_VERSION || !same_version(pack.version(), tk_version())) {
    return fail(TK_INVALID_ARGUMENT, "pack %s: it was built with tilekernels %s, this library is %s; build it anew",
                path, pack.version(), tk_version());
  }
  static PackKernel found[kMaxPackKernels];
  int32_t num_new = 0;
  const char* other = compare_kernels(pack, &num_new, found);
  if (other != nullptr) {
    return fail_pack(path, "its parameters or axes are not those of this library; build both from one source: ", other);
  }
  std::strcpy(pack.path, path);
  int32_t next = pack_kernel_count.load(std::memory_order_relaxed);
  for (int32_t i = 0; i < num_new && next < kMaxPackKernels; ++i) pack_kernels[next++] = {found[i].kernel, &pack};
  pack_kernel_count.store(next, std::memory_order_release);
  pack_count.store(count + 1, std::memory_order_release);
  return TK_OK;
}

void load_or_note(const char* path) {
  if (load(path) == TK_OK) return;
  const size_t length = std::strlen(refused);
  std::strncat(refused, length == 0 ? "" : "; ", sizeof(refused) - length - 1);
  std::strncat(refused, last_message(), sizeof(refused) - std::strlen(refused) - 1);
}

bool is_pack_name(const dirent* entry) {
  const size_t length = std::strlen(entry->d_name);
  return length > 3 && std::strcmp(entry->d_name + length - 3, ".so") == 0;
}

// All *.so files of a folder, by name.
void load_folder(const char* folder) {
  dirent** entries = nullptr;
  const int count =
      scandir(folder, &entries, [](const dirent* entry) { return is_pack_name(entry) ? 1 : 0; }, alphasort);
  for (int i = 0; i < count; ++i) {
    char path[sizeof(Pack::path)];
    const size_t length = std::strlen(folder) + std::strlen(entries[i]->d_name) + 2;
    if (length <= sizeof(path)) {
      std::strcpy(path, folder);
      std::strcat(path, "/");
      std::strcat(path, entries[i]->d_name);
      load_or_note(path);
    }
    std::free(entries[i]);
  }
  std::free(entries);
}

void load_place(const char* place) {
  struct stat status;
  if (stat(place, &status) == 0 && S_ISDIR(status.st_mode)) {
    load_folder(place);
  } else {
    load_or_note(place);
  }
}

void read_path() {
  if (path_was_read.load(std::memory_order_acquire)) [[likely]]
    return;
  const SetupLock lock;
  if (path_was_read.load(std::memory_order_relaxed)) return;
  const char* places = kIsPack ? nullptr : secure_getenv("TILEKERNELS_PACK_PATH");
  while (places != nullptr && *places != 0) {
    char place[sizeof(Pack::path)];
    const size_t length = std::strcspn(places, ":");
    if (length > 0 && length < sizeof(place)) {
      std::memcpy(place, places, length);
      place[length] = 0;
      load_place(place);
    }
    places += length + (places[length] == ':');
  }
  path_was_read.store(true, std::memory_order_release);
}

// Whether another pack may have what this status refuses.
bool may_be_elsewhere(tk_status status) { return status == TK_NOT_BUILT || status == TK_NO_KERNEL_FOR_DEVICE; }

template <class Call>
tk_status ask_packs(const char* name, tk_status own, Call call) {
  if (!may_be_elsewhere(own)) return own;
  const int32_t count = num_packs();
  if (count == 0 && refused[0] == 0) return own;
  char text[kTextBytes];
  std::strncpy(text, last_message(), sizeof(text) - 1);
  text[sizeof(text) - 1] = 0;
  for (int32_t i = 0; i < count; ++i) {
    const tk_kernel* kernel = nullptr;
    if (packs[i].find(name, &kernel) != TK_OK) continue;
    const tk_status status = call(packs[i], kernel);
    if (!may_be_elsewhere(status)) return from_pack(packs[i], status);
  }
  Message message;
  message.add("%s", text);
  if (count > 0) message.add("; nor is it in the %d packs that are loaded", static_cast<int>(count));
  if (refused[0] != 0) message.add("; not loaded: %s", refused);
  return own;
}

}  // namespace

int32_t num_packs() {
  read_path();
  return pack_count.load(std::memory_order_acquire);
}

const Pack& pack_at(int32_t index) { return packs[index]; }

int32_t num_pack_kernels() {
  read_path();
  return pack_kernel_count.load(std::memory_order_acquire);
}

const tk_kernel* pack_kernel_at(int32_t index) { return pack_kernels[index].kernel; }

const Pack* pack_of(const tk_kernel* kernel) {
  const int32_t count = pack_kernel_count.load(std::memory_order_acquire);
  for (int32_t i = 0; i < count; ++i) {
    if (pack_kernels[i].kernel == kernel) return pack_kernels[i].pack;
  }
  return nullptr;
}

tk_status launch_in_pack(const Pack& pack, const tk_kernel* kernel, const tk_tensor* const* tensors,
                         const tk_scalar* scalars, const int32_t* axes, tk_stream stream) {
  pack.set_thread_pdl(is_pdl_on() ? TK_PDL_ON : TK_PDL_OFF);
  return pack.launch(kernel, tensors, scalars, axes, stream);
}

tk_status from_pack(const Pack& pack, tk_status status) {
  return status == TK_OK ? TK_OK : fail(status, "%s", pack.last_error());
}

tk_status launch_by_pack(const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                         const int32_t* axes, tk_stream stream, tk_status own) {
  return ask_packs(kernel.name, own, [&](const Pack& pack, const tk_kernel* found) {
    return launch_in_pack(pack, found, tensors, scalars, axes, stream);
  });
}

tk_status check_by_pack(const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                        const int32_t* axes, tk_status own) {
  return ask_packs(kernel.name, own,
                   [&](const Pack& pack, const tk_kernel* found) { return pack.check(found, tensors, scalars, axes); });
}

tk_status workspace_by_pack(const KernelDesc& kernel, int32_t param, const tk_tensor* const* tensors,
                            const tk_scalar* scalars, const int32_t* axes, int32_t num_sms, tk_workspace_info* info,
                            tk_status own) {
  return ask_packs(kernel.name, own, [&](const Pack& pack, const tk_kernel* found) {
    return pack.workspace_size(found, param, tensors, scalars, axes, num_sms, info);
  });
}

}  // namespace tk

using namespace tk;  // NOLINT: the functions below are the outer face of this namespace

tk_status tk_load_pack(const char* path) {
  if (path == nullptr) return fail(TK_INVALID_ARGUMENT, "tk_load_pack: path must be a text, got null");
  num_packs();  // those of TILEKERNELS_PACK_PATH come first
  const SetupLock lock;
  return load(path);
}

int32_t tk_num_packs(void) { return num_packs(); }

const char* tk_pack_at(int32_t index) { return index >= 0 && index < num_packs() ? pack_at(index).path : nullptr; }
