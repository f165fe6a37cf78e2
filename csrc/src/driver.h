// The part of the CUDA driver API that the runtime uses, declared here so that compiling needs no CUDA header and
// linking no CUDA library. Numbers are those of cuda.h; they are part of the driver's ABI and do not change.
#pragma once

#include <cstddef>
#include <cstdint>

#include "registry.h"

namespace tk {

class Message;

using CUresult = int;
using CUdevice = int;
using CUcontext = void*;
using CUstream = void*;
using CUlibrary = void*;
using CUkernel = void*;    // independent of contexts; accepted wherever the driver takes a function
using CUfunction = void*;  // of one context

enum : CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
};

enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
};

enum CUfunction_attribute : int {
  CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
  CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
};

// The driver may read the image at any later time: it lies in the library for good, so no copy is made.
enum CUlibraryOption : int { CU_LIBRARY_BINARY_IS_PRESERVED = 1 };

enum CUlaunchAttributeID : unsigned {
  CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2,
  CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
};

union CUlaunchAttributeValue {
  char pad[64];
  struct {
    unsigned x, y, z;
  } clusterDim;
  int cooperative;
  int programmaticStreamSerializationAllowed;
};

struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char pad[8 - sizeof(CUlaunchAttributeID)];
  CUlaunchAttributeValue value;
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

enum CUtensorMapDataType : int {
  CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
  CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1,
  CU_TENSOR_MAP_DATA_TYPE_UINT32 = 2,
  CU_TENSOR_MAP_DATA_TYPE_INT32 = 3,
  CU_TENSOR_MAP_DATA_TYPE_UINT64 = 4,
  CU_TENSOR_MAP_DATA_TYPE_INT64 = 5,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT64 = 8,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
};

// Every function of the driver that the runtime calls: symbol in libcuda.so.1, member, parameters.
#define TK_DRIVER_FUNCTIONS(X)                                                                               \
  X(cuInit, cuInit, (unsigned flags))                                                                        \
  X(cuGetErrorName, cuGetErrorName, (CUresult error, const char** text))                                     \
  X(cuGetErrorString, cuGetErrorString, (CUresult error, const char** text))                                 \
  X(cuDeviceGetCount, cuDeviceGetCount, (int* count))                                                        \
  X(cuDeviceGetName, cuDeviceGetName, (char* name, int bytes, CUdevice device))                              \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute, (int* value, CUdevice_attribute attribute, CUdevice device)) \
  X(cuDeviceTotalMem_v2, cuDeviceTotalMem, (size_t* bytes, CUdevice device))                                 \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))              \
  X(cuCtxGetDevice, cuCtxGetDevice, (CUdevice * device))                                                     \
  X(cuCtxGetCurrent, cuCtxGetCurrent, (CUcontext * context))                                                 \
  X(cuCtxSetCurrent, cuCtxSetCurrent, (CUcontext context))                                                   \
  X(cuCtxGetId, cuCtxGetId, (CUcontext context, unsigned long long* id))                                     \
  X(cuLibraryLoadData, cuLibraryLoadData,                                                                    \
    (CUlibrary * library, const void* code, int* jit_options, void** jit_values, unsigned num_jit_options,   \
     CUlibraryOption* options, void** values, unsigned num_options))                                         \
  X(cuLibraryGetKernel, cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char* name))        \
  X(cuKernelGetFunction, cuKernelGetFunction, (CUfunction * function, CUkernel kernel))                      \
  X(cuKernelGetAttribute, cuKernelGetAttribute,                                                              \
    (int* value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device))                          \
  X(cuKernelSetAttribute, cuKernelSetAttribute,                                                              \
    (CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device))                           \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor,                \
    (int* num_blocks, CUfunction function, int block_size, size_t dynamic_smem))                             \
  X(cuTensorMapEncodeTiled, cuTensorMapEncodeTiled,                                                          \
    (void* map, CUtensorMapDataType dtype, uint32_t rank, void* address, const uint64_t* global_dim,         \
     const uint64_t* global_stride, const uint32_t* box_dim, const uint32_t* element_stride, int interleave, \
     int swizzle, int l2_promotion, int oob_fill))                                                           \
  X(cuLaunchKernelEx, cuLaunchKernelEx,                                                                      \
    (const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra))

struct Driver {
#define TK_DECLARE_FUNCTION(symbol, member, parameters) CUresult(*member) parameters;
  TK_DRIVER_FUNCTIONS(TK_DECLARE_FUNCTION)
#undef TK_DECLARE_FUNCTION
};

extern std::atomic<const Driver*> open_driver_table;  // null before first use, and again in a forked child

// Opens and initialises the driver; the slow path of find_driver.
[[gnu::cold]] tk_status open_driver(const Driver** driver);

inline tk_status find_driver(const Driver** driver) {
  *driver = open_driver_table.load(std::memory_order_acquire);
  return *driver != nullptr ? TK_OK : open_driver(driver);
}

// cuDriverGetVersion of the installed driver, without initialising it, so that it can be told when it is too old.
tk_status driver_version(int32_t* version);

// "580" for 13000: the number under which people know a driver; null if unknown.
const char* driver_branch(int32_t cuda_version);

// Adds "<call> failed with <number>: <name> (<text>)" to a message that says what was being done; the status that fits.
[[gnu::cold]] tk_status add_driver_error(Message& message, const Driver& driver, const char* call, CUresult result);

// Held while anything is loaded or set up for the first time; never on the path of a later launch. Usable in a forked
// child even if another thread held it at the fork.
class SetupLock {
 public:
  SetupLock();
  ~SetupLock();
  SetupLock(const SetupLock&) = delete;
  SetupLock& operator=(const SetupLock&) = delete;
};

}  // namespace tk
