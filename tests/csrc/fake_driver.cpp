// A libcuda.so.1 for tests: answers the calls of csrc/src/driver.h as a driver would and records them, one JSON object
// a line, in the file $FAKE_CUDA_LOG; what programs call besides is in fake_engine.cpp. Its signatures are written
// anew, against the CUDA manual, so that a wrong declaration in driver.h is seen. $FAKE_CUDA_* configure it:
//
//   DEVICES=9.0,8.0     compute capabilities of the GPUs          VERSION=13000   what cuDriverGetVersion says
//   BLOCKS_PER_SM=2     answer of the occupancy query             LOG=file        no file: nothing is recorded or
//   allocated FAIL=cuInit:100     call and error code; "cuLibraryLoadData:2:1" fails once only
//
// "Device memory" is the host's; kernels compute nothing.
#include "fake_driver.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

using namespace fake;

namespace fake {
bool initialised = false;
thread_local Context* current = nullptr;
}  // namespace fake

namespace {

enum { kMultiprocessorCount = 16, kMajor = 75, kMinor = 76, kMaxSmemOptin = 97 };
enum { kCooperative = 2, kCluster = 4, kPdl = 6 };

struct Kernel {
  std::string symbol;
  std::vector<int> parameter_sizes;
  int unit;
};
struct Library {
  std::map<std::string, Kernel> kernels;
  bool is_real;  // a compiled cubin: its kernels are not known beforehand, nor their parameters
  int unit;
};

std::mutex mutex;
Context primaries[64];
int num_libraries = 0;

const char* setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

bool recording() { return std::getenv("FAKE_CUDA_LOG") != nullptr; }

struct Capability {
  int major, minor;
};
int read_devices(Capability* devices) {
  int count = 0, used = 0;
  for (const char* at = setting("FAKE_CUDA_DEVICES", "9.0");
       std::sscanf(at, "%d.%d%n", &devices[count].major, &devices[count].minor, &used) == 2;) {
    at += used;
    ++count;
    if (*at++ != ',') break;
  }
  return count;
}

std::string hex(const void* data, int size) {
  std::string text;
  char digits[3];
  for (int i = 0; i < size; ++i) {
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<const unsigned char*>(data)[i]);
    text += digits;
  }
  return text;
}

template <typename T>
std::string list(const T* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + number(static_cast<long long>(values[i]));
  return text + "]";
}

}  // namespace

int fake::failure(const char* call) {
  static int failures_left = -2;
  const char* fail = std::getenv("FAKE_CUDA_FAIL");
  if (fail == nullptr) return 0;
  char name[64] = {};
  int code = 0, times = -1;
  if (std::sscanf(fail, "%63[^:]:%d:%d", name, &code, &times) < 2 || std::strcmp(name, call) != 0) return 0;
  if (failures_left == -2) failures_left = times;
  if (failures_left == 0) return 0;
  --failures_left;
  return code;
}

FAKE cuDriverGetVersion(int* version) {
  *version = std::atoi(setting("FAKE_CUDA_VERSION", "13000"));
  return kSuccess;
}

FAKE cuInit(unsigned) {
  FAIL_IF_ASKED("cuInit");
  record("{\"call\": \"cuInit\"}");
  initialised = true;
  return kSuccess;
}

FAKE cuGetErrorName(int error, const char** text) {
  switch (error) {
    case 2: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case 100: *text = "CUDA_ERROR_NO_DEVICE"; break;
    case 700: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    default: *text = "CUDA_ERROR_OF_THE_FAKE";
  }
  return kSuccess;
}

FAKE cuGetErrorString(int error, const char** text) {
  *text = error == 2 ? "out of memory" : "an error of the fake";
  return kSuccess;
}

FAKE cuDeviceGetCount(int* count) {
  NEEDS_INIT;
  Capability devices[64];
  *count = read_devices(devices);
  return kSuccess;
}

FAKE cuDeviceGetName(char* name, int bytes, int device) {
  NEEDS_INIT;
  std::snprintf(name, static_cast<size_t>(bytes), "Fake GPU %d", device);
  return kSuccess;
}

FAKE cuDeviceGetAttribute(int* value, int attribute, int device) {
  NEEDS_INIT;
  Capability devices[64];
  if (device >= read_devices(devices)) return kInvalidDevice;
  switch (attribute) {
    case kMultiprocessorCount: *value = 132; return kSuccess;
    case kMajor: *value = devices[device].major; return kSuccess;
    case kMinor: *value = devices[device].minor; return kSuccess;
    case kMaxSmemOptin: *value = devices[device].major == 8 ? 166912 : 232448; return kSuccess;
    default: return kInvalidValue;
  }
}

FAKE cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = size_t{80} << 30;
  return kSuccess;
}

FAKE cuDevicePrimaryCtxRetain(void** context, int device) {
  NEEDS_INIT;
  FAIL_IF_ASKED("cuDevicePrimaryCtxRetain");
  record("{\"call\": \"cuDevicePrimaryCtxRetain\", \"device\": " + number(device) + "}");
  primaries[device] = {device, true};
  *context = &primaries[device];
  return kSuccess;
}

// Of a destroyed context the real driver (580.159) refuses the id; a call that goes on nevertheless ends the process.
FAKE cuCtxGetDevice(int* device) {
  NEEDS_INIT;
  if (current != nullptr && current->destroyed) std::abort();
  NEEDS_CONTEXT;
  *device = current->device;
  return kSuccess;
}

FAKE cuCtxGetCurrent(void** context) {
  NEEDS_INIT;
  *context = current;
  return kSuccess;
}

FAKE cuCtxSetCurrent(void* context) {
  NEEDS_INIT;
  current = static_cast<Context*>(context);
  return kSuccess;
}

// Contexts are never freed, so that an address is as good as a number.
FAKE cuCtxGetId(void* context, unsigned long long* id) {
  NEEDS_INIT;
  if (context == nullptr) {
    if (context_state() != kSuccess) record("{\"call\": \"cuCtxGetId\", \"refused\": true}");
    NEEDS_CONTEXT;
    context = current;
  }
  *id = reinterpret_cast<size_t>(context);
  return kSuccess;
}

FAKE cuLibraryLoadData(void** library, const void* code, int*, void**, unsigned num_jit_options, int* options, void**,
                       unsigned num_options) {
  NEEDS_INIT;
  FAIL_IF_ASKED("cuLibraryLoadData");
  if (is_capturing()) return kStreamCaptureUnsupported;
  usleep(2000);  // long enough for other threads to arrive at the same first use
  const int unit = num_libraries++;
  const char* text = static_cast<const char*>(code);
  auto* loaded = new Library{{},
                             std::memcmp(text,
                                         "\x7f"
                                         "ELF",
                                         4) == 0,
                             unit};
  for (const char* line = loaded->is_real ? "" : std::strchr(text, '\n') + 1; *line != '\0';
       line = std::strchr(line, '\n') + 1) {
    const std::string words(line, static_cast<size_t>(std::strchr(line, '\n') - line));
    Kernel kernel{words.substr(0, words.find(' ')), {}, unit};
    for (size_t at = words.find(' '); at != std::string::npos; at = words.find(' ', at + 1)) {
      kernel.parameter_sizes.push_back(std::atoi(words.c_str() + at + 1));
    }
    loaded->kernels[kernel.symbol] = kernel;
  }
  *library = loaded;
  record("{\"call\": \"cuLibraryLoadData\", \"unit\": " + number(unit) + ", \"num_jit_options\": " +
         number(num_jit_options) + ", \"options\": " + list(options, static_cast<int>(num_options)) + "}");
  return kSuccess;
}

FAKE cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  FAIL_IF_ASKED("cuLibraryGetKernel");
  auto& [kernels, is_real, unit] = *static_cast<Library*>(library);
  record("{\"call\": \"cuLibraryGetKernel\", \"name\": \"" + std::string(name) + "\"}");
  if (is_real) kernels.try_emplace(name, Kernel{name, {}, unit});
  if (kernels.count(name) == 0) return kNotFound;
  *kernel = &kernels[name];
  return kSuccess;
}

FAKE cuKernelGetFunction(void** function, void* kernel) {
  FAIL_IF_ASKED("cuKernelGetFunction");
  NEEDS_CONTEXT;
  record("{\"call\": \"cuKernelGetFunction\", \"name\": \"" + static_cast<Kernel*>(kernel)->symbol +
         "\", \"device\": " + number(current->device) + "}");
  *function = kernel;
  return kSuccess;
}

FAKE cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 1024;  // static shared memory
  return kSuccess;
}

FAKE cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  record("{\"call\": \"cuKernelSetAttribute\", \"attribute\": " + number(attribute) + ", \"value\": " + number(value) +
         ", \"name\": \"" + static_cast<Kernel*>(kernel)->symbol + "\", \"device\": " + number(device) + "}");
  return kSuccess;
}

FAKE cuOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, void* function, int block_size, size_t smem) {
  NEEDS_CONTEXT;
  *num_blocks = std::atoi(setting("FAKE_CUDA_BLOCKS_PER_SM", "2"));
  record("{\"call\": \"cuOccupancyMaxActiveBlocksPerMultiprocessor\", \"name\": \"" +
         static_cast<Kernel*>(function)->symbol + "\", \"block_size\": " + number(block_size) +
         ", \"smem\": " + number(static_cast<long long>(smem)) + ", \"device\": " + number(current->device) + "}");
  return kSuccess;
}

FAKE cuTensorMapEncodeTiled(void* map, int dtype, unsigned rank, void* address, const unsigned long long* global_dim,
                            const unsigned long long* global_stride, const unsigned* box_dim,
                            const unsigned* element_stride, int interleave, int swizzle, int l2_promotion,
                            int oob_fill) {
  FAIL_IF_ASKED("cuTensorMapEncodeTiled");
  if (reinterpret_cast<size_t>(map) % 64 != 0) return kInvalidValue;
  const int count = static_cast<int>(rank);
  for (int i = 0; i < count; ++i) {
    if (global_dim[i] == 0) return kInvalidValue;
  }
  std::memset(map, 0xAB, 128);
  if (!recording()) return kSuccess;
  record("{\"call\": \"cuTensorMapEncodeTiled\", \"dtype\": " + number(dtype) +
         ", \"address\": " + number(static_cast<long long>(reinterpret_cast<size_t>(address))) +
         ", \"global_dim\": " + list(global_dim, count) + ", \"global_stride\": " + list(global_stride, count - 1) +
         ", \"box_dim\": " + list(box_dim, count) + ", \"element_stride\": " + list(element_stride, count) +
         ", \"interleave\": " + number(interleave) + ", \"swizzle\": " + number(swizzle) +
         ", \"l2_promotion\": " + number(l2_promotion) + ", \"oob_fill\": " + number(oob_fill) + "}");
  return kSuccess;
}

// CUlaunchConfig and CUlaunchAttribute, read by offset: 7 words, then stream, attributes, their number.
FAKE cuLaunchKernelEx(const unsigned* config, void* function, void** arguments, void** extra) {
  FAIL_IF_ASKED("cuLaunchKernelEx");
  NEEDS_CONTEXT;
  if (extra != nullptr) return kInvalidValue;
  if (config[0] == 0 || config[1] == 0 || config[2] == 0) return kInvalidValue;
  void* stream = nullptr;
  std::memcpy(&stream, reinterpret_cast<const char*>(config) + 32, sizeof(stream));
  const bool captured = add_captured(stream);
  if (!recording()) return kSuccess;
  const char* bytes = reinterpret_cast<const char*>(config);
  void* attributes = nullptr;
  unsigned num_attributes = 0;
  std::memcpy(&attributes, bytes + 40, sizeof(attributes));
  std::memcpy(&num_attributes, bytes + 48, sizeof(num_attributes));
  std::string named;
  for (unsigned i = 0; i < num_attributes; ++i) {
    const unsigned* attribute = reinterpret_cast<const unsigned*>(static_cast<const char*>(attributes) + 72 * i);
    named += i ? ", " : "";
    if (attribute[0] == kCluster)
      named += "\"cluster\": " + list(attribute + 2, 3);
    else if (attribute[0] == kPdl)
      named += "\"pdl\": " + number(attribute[2]);
    else if (attribute[0] == kCooperative)
      named += "\"cooperative\": " + number(attribute[2]);
    else
      named += "\"unknown\": " + number(attribute[0]);
  }
  const auto* kernel = static_cast<Kernel*>(function);
  std::string values;
  for (size_t i = 0; i < kernel->parameter_sizes.size(); ++i) {
    values += (i ? ", \"" : "\"") + hex(arguments[i], kernel->parameter_sizes[i]) + "\"";
  }
  const std::lock_guard<std::mutex> lock(mutex);
  record("{\"call\": \"cuLaunchKernelEx\", \"name\": \"" + kernel->symbol + "\", \"grid\": " + list(config, 3) +
         ", \"block\": " + list(config + 3, 3) + ", \"smem\": " + number(config[6]) +
         ", \"stream\": " + number(static_cast<long long>(reinterpret_cast<size_t>(stream))) + ", \"attributes\": {" +
         named + "}, \"arguments\": [" + values + "], \"device\": " + number(current->device) +
         ", \"primary\": " + (current->primary ? "true" : "false") + (captured ? ", \"captured\": true" : "") + "}");
  return kSuccess;
}
