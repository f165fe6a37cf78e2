// The tables through which the runtime knows the kernels, and nothing else of them. Generated code (codegen, embed)
// fills them from the manifest; tests/csrc/hand_tables.cpp is a small example written by hand.
//
// Everything is constant data except the states, which are zero until the first launch: no constructor runs on load.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tilekernels/tilekernels.h"

namespace tk {

class Launcher;
struct KernelDesc;
struct Signature;

constexpr int32_t kMaxSymbols = 32;
constexpr int32_t kMaxRank = 8;
constexpr int32_t kMaxAxes = 16;
constexpr int32_t kMaxArchs = 32;

constexpr uint32_t pack_dtype(uint32_t code, uint32_t bits, uint32_t lanes = 1) {
  return code | bits << 8 | lanes << 16;
}

// A dtype is its DLPack triple in one word, so that comparing it with a tensor's costs one instruction. Names are
// torch's.
enum class DType : uint32_t {
  none = 0,  // an absent tensor
  bool_ = pack_dtype(TK_BOOL, 8),
  int8 = pack_dtype(TK_INT, 8),
  int16 = pack_dtype(TK_INT, 16),
  int32 = pack_dtype(TK_INT, 32),
  int64 = pack_dtype(TK_INT, 64),
  uint8 = pack_dtype(TK_UINT, 8),
  uint16 = pack_dtype(TK_UINT, 16),
  uint32 = pack_dtype(TK_UINT, 32),
  uint64 = pack_dtype(TK_UINT, 64),
  float16 = pack_dtype(TK_FLOAT, 16),
  float32 = pack_dtype(TK_FLOAT, 32),
  float64 = pack_dtype(TK_FLOAT, 64),
  bfloat16 = pack_dtype(TK_BFLOAT, 16),
  complex64 = pack_dtype(TK_COMPLEX, 64),
  complex128 = pack_dtype(TK_COMPLEX, 128),
  float8_e4m3fn = pack_dtype(TK_FLOAT8_E4M3FN, 8),
  float8_e4m3fnuz = pack_dtype(TK_FLOAT8_E4M3FNUZ, 8),
  float8_e5m2 = pack_dtype(TK_FLOAT8_E5M2, 8),
  float8_e5m2fnuz = pack_dtype(TK_FLOAT8_E5M2FNUZ, 8),
  float8_e8m0fnu = pack_dtype(TK_FLOAT8_E8M0FNU, 8),
  float4_e2m1fn_x2 = pack_dtype(TK_FLOAT4_E2M1FN, 4, 2),
};

enum class ScalarType : uint8_t { none, float32, float64, int32, int64, bool_ };

// One call: what generated code reads and writes.
struct Frame {
  const KernelDesc* kernel;
  const tk_tensor* const* tensors;  // in parameter order, tensors only; null where absent
  const tk_scalar* scalars;         // in parameter order, scalars only, without derived ones
  const Signature* signature;
  bool check_only;               // written tensors may be absent
  uint32_t bound;                // bit i: symbols[i] is known
  int64_t symbols[kMaxSymbols];  // bound by Signature::bind; 0 where a nullable tensor is absent
};

// A scratch tensor of a call, so that the caller can be told its size.
struct WorkspaceDesc {
  int32_t tensor;  // index among the tensors
  DType dtype;
  int32_t rank;
  int32_t num_sms;   // the symbol that only workspaces carry: how many blocks run; -1: there is none
  uint32_t symbols;  // bit i: the shape needs symbols[i]
  void (*shape)(const Frame&, int64_t* shape);
};

// What is common to all forms (and archs) of one key: symbols, shapes, strides, and the guards that all of them share.
struct Signature {
  tk_status (*bind)(Frame&);   // binds symbols and checks; on failure the message is set
  const char* const* symbols;  // names, for messages
  int32_t num_symbols;
  const WorkspaceDesc* workspaces = nullptr;
  int32_t num_workspaces = 0;
};

struct LaunchDesc {
  const char* symbol;
  bool cooperative;
  bool pdl;  // fit for programmatic dependent launch
  uint32_t cluster[3];
};

// The loaded kernel of a LaunchDesc. One zero-initialised array beside each variant's launches.
struct LaunchState {
  static constexpr int kResidencySlots = 8;
  std::atomic<void*> kernel;                         // CUkernel, once loaded
  std::atomic<uint64_t> ready;                       // bit d: attributes are set on device d
  std::atomic<uint64_t> residency[kResidencySlots];  // cooperative launches: see launcher.cpp
};

struct VariantDesc {
  const char* id;
  int32_t arch;  // index in kArchs
  int32_t key;
  int32_t form;  // index in KernelDesc::forms, 0 if it has none
  int32_t unit;  // index in kBlobs
  const LaunchDesc* launches;
  LaunchState* states;  // as many as launches
  int32_t num_launches;
  const char* (*guard)(const Frame&);      // null: no guards. Returns null if all hold, else the text of one that fails
  tk_status (*launch)(Frame&, Launcher&);  // fills the arguments and calls Launcher::launch for each LaunchDesc
};

struct ParamDesc {
  const char* name;
  bool tensor, written;
  bool nullable;        // some variant takes null
  bool optional;        // missing in some variants, where it must be null
  bool raw;             // taken by element size: any dtype as wide as one of `dtypes`
  const DType* dtypes;  // of a tensor: the union over the variants
  int32_t num_dtypes;
  int32_t rank;       // -1: differs between variants, Signature::bind checks it
  ScalarType scalar;  // of a scalar
};

struct AxisDesc {
  const char* name;
  tk_axis_kind kind;
  int32_t tensor;  // derived axes: index among the tensors; else -1
  int32_t num_values;
  const char* const* labels;
  const int64_t* values;  // numbers, flags (0, 1), item sizes; choices: 0, 1, ...; dtype_of: int64_t(DType)
};

// The variants of one combination of axis values: variants[first .. first + num), sorted by arch, then form.
struct KeyDesc {
  int32_t first;
  int32_t num;        // 0: not built
  int32_t signature;  // index in KernelDesc::signatures
};

struct KernelDesc {
  const char* name;  // "moe.topk_gate"
  // What the key of a call is made of, packed so that a repeated call reads one cache line of the tables: the type of
  // each parameter, `none` for a tensor, and how many axes the caller states.
  const ScalarType* kinds;
  int32_t num_plain_axes;
  const ParamDesc* params;
  int32_t num_params;
  int32_t num_tensors;
  const AxisDesc* axes;  // in declared order, without `form`
  int32_t num_axes;
  const char* const* forms;
  int32_t num_forms;
  const KeyDesc* keys;  // indexed by the mixed-radix number of the axis values, last axis fastest
  int32_t num_keys;
  const VariantDesc* variants;
  int32_t num_variants;
  const Signature* signatures;
};

// The parameter of the index-th tensor. A walk: for messages and descriptions.
inline const ParamDesc& tensor_param(const KernelDesc& kernel, int32_t index) {
  const ParamDesc* param = kernel.params;
  for (int32_t left = index; !param->tensor || left-- > 0;) ++param;
  return *param;
}

struct Blob {
  const char* id;
  const char* arch;
  const unsigned char* data;
  size_t size;
};

struct BuildInfo {
  const char* profile;
  int32_t cuda_version;  // lowest driver version that loads the blobs, as cuDriverGetVersion counts: 13000
};

// Filled by codegen.
extern const KernelDesc* const kKernels[];  // sorted by name
extern const int32_t kNumKernels;
extern const char* const kArchs[];  // sorted; at most kMaxArchs
extern const int32_t kNumArchs;
extern const BuildInfo kBuildInfo;
// Filled by embed.
extern const Blob kBlobs[];
extern const int32_t kNumBlobs;

}  // namespace tk
