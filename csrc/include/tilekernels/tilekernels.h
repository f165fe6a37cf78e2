/* The C interface of libtilekernels: compiled GPU kernels behind plain functions.
 *
 * Needs no CUDA toolkit, Python or torch: the driver (libcuda.so.1) is opened on first use. Every function that can
 * fail returns a tk_status and leaves a sentence in tk_last_error() of the calling thread. The typed entries, one per
 * kernel, are in ops.h; tk_find and tk_launch reach the same kernels by name. Thread-safe throughout. */
#ifndef TILEKERNELS_TILEKERNELS_H_
#define TILEKERNELS_TILEKERNELS_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TK_ABI_VERSION 0

#if defined(__GNUC__)
#define TK_API __attribute__((visibility("default")))
#else
#define TK_API
#endif

/* ---- Statuses -------------------------------------------------------------------------------------------------- */

typedef enum tk_status {
  TK_OK = 0,
  TK_INVALID_ARGUMENT = 1,     /* a shape, stride, value, device or null that the kernel does not take */
  TK_INVALID_TYPE = 2,         /* a dtype that the kernel does not take */
  TK_NOT_BUILT = 3,            /* the kernel or this configuration of it is not in the library */
  TK_NO_KERNEL_FOR_DEVICE = 4, /* it is in the library, but not for this GPU */
  TK_NO_DRIVER = 5,            /* libcuda.so.1 is not there */
  TK_DRIVER_TOO_OLD = 6,       /* it is older than the CUDA version that the kernels were compiled with */
  TK_NO_DEVICE = 7,            /* no GPU, or no GPU of that number */
  TK_NO_CONTEXT = 8,           /* no CUDA context is current in the calling thread */
  TK_OUT_OF_MEMORY = 9,        /* the driver had no memory to load a kernel */
  TK_FORKED = 10,              /* the process forked after the driver was initialised; start workers by spawn */
  TK_DRIVER_ERROR = 11,        /* any other failure of the driver */
  TK_CONTEXT_DESTROYED = 12    /* the CUDA context that is current in the calling thread was destroyed */
} tk_status;

/* Static text such as "TK_INVALID_ARGUMENT". */
TK_API const char* tk_status_name(tk_status status);

/* The sentence of the last failure in this thread ("" before any). Valid until the next failure in this thread. */
TK_API const char* tk_last_error(void);

/* Version of the library, such as "0.1.0", and of this interface (compare with TK_ABI_VERSION). */
TK_API const char* tk_version(void);
TK_API int32_t tk_abi_version(void);

/* ---- Data ------------------------------------------------------------------------------------------------------ */

/* The numbers are DLPack's. */
typedef enum tk_device_type { TK_CPU = 1, TK_CUDA = 2, TK_CUDA_HOST = 3, TK_CUDA_MANAGED = 13 } tk_device_type;

typedef enum tk_dtype_code {
  TK_INT = 0,
  TK_UINT = 1,
  TK_FLOAT = 2,
  TK_BFLOAT = 4,
  TK_COMPLEX = 5,
  TK_BOOL = 6,
  TK_FLOAT8_E4M3FN = 10,
  TK_FLOAT8_E4M3FNUZ = 11,
  TK_FLOAT8_E5M2 = 12,
  TK_FLOAT8_E5M2FNUZ = 13,
  TK_FLOAT8_E8M0FNU = 14,
  TK_FLOAT4_E2M1FN = 17
} tk_dtype_code;

typedef struct tk_device {
  int32_t device_type; /* a tk_device_type */
  int32_t device_id;
} tk_device;

typedef struct tk_dtype {
  uint8_t code; /* a tk_dtype_code */
  uint8_t bits;
  uint16_t lanes;
} tk_dtype;

/* A view of a tensor with the layout of DLTensor: a DLTensor* may be passed as a tk_tensor*. Strides are counted in
 * elements; null means dense. The library never keeps a view after a call returns. */
typedef struct tk_tensor {
  void* data;
  tk_device device;
  int32_t ndim;
  tk_dtype dtype;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
} tk_tensor;

/* One scalar parameter; the kernel's parameter says which member is read. */
typedef union tk_scalar {
  float f32;
  double f64;
  int32_t i32;
  int64_t i64;
  int32_t b; /* bool: 0 or 1 */
} tk_scalar;

/* A CUstream or cudaStream_t; null is the default stream. */
typedef void* tk_stream;

/* ---- Kernels by name ------------------------------------------------------------------------------------------- */

typedef struct tk_kernel tk_kernel;

/* Finds a kernel such as "moe.topk_gate". The handle stays valid as long as the library is loaded. */
TK_API tk_status tk_find(const char* name, const tk_kernel** kernel);

/* Runs a kernel on `stream` in the current context.
 *   tensors: one pointer per tensor parameter, in parameter order; null where an optional tensor is absent
 *   scalars: one per scalar parameter, in parameter order
 *   axes:    one per plain axis, in order: the value for numbers, 0 or 1 for flags, the index of the label for choices
 * After the first use of a kernel on a device: no lock, no allocation, no synchronisation. */
TK_API tk_status tk_launch(const tk_kernel* kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                           const int32_t* axes, tk_stream stream);

/* Makes the checks of tk_launch that need no GPU, on tensors of any device; tensors that the kernel writes may be
 * null. Works without a driver. */
TK_API tk_status tk_check(const tk_kernel* kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
                          const int32_t* axes);

/* Loads kernels now, so that the first call is as fast as any other and may be captured into a CUDA graph.
 * names: `num_names` kernels, or null for all that fit the device. device: a device number, whose primary context is
 * used (the one of cudart and torch), or -1 for the current context. */
TK_API tk_status tk_preload(const char* const* names, int32_t num_names, int32_t device);

/* ---- Programmatic dependent launch --------------------------------------------------------------------------------
 * A kernel that is launched so may be set up while the one before it in the stream still runs; it waits for that one's
 * end before it touches memory, so results are the same. GPUs below 9.0 and cooperative kernels are launched as
 * always. Off at first. */

/* For all calls of the process. */
TK_API void tk_set_pdl(int32_t enabled);
TK_API int32_t tk_get_pdl(void);

typedef enum tk_pdl_mode {
  TK_PDL_DEFAULT = 0, /* as tk_set_pdl says */
  TK_PDL_OFF = 1,
  TK_PDL_ON = 2
} tk_pdl_mode;

/* For calls of this thread, so that around a call it is a choice for that call. Returns the mode before. */
TK_API tk_pdl_mode tk_set_thread_pdl(tk_pdl_mode mode);

/* ---- What the library holds ------------------------------------------------------------------------------------ */

typedef enum tk_axis_kind {
  TK_AXIS_NUMBER = 0,     /* plain: an integer of a list */
  TK_AXIS_FLAG = 1,       /* plain: a bool */
  TK_AXIS_CHOICE = 2,     /* plain: a string of a list */
  TK_AXIS_DTYPE_OF = 3,   /* derived from the dtype of a tensor */
  TK_AXIS_ITEMSIZE_OF = 4 /* derived from the element size of a tensor */
} tk_axis_kind;

/* The structs below are filled by the library. Set `size` to sizeof the struct first: a library of another version
 * then knows which fields the caller has. */
typedef struct tk_kernel_info {
  size_t size;
  const char* name;
  int32_t num_params;
  int32_t num_axes;
  int32_t num_variants;
} tk_kernel_info;

typedef struct tk_param_info {
  size_t size;
  const char* name;
  int32_t is_tensor;
  int32_t written;    /* the kernel writes this tensor */
  int32_t nullable;   /* null is accepted by some or all configurations */
  int32_t raw;        /* any dtype of the element sizes of its dtypes; all raw tensors of a call have one dtype */
  int32_t rank;       /* -1: differs between configurations */
  int32_t num_dtypes; /* how many tk_param_dtype tells; a scalar has one */
  int32_t optional;   /* missing in some configurations, where it must be null; nullable is set as well */
} tk_param_info;

typedef struct tk_axis_info {
  size_t size;
  const char* name;
  int32_t kind;  /* a tk_axis_kind */
  int32_t param; /* index of the parameter that a derived axis is read from, -1 for plain axes */
  int32_t num_values;
  const char* const* labels;
  const int64_t* values; /* of numbers, flags and item sizes; of a choice, 0, 1, ...; else null */
} tk_axis_info;

typedef struct tk_variant_info {
  size_t size;
  const char* id;     /* such as "b2_aligned" */
  const char* arch;   /* such as "sm_90a" */
  const char* symbol; /* of the first launch, as profilers show it */
  int32_t num_launches;
} tk_variant_info;

/* Scratch memory of a call, to be made by the caller as a dense tensor; its content before and after means nothing. */
typedef struct tk_workspace_info {
  size_t size;
  int64_t num_bytes;
  tk_dtype dtype;
  int32_t ndim;
  int64_t shape[8]; /* of the first ndim dimensions */
} tk_workspace_info;

TK_API int32_t tk_num_kernels(void);
TK_API const tk_kernel* tk_kernel_at(int32_t index);
TK_API tk_status tk_describe_kernel(const tk_kernel* kernel, tk_kernel_info* info);
TK_API tk_status tk_describe_param(const tk_kernel* kernel, int32_t index, tk_param_info* info);
/* The index-th dtype of a parameter, named as in torch ("bfloat16", "float8_e4m3fn"); null past the last. */
TK_API const char* tk_param_dtype(const tk_kernel* kernel, int32_t param, int32_t index);
TK_API tk_status tk_describe_axis(const tk_kernel* kernel, int32_t index, tk_axis_info* info);
TK_API tk_status tk_describe_variant(const tk_kernel* kernel, int32_t index, tk_variant_info* info);

/* 1 if the library holds a variant with these axis values for this arch, else 0. labels: one index into the labels of
 * each axis, -1 for any; null for any at all. arch: such as "sm_90a", null for any. */
TK_API int32_t tk_covers(const tk_kernel* kernel, const int32_t* labels, const char* arch);

/* What the parameter `param` (its index, named workspace...) of a call with these arguments must be. The arguments are
 * those of tk_check; workspaces among them are passed over and may be null. num_sms: of a workspace with one row for
 * each block that runs, how many SMs the call may use; 0 for all of the current device. Works without a driver unless
 * it is 0. ops.h has a typed form for each workspace, tk_<family>_<kernel>_<parameter>_size. */
TK_API tk_status tk_workspace_size(const tk_kernel* kernel, int32_t param, const tk_tensor* const* tensors,
                                   const tk_scalar* scalars, const int32_t* axes, int32_t num_sms,
                                   tk_workspace_info* info);

/* The archs of the library, such as "sm_90a"; null past the last. */
TK_API const char* tk_arch_at(int32_t index);

/* ---- Overlay packs ---------------------------------------------------------------------------------------------- */

/* A pack (`make pack`) is a shared object with variants that the library was built without, from the same sources.
 * Those in TILEKERNELS_PACK_PATH (files and folders, separated by colons) are loaded by the first call that looks for a
 * kernel; tk_load_pack adds one. Calls that the library does not hold are then tried in the packs, with the same
 * checks; kernels that only a pack has are found by tk_find and come last in tk_kernel_at. A pack stays loaded. */
TK_API tk_status tk_load_pack(const char* path);
TK_API int32_t tk_num_packs(void);
/* Path of the index-th pack; null past the last. */
TK_API const char* tk_pack_at(int32_t index);

/* ---- The machine ----------------------------------------------------------------------------------------------- */

typedef struct tk_device_info {
  size_t size;
  char name[128];
  int32_t compute_capability_major;
  int32_t compute_capability_minor;
  int32_t num_sms;
  int32_t max_shared_memory; /* bytes a block may have */
  uint64_t total_memory;     /* bytes */
  const char* arch;          /* arch of the library that runs here, null if none does */
  const char* wanted_arch;   /* arch to build or install for this GPU; null if there is none */
} tk_device_info;

/* The driver's CUDA version, such as 13000, and the lowest that the library works with. */
TK_API tk_status tk_driver_version(int32_t* version);
TK_API int32_t tk_required_driver_version(void);
TK_API tk_status tk_num_devices(int32_t* count);
TK_API tk_status tk_describe_device(int32_t device, tk_device_info* info);

/* Makes the primary context of `device` current if another one is; tk_leave_device(previous) undoes it. For callers
 * that, as torch does, live in primary contexts. `previous` is the context to restore; null if nothing
 * changed, or if none was current or one that was destroyed. */
TK_API tk_status tk_enter_device(int32_t device, void** previous);
TK_API tk_status tk_leave_device(void* previous);

#ifdef __cplusplus
}
#endif

#endif /* TILEKERNELS_TILEKERNELS_H_ */
