// Tables of csrc/src/registry.h written by hand: the kernels of the runtime's own tests, which run against the fake
// driver. They show each thing that generated tables can say once, in the words codegen uses.
//
//   demo.cast       output dtype chosen by the caller, optional scale, one arch-generic form
//   demo.sync       cooperative, its grid is a scalar; a number as axis
//   demo.topk       choice and flag axes, optional tensor, scalars, shared guard, two launches (cluster, PDL)
//   demo.transpose  raw tensors by element size, two forms, a tensor map, element sizes 1 and 8 not built
#include "call.h"
#include "check.h"
#include "launcher.h"
#include "registry.h"
#include "tilekernels/ops.h"

namespace tk {
namespace {

// The fake driver reads a blob as text: a line per kernel, its symbol and the sizes of its parameters in bytes.
constexpr char kBlobSm80[] =
    "fake cubin\n"
    "tk_demo_cast__bf16_e4m3 8 8 8 4 4\n"
    "tk_demo_cast__bf16_e5m2 8 8 8 4 4\n"
    "tk_demo_transpose__b2_general 8 8 4 4 4\n";
constexpr char kBlobSm90a[] =
    "fake cubin\n"
    "tk_demo_sync__n16 8 4\n"
    "tk_demo_sync__n32 8 4\n"
    "tk_demo_topk__softmax_0 8 8 4 4 4\n"
    "tk_demo_topk__softmax_1 8 8 4 8\n"
    "tk_demo_transpose__b2_aligned 8 8 4 4 128\n"
    "tk_demo_transpose__b2_general 8 8 4 4 4\n"
    "tk_demo_transpose__b4_general 8 8 4 4 4\n";
constexpr int kSm80 = 0, kSm90a = 1;

// ---- demo.cast ------------------------------------------------------------------------------------------------------

namespace cast {
enum Tensor { kX, kScale, kOut };
enum Symbol { kRows, kCols };

constexpr DType kXDtypes[] = {DType::bfloat16, DType::float32};
constexpr DType kScaleDtypes[] = {DType::float32};
constexpr DType kOutDtypes[] = {DType::float8_e4m3fn, DType::float8_e5m2};
constexpr ParamDesc kParams[] = {
    {"x", true, false, false, false, false, kXDtypes, 2, 2, ScalarType::none},
    {"scale", true, false, true, false, false, kScaleDtypes, 1, 1, ScalarType::none},
    {"out", true, true, false, false, false, kOutDtypes, 2, 2, ScalarType::none},
};
constexpr const char* kInLabels[] = {"bf16", "fp32"};
constexpr int64_t kInValues[] = {static_cast<int64_t>(DType::bfloat16), static_cast<int64_t>(DType::float32)};
constexpr const char* kFmtLabels[] = {"e4m3", "e5m2"};
constexpr int64_t kFmtValues[] = {static_cast<int64_t>(DType::float8_e4m3fn), static_cast<int64_t>(DType::float8_e5m2)};
constexpr AxisDesc kAxes[] = {
    {"input", TK_AXIS_DTYPE_OF, kX, 2, kInLabels, kInValues},
    {"fmt", TK_AXIS_DTYPE_OF, kOut, 2, kFmtLabels, kFmtValues},
};

// Only e5m2 has rows of a multiple of 4: an absent `out` leaves that open.
tk_status bind(Frame& frame, DType out, int64_t multiple, const char* text) {
  TK_RETURN_IF_ERROR(check_tensor(frame, kX, DType::bfloat16, 2, false, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, kScale, DType::float32, 1, true, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, kOut, out, 2, false, true));
  TK_RETURN_IF_ERROR(bind_dim(frame, kRows, kX, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_dim(frame, kCols, kX, 1, INT32_MAX));
  const int64_t rows = frame.symbols[kRows], cols = frame.symbols[kCols];
  TK_RETURN_IF_ERROR(check_strides(frame, kX, {cols, 1}, "(cols, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, kScale, {rows}, "(rows,)"));
  TK_RETURN_IF_ERROR(check_shape(frame, kOut, {rows, cols}, "(rows, cols)"));
  TK_RETURN_IF_ERROR(check_strides(frame, kOut, {cols, 1}, "(cols, 1)"));
  return check_guard(frame, floormod(cols, multiple) == 0, text);
}
tk_status bind_e4m3(Frame& frame) { return bind(frame, DType::float8_e4m3fn, 1, ""); }
tk_status bind_e5m2(Frame& frame) { return bind(frame, DType::float8_e5m2, 4, "floormod(cols, 4) == 0"); }

constexpr const char* kSymbols[] = {"rows", "cols"};
constexpr Signature kSignatures[] = {{bind_e4m3, kSymbols, 2}, {bind_e5m2, kSymbols, 2}};

tk_status launch(Frame& frame, Launcher& launcher) {
  const Geometry geometry = {{frame.symbols[kRows], 1, 1}, {128, 1, 1}, 0};
  if (is_empty(geometry)) return TK_OK;
  void *x = data_of(frame.tensors[kX]), *scale = data_of(frame.tensors[kScale]), *out = data_of(frame.tensors[kOut]);
  int32_t rows = static_cast<int32_t>(frame.symbols[kRows]), cols = static_cast<int32_t>(frame.symbols[kCols]);
  void* arguments[] = {&out, &x, &scale, &rows, &cols};
  static constexpr ArgumentDesc descs[] = {{kOut, 8}, {kX, 8}, {kScale, 8}, {-1, 4}, {-1, 4}};
  return launcher.launch(frame, 0, geometry, arguments, descs, 5);
}

constexpr LaunchDesc kE4m3[] = {{"tk_demo_cast__bf16_e4m3", false, false, {1, 1, 1}}};
constexpr LaunchDesc kE5m2[] = {{"tk_demo_cast__bf16_e5m2", false, true, {1, 1, 1}}};
LaunchState states[2];
constexpr VariantDesc kVariants[] = {
    {"bf16_e4m3", kSm80, 0, 0, 0, kE4m3, &states[0], 1, nullptr, launch},
    {"bf16_e5m2", kSm80, 1, 0, 0, kE5m2, &states[1], 1, nullptr, launch},
};
constexpr KeyDesc kKeys[] = {{0, 1, 0}, {1, 1, 1}, {0, 0, 0}, {0, 0, 0}};
constexpr ScalarType kKinds[] = {ScalarType::none, ScalarType::none, ScalarType::none};
constexpr KernelDesc kKernel = {"demo.cast", kKinds, 0,     kParams, 3,         3, kAxes,      2,
                                nullptr,     0,      kKeys, 4,       kVariants, 2, kSignatures};
}  // namespace cast

// ---- demo.sync ------------------------------------------------------------------------------------------------------

namespace sync {
enum Symbol { kN };

constexpr DType kDtypes[] = {DType::float32};
constexpr ParamDesc kParams[] = {
    {"workspace", true, true, false, false, false, kDtypes, 1, 1, ScalarType::none},
    {"num_sms", false, false, false, false, false, nullptr, 0, 0, ScalarType::int32},
};
constexpr const char* kLabels[] = {"16", "32"};
constexpr int64_t kValues[] = {16, 32};
constexpr AxisDesc kAxes[] = {{"num_stages", TK_AXIS_NUMBER, -1, 2, kLabels, kValues}};

tk_status bind(Frame& frame) {
  TK_RETURN_IF_ERROR(check_tensor(frame, 0, DType::float32, 1, false, true));
  TK_RETURN_IF_ERROR(bind_dim(frame, kN, 0, 0, INT32_MAX));
  return check_guard(frame, frame.scalars[0].i32 > 0, "num_sms > 0");
}
constexpr const char* kSymbols[] = {"n"};
constexpr Signature kSignatures[] = {{bind, kSymbols, 1}};

tk_status launch(Frame& frame, Launcher& launcher) {
  const Geometry geometry = {{frame.scalars[0].i32, 1, 1}, {256, 1, 1}, frame.symbols[kN] * 4};
  if (is_empty(geometry)) return TK_OK;
  void* workspace = data_of(frame.tensors[0]);
  int32_t n = static_cast<int32_t>(frame.symbols[kN]);
  void* arguments[] = {&workspace, &n};
  static constexpr ArgumentDesc descs[] = {{0, 8}, {-1, 4}};
  return launcher.launch(frame, 0, geometry, arguments, descs, 2);
}

constexpr LaunchDesc kLaunches16[] = {{"tk_demo_sync__n16", true, false, {1, 1, 1}}};
constexpr LaunchDesc kLaunches32[] = {{"tk_demo_sync__n32", true, false, {1, 1, 1}}};
LaunchState states[2];
constexpr VariantDesc kVariants[] = {
    {"n16", kSm90a, 0, 0, 1, kLaunches16, &states[0], 1, nullptr, launch},
    {"n32", kSm90a, 1, 0, 1, kLaunches32, &states[1], 1, nullptr, launch},
};
constexpr KeyDesc kKeys[] = {{0, 1, 0}, {1, 1, 0}};
constexpr ScalarType kKinds[] = {ScalarType::none, ScalarType::int32};
constexpr KernelDesc kKernel = {"demo.sync", kKinds, 1,     kParams, 2,         1, kAxes,      1,
                                nullptr,     0,      kKeys, 2,       kVariants, 2, kSignatures};
}  // namespace sync

// ---- demo.topk ------------------------------------------------------------------------------------------------------

namespace topk {
enum Tensor { kScores, kBias, kOut };
enum Symbol { kTokens, kExperts, kTopk };

constexpr DType kFloat[] = {DType::float32};
constexpr DType kIndex[] = {DType::int64, DType::int32};
constexpr ParamDesc kParams[] = {
    {"scores", true, false, false, false, false, kFloat, 1, 2, ScalarType::none},
    {"bias", true, false, false, true, false, kFloat, 1, 1, ScalarType::none},
    {"scale", false, false, false, false, false, nullptr, 0, 0, ScalarType::float32},
    {"out", true, true, false, false, false, kIndex, 2, 2, ScalarType::none},
};
constexpr const char* kScoringLabels[] = {"softmax", "sigmoid"};
constexpr int64_t kScoringValues[] = {0, 1};
constexpr const char* kFlagLabels[] = {"no_bias", "with_bias"};
constexpr int64_t kFlagValues[] = {0, 1};
constexpr AxisDesc kAxes[] = {
    {"scoring", TK_AXIS_CHOICE, -1, 2, kScoringLabels, kScoringValues},
    {"with_bias", TK_AXIS_FLAG, -1, 2, kFlagLabels, kFlagValues},
};

tk_status bind(Frame& frame) {
  TK_RETURN_IF_ERROR(check_tensor(frame, kScores, DType::float32, 2, false, false));
  TK_RETURN_IF_ERROR(check_absent(frame, kBias));
  TK_RETURN_IF_ERROR(check_tensor(frame, kOut, DType::int64, 2, false, true));
  TK_RETURN_IF_ERROR(bind_dim(frame, kTokens, kScores, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_dim(frame, kExperts, kScores, 1, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_dim(frame, kTopk, kOut, 1, INT32_MAX));
  const int64_t* symbol = frame.symbols;
  TK_RETURN_IF_ERROR(check_strides(frame, kScores, {symbol[kExperts], 1}, "(num_experts, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, kOut, {symbol[kTokens], knows(frame, 1u << kTopk) ? symbol[kTopk] : kAny},
                                 "(num_tokens, num_topk)"));
  TK_RETURN_IF_ERROR(check_guard(frame, symbol[kExperts] >= 8, "num_experts >= 8"));
  return check_guard(frame, !knows(frame, 1u << kTopk) || symbol[kTopk] <= 32, "num_topk <= 32");
}
constexpr const char* kSymbols[] = {"num_tokens", "num_experts", "num_topk"};
constexpr Signature kSignatures[] = {{bind, kSymbols, 3}};

tk_status launch(Frame& frame, Launcher& launcher) {
  void *scores = data_of(frame.tensors[kScores]), *out = data_of(frame.tensors[kOut]);
  int32_t tokens = static_cast<int32_t>(frame.symbols[kTokens]), topk = static_cast<int32_t>(frame.symbols[kTopk]);
  float scale = frame.scalars[0].f32;
  const Geometry first = {{floordiv(tokens + 3, 4) * 2, 1, 1}, {32, 4, 1}, 65536};
  if (!is_empty(first)) {
    void* arguments[] = {&scores, &out, &tokens, &topk, &scale};
    static constexpr ArgumentDesc descs[] = {{kScores, 8}, {kOut, 8}, {-1, 4}, {-1, 4}, {-1, 4}};
    TK_RETURN_IF_ERROR(launcher.launch(frame, 0, first, arguments, descs, 5));
  }
  const Geometry second = {{tokens, topk, 1}, {64, 1, 1}, 0};
  int64_t experts = frame.symbols[kExperts];
  if (is_empty(second)) return TK_OK;
  void* arguments[] = {&scores, &out, &scale, &experts};
  static constexpr ArgumentDesc descs[] = {{kScores, 8}, {kOut, 8}, {-1, 4}, {-1, 8}};
  return launcher.launch(frame, 1, second, arguments, descs, 4);
}

constexpr LaunchDesc kLaunches[] = {
    {"tk_demo_topk__softmax_0", false, false, {2, 1, 1}},
    {"tk_demo_topk__softmax_1", false, true, {1, 1, 1}},
};
LaunchState states[2];
constexpr VariantDesc kVariants[] = {{"softmax_no_bias", kSm90a, 0, 0, 1, kLaunches, states, 2, nullptr, launch}};
constexpr KeyDesc kKeys[] = {{0, 1, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}};
constexpr ScalarType kKinds[] = {ScalarType::none, ScalarType::none, ScalarType::float32, ScalarType::none};
constexpr KernelDesc kKernel = {"demo.topk", kKinds, 2,     kParams, 4,         3, kAxes,      2,
                                nullptr,     0,      kKeys, 4,       kVariants, 1, kSignatures};
}  // namespace topk

// ---- demo.transpose -------------------------------------------------------------------------------------------------

namespace transpose {
enum Tensor { kX, kOut };
enum Symbol { kRows, kCols, kStride };

constexpr DType kCarriers[] = {DType::uint8, DType::uint16, DType::uint32};
constexpr ParamDesc kParams[] = {
    {"x", true, false, false, false, true, kCarriers, 3, 2, ScalarType::none},
    {"out", true, true, false, false, true, kCarriers, 3, 2, ScalarType::none},
};
constexpr const char* kLabels[] = {"1", "2", "4"};
constexpr int64_t kValues[] = {1, 2, 4};
constexpr AxisDesc kAxes[] = {{"itemsize", TK_AXIS_ITEMSIZE_OF, kX, 3, kLabels, kValues}};
constexpr const char* kForms[] = {"aligned", "general"};

tk_status bind(Frame& frame) {
  TK_RETURN_IF_ERROR(check_tensor(frame, kX, DType::none, 2, false, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, kOut, DType::none, 2, false, true));
  TK_RETURN_IF_ERROR(bind_dim(frame, kRows, kX, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_dim(frame, kCols, kX, 1, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_stride(frame, kStride, kX, 0, INT32_MAX));
  const int64_t* symbol = frame.symbols;
  TK_RETURN_IF_ERROR(check_strides(frame, kX, {symbol[kStride], 1}, "(x_stride, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, kOut, {symbol[kCols], symbol[kRows]}, "(num_cols, num_rows)"));
  return check_strides(frame, kOut, {symbol[kRows], 1}, "(num_rows, 1)");
}
constexpr const char* kSymbols[] = {"num_rows", "num_cols", "x_stride"};
constexpr Signature kSignatures[] = {{bind, kSymbols, 3}};

const char* guard_aligned(const Frame& frame) {
  if (!(floormod(frame.symbols[kStride], 8) == 0)) return "floormod(x_stride, 8) == 0";
  if (!aligned(frame.tensors[kX], 16)) return "aligned(x, 16)";
  return nullptr;
}
const char* guard_b4(const Frame& frame) {
  if (!aligned(frame.tensors[kX], 16)) return "aligned(x, 16)";
  if (!(frame.symbols[kRows] + frame.symbols[kCols] < 4096)) return "num_rows + num_cols < 4096";
  return nullptr;
}

constexpr TensorMapDesc kMap = {kX, DType::uint16, 2, {64, 64}, {1, 1}, 0, 3, 2, 0};

Geometry geometry_of(const Frame& frame) {
  const int64_t rows = frame.symbols[kRows], cols = frame.symbols[kCols];
  return {{floordiv(cols + 63, 64), floordiv(rows + 63, 64), 1}, {256, 1, 1}, 8320};
}

tk_status launch_aligned(Frame& frame, Launcher& launcher) {
  const Geometry geometry = geometry_of(frame);
  if (is_empty(geometry)) return TK_OK;
  const int64_t* symbol = frame.symbols;
  const int64_t global_dim[] = {symbol[kCols], symbol[kRows]};
  const int64_t global_stride[] = {symbol[kStride] * 2};
  TensorMap map;
  TK_RETURN_IF_ERROR(launcher.make_map(frame, kMap, global_dim, global_stride, &map));
  void *x = data_of(frame.tensors[kX]), *out = data_of(frame.tensors[kOut]);
  int32_t rows = static_cast<int32_t>(symbol[kRows]), cols = static_cast<int32_t>(symbol[kCols]);
  void* arguments[] = {&out, &x, &rows, &cols, &map};
  return launcher.launch(frame, 0, geometry, arguments);
}

tk_status launch_general(Frame& frame, Launcher& launcher) {
  const Geometry geometry = geometry_of(frame);
  if (is_empty(geometry)) return TK_OK;
  void *x = data_of(frame.tensors[kX]), *out = data_of(frame.tensors[kOut]);
  int32_t rows = static_cast<int32_t>(frame.symbols[kRows]), cols = static_cast<int32_t>(frame.symbols[kCols]);
  int32_t stride = static_cast<int32_t>(frame.symbols[kStride]);
  void* arguments[] = {&out, &x, &rows, &cols, &stride};
  static constexpr ArgumentDesc descs[] = {{kOut, 8}, {kX, 8}, {-1, 4}, {-1, 4}, {-1, 4}};
  return launcher.launch(frame, 0, geometry, arguments, descs, 5);
}

constexpr LaunchDesc kAligned[] = {{"tk_demo_transpose__b2_aligned", false, false, {1, 1, 1}}};
constexpr LaunchDesc kGeneral[] = {{"tk_demo_transpose__b2_general", false, false, {1, 1, 1}}};
constexpr LaunchDesc kGeneral4[] = {{"tk_demo_transpose__b4_general", false, false, {1, 1, 1}}};
LaunchState states[4];
constexpr VariantDesc kVariants[] = {
    {"b2_general", kSm80, 1, 1, 0, kGeneral, &states[0], 1, nullptr, launch_general},
    {"b2_aligned", kSm90a, 1, 0, 1, kAligned, &states[1], 1, guard_aligned, launch_aligned},
    {"b2_general", kSm90a, 1, 1, 1, kGeneral, &states[2], 1, nullptr, launch_general},
    {"b4_general", kSm90a, 2, 1, 1, kGeneral4, &states[3], 1, guard_b4, launch_general},
};
constexpr KeyDesc kKeys[] = {{0, 0, 0}, {0, 3, 0}, {3, 1, 0}};
constexpr ScalarType kKinds[] = {ScalarType::none, ScalarType::none};
constexpr KernelDesc kKernel = {"demo.transpose", kKinds, 0,     kParams, 2,         2, kAxes,      1,
                                kForms,           2,      kKeys, 3,       kVariants, 4, kSignatures};
}  // namespace transpose

}  // namespace

extern const KernelDesc* const kKernels[] = {&cast::kKernel, &sync::kKernel, &topk::kKernel, &transpose::kKernel};
extern const int32_t kNumKernels = 4;
extern const char* const kArchs[] = {"sm_80", "sm_90a"};
extern const int32_t kNumArchs = 2;
extern const BuildInfo kBuildInfo = {"hand", 13000};
extern const Blob kBlobs[] = {
    {"demo-sm_80-0", "sm_80", reinterpret_cast<const unsigned char*>(kBlobSm80), sizeof(kBlobSm80)},
    {"demo-sm_90a-0", "sm_90a", reinterpret_cast<const unsigned char*>(kBlobSm90a), sizeof(kBlobSm90a)},
};
extern const int32_t kNumBlobs = 2;

}  // namespace tk

tk_status tk_demo_topk(const tk_demo_topk_args* given, tk_stream stream) {
  tk_demo_topk_args copy;
  const tk_demo_topk_args* args = tk::read_args(given, &copy);
  if (args == nullptr) return tk::fail_args(tk::topk::kKernel, given != nullptr ? &given->size : nullptr, sizeof(copy));
  const tk_tensor* const tensors[] = {args->scores, args->bias, args->out};
  const tk_scalar scalars[] = {{.f32 = args->scale}};
  const int32_t axes[] = {tk::read_axis(args->scoring), args->with_bias};
  return tk::call(tk::topk::kKernel, tensors, scalars, axes, stream);
}
