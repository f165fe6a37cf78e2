// demo.cast: made by build_tools/codegen.py, do not edit.
// Cast x, plus bias where given, to a narrow format with one scale per group of channels.
#include "call.h"
#include "check.h"
#include "launcher.h"
#include "registry.h"
#include "tilekernels/ops.h"

namespace tk {
namespace {

struct Tensor {
  enum : int {x, bias, row_map, out, out_sf};
};
struct Scalar {
  enum : int {clamp_min};
};
struct Symbol {
  enum : int {num_tokens, hidden, x_stride, out_sf_stride};
};

// ---- Parameters and axes

constexpr DType kDtypes_x[] = {DType::bfloat16};
constexpr DType kDtypes_bias[] = {DType::float32};
constexpr DType kDtypes_row_map[] = {DType::int32};
constexpr DType kDtypes_out[] = {DType::float8_e4m3fn, DType::int8};
constexpr DType kDtypes_out_sf[] = {DType::float32, DType::int32};
constexpr ParamDesc kParams[] = {
    {"x", true, false, false, false, false, kDtypes_x, 1, 2, ScalarType::none},
    {"bias", true, false, true, false, false, kDtypes_bias, 1, 1, ScalarType::none},
    {"row_map", true, false, false, true, false, kDtypes_row_map, 1, 1, ScalarType::none},
    {"clamp_min", false, false, false, false, false, nullptr, 0, 0, ScalarType::float32},
    {"out", true, true, false, false, false, kDtypes_out, 2, 2, ScalarType::none},
    {"out_sf", true, true, false, false, false, kDtypes_out_sf, 2, 2, ScalarType::none},
};
constexpr ScalarType kKinds[] = {ScalarType::none, ScalarType::none, ScalarType::none, ScalarType::float32, ScalarType::none, ScalarType::none};

constexpr const char* kLabels_fmt[] = {"e4m3", "e2m1"};
constexpr int64_t kValues_fmt[] = {static_cast<int64_t>(DType::float8_e4m3fn), static_cast<int64_t>(DType::int8)};
constexpr const char* kLabels_num_per_channels[] = {"32", "128"};
constexpr int64_t kValues_num_per_channels[] = {32, 128};
constexpr const char* kLabels_rounding[] = {"nearest", "up"};
constexpr int64_t kValues_rounding[] = {0, 1};
constexpr const char* kLabels_transposed[] = {"False", "True"};
constexpr int64_t kValues_transposed[] = {0, 1};
constexpr AxisDesc kAxes[] = {
    {"fmt", TK_AXIS_DTYPE_OF, 3, 2, kLabels_fmt, kValues_fmt},
    {"num_per_channels", TK_AXIS_NUMBER, -1, 2, kLabels_num_per_channels, kValues_num_per_channels},
    {"rounding", TK_AXIS_CHOICE, -1, 2, kLabels_rounding, kValues_rounding},
    {"transposed", TK_AXIS_FLAG, -1, 2, kLabels_transposed, kValues_transposed},
};

// ---- What a call must satisfy

tk_status bind0(Frame& frame) {
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::x, DType::bfloat16, 2, false, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::bias, DType::float32, 1, true, false));
  TK_RETURN_IF_ERROR(check_absent(frame, Tensor::row_map));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::out, DType::float8_e4m3fn, 2, false, true));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::out_sf, DType::none, 2, false, true));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::num_tokens, Tensor::x, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::hidden, Tensor::x, 1, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_stride(frame, Symbol::x_stride, Tensor::x, 0, INT64_MAX));
  TK_RETURN_IF_ERROR(bind_stride(frame, Symbol::out_sf_stride, Tensor::out_sf, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::x, {frame.symbols[Symbol::x_stride], 1}, "(x_stride, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::bias, {frame.symbols[Symbol::hidden]}, "(hidden,)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::bias, {1}, "(1,)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::out, {frame.symbols[Symbol::num_tokens], frame.symbols[Symbol::hidden]}, "(num_tokens, hidden)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::out, {frame.symbols[Symbol::hidden], 1}, "(hidden, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::out_sf, {frame.symbols[Symbol::num_tokens], tk::floordiv(frame.symbols[Symbol::hidden] + 31, 32)}, "(num_tokens, (hidden + 31) // 32)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::out_sf, {frame.symbols[Symbol::out_sf_stride], 1}, "(out_sf_stride, 1)"));
  TK_RETURN_IF_ERROR(check_guard(frame, tk::floormod(frame.symbols[Symbol::hidden], 32) == 0, "hidden % 32 == 0"));
  TK_RETURN_IF_ERROR(check_guard(frame, aligned(frame.tensors[Tensor::x], 16), "alignment of x to 16 bytes"));
  return TK_OK;
}

tk_status bind1(Frame& frame) {
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::x, DType::bfloat16, 2, false, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::bias, DType::float32, 1, true, false));
  TK_RETURN_IF_ERROR(check_absent(frame, Tensor::row_map));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::out, DType::float8_e4m3fn, 2, false, true));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::out_sf, DType::none, 2, false, true));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::num_tokens, Tensor::x, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::hidden, Tensor::x, 1, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_stride(frame, Symbol::x_stride, Tensor::x, 0, INT64_MAX));
  TK_RETURN_IF_ERROR(bind_stride(frame, Symbol::out_sf_stride, Tensor::out_sf, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::x, {frame.symbols[Symbol::x_stride], 1}, "(x_stride, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::bias, {frame.symbols[Symbol::hidden]}, "(hidden,)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::bias, {1}, "(1,)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::out, {frame.symbols[Symbol::num_tokens], frame.symbols[Symbol::hidden]}, "(num_tokens, hidden)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::out, {frame.symbols[Symbol::hidden], 1}, "(hidden, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::out_sf, {frame.symbols[Symbol::num_tokens], tk::floordiv(frame.symbols[Symbol::hidden] + 127, 128)}, "(num_tokens, (hidden + 127) // 128)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::out_sf, {frame.symbols[Symbol::out_sf_stride], 1}, "(out_sf_stride, 1)"));
  TK_RETURN_IF_ERROR(check_guard(frame, tk::floormod(frame.symbols[Symbol::hidden], 32) == 0, "hidden % 32 == 0"));
  TK_RETURN_IF_ERROR(check_guard(frame, aligned(frame.tensors[Tensor::x], 16), "alignment of x to 16 bytes"));
  return TK_OK;
}

tk_status bind2(Frame& frame) {
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::x, DType::bfloat16, 2, false, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::bias, DType::float32, 1, true, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::row_map, DType::int32, 1, false, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::out, DType::float8_e4m3fn, 2, false, true));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::out_sf, DType::none, 2, false, true));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::num_tokens, Tensor::x, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::hidden, Tensor::x, 1, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_stride(frame, Symbol::x_stride, Tensor::x, 0, INT64_MAX));
  TK_RETURN_IF_ERROR(bind_stride(frame, Symbol::out_sf_stride, Tensor::out_sf, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::x, {frame.symbols[Symbol::x_stride], 1}, "(x_stride, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::bias, {frame.symbols[Symbol::hidden]}, "(hidden,)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::bias, {1}, "(1,)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::row_map, {frame.symbols[Symbol::num_tokens]}, "(num_tokens,)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::row_map, {1}, "(1,)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::out, {frame.symbols[Symbol::num_tokens], frame.symbols[Symbol::hidden]}, "(num_tokens, hidden)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::out, {frame.symbols[Symbol::hidden], 1}, "(hidden, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::out_sf, {tk::floordiv(frame.symbols[Symbol::hidden] + 127, 128), frame.symbols[Symbol::num_tokens]}, "((hidden + 127) // 128, num_tokens)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::out_sf, {frame.symbols[Symbol::out_sf_stride], 1}, "(out_sf_stride, 1)"));
  TK_RETURN_IF_ERROR(check_guard(frame, tk::floormod(frame.symbols[Symbol::hidden], 32) == 0, "hidden % 32 == 0"));
  TK_RETURN_IF_ERROR(check_guard(frame, aligned(frame.tensors[Tensor::x], 16), "alignment of x to 16 bytes"));
  return TK_OK;
}

tk_status bind3(Frame& frame) {
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::x, DType::bfloat16, 2, false, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::bias, DType::float32, 1, true, false));
  TK_RETURN_IF_ERROR(check_absent(frame, Tensor::row_map));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::out, DType::int8, 2, false, true));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::out_sf, DType::none, 2, false, true));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::num_tokens, Tensor::x, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::hidden, Tensor::x, 1, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_stride(frame, Symbol::x_stride, Tensor::x, 0, INT64_MAX));
  TK_RETURN_IF_ERROR(bind_stride(frame, Symbol::out_sf_stride, Tensor::out_sf, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::x, {frame.symbols[Symbol::x_stride], 1}, "(x_stride, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::bias, {frame.symbols[Symbol::hidden]}, "(hidden,)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::bias, {1}, "(1,)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::out, {frame.symbols[Symbol::num_tokens], tk::floordiv(frame.symbols[Symbol::hidden], 2)}, "(num_tokens, hidden // 2)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::out, {tk::floordiv(frame.symbols[Symbol::hidden], 2), 1}, "(hidden // 2, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::out_sf, {frame.symbols[Symbol::num_tokens], tk::floordiv(frame.symbols[Symbol::hidden] + 31, 32)}, "(num_tokens, (hidden + 31) // 32)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::out_sf, {frame.symbols[Symbol::out_sf_stride], 1}, "(out_sf_stride, 1)"));
  TK_RETURN_IF_ERROR(check_guard(frame, tk::floormod(frame.symbols[Symbol::hidden], 32) == 0, "hidden % 32 == 0"));
  TK_RETURN_IF_ERROR(check_guard(frame, aligned(frame.tensors[Tensor::x], 16), "alignment of x to 16 bytes"));
  return TK_OK;
}

constexpr const char* kSymbols[] = {"num_tokens", "hidden", "x_stride", "out_sf_stride"};
constexpr Signature kSignatures[] = {
    {bind0, kSymbols, 4},
    {bind1, kSymbols, 4},
    {bind2, kSymbols, 4},
    {bind3, kSymbols, 4},
};

// ---- Launches

tk_status launch0(Frame& frame, Launcher& launcher) {
  {
    const Geometry geometry{{frame.symbols[Symbol::num_tokens], tk::floordiv(frame.symbols[Symbol::hidden] + 31, 32), 1}, {128, 1, 1}, 0};
    void* argument0 = data_of(frame.tensors[Tensor::x]);
    void* argument1 = data_of(frame.tensors[Tensor::bias]);
    void* argument2 = data_of(frame.tensors[Tensor::out]);
    void* argument3 = data_of(frame.tensors[Tensor::out_sf]);
    float argument4 = frame.scalars[Scalar::clamp_min].f32;
    int32_t argument5 = static_cast<int32_t>(frame.symbols[Symbol::hidden]);
    int32_t argument6 = static_cast<int32_t>(frame.symbols[Symbol::num_tokens]);
    int32_t argument7 = static_cast<int32_t>(frame.symbols[Symbol::out_sf_stride]);
    bool argument8 = is_dtype(frame.tensors[Tensor::out_sf], DType::int32);
    int64_t argument9 = frame.symbols[Symbol::x_stride];
    void* arguments[] = {&argument0, &argument1, &argument2, &argument3, &argument4, &argument5, &argument6, &argument7, &argument8, &argument9};
    static constexpr ArgumentDesc descs[] = {{Tensor::x, sizeof(void*)}, {Tensor::bias, sizeof(void*)}, {Tensor::out, sizeof(void*)}, {Tensor::out_sf, sizeof(void*)}, {-1, sizeof(float)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}, {-1, sizeof(bool)}, {-1, sizeof(int64_t)}};
    TK_RETURN_IF_ERROR(launcher.launch(frame, 0, geometry, arguments, descs, 10));
  }
  return TK_OK;
}

tk_status launch1(Frame& frame, Launcher& launcher) {
  {
    const Geometry geometry{{frame.symbols[Symbol::num_tokens], tk::floordiv(frame.symbols[Symbol::hidden] + 127, 128), 1}, {128, 1, 1}, 0};
    void* argument0 = data_of(frame.tensors[Tensor::x]);
    void* argument1 = data_of(frame.tensors[Tensor::bias]);
    void* argument2 = data_of(frame.tensors[Tensor::out]);
    void* argument3 = data_of(frame.tensors[Tensor::out_sf]);
    float argument4 = frame.scalars[Scalar::clamp_min].f32;
    int32_t argument5 = static_cast<int32_t>(frame.symbols[Symbol::hidden]);
    int32_t argument6 = static_cast<int32_t>(frame.symbols[Symbol::num_tokens]);
    int32_t argument7 = static_cast<int32_t>(frame.symbols[Symbol::out_sf_stride]);
    bool argument8 = is_dtype(frame.tensors[Tensor::out_sf], DType::int32);
    int64_t argument9 = frame.symbols[Symbol::x_stride];
    void* arguments[] = {&argument0, &argument1, &argument2, &argument3, &argument4, &argument5, &argument6, &argument7, &argument8, &argument9};
    static constexpr ArgumentDesc descs[] = {{Tensor::x, sizeof(void*)}, {Tensor::bias, sizeof(void*)}, {Tensor::out, sizeof(void*)}, {Tensor::out_sf, sizeof(void*)}, {-1, sizeof(float)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}, {-1, sizeof(bool)}, {-1, sizeof(int64_t)}};
    TK_RETURN_IF_ERROR(launcher.launch(frame, 0, geometry, arguments, descs, 10));
  }
  return TK_OK;
}

tk_status launch2(Frame& frame, Launcher& launcher) {
  {
    const Geometry geometry{{frame.symbols[Symbol::num_tokens], tk::floordiv(frame.symbols[Symbol::hidden] + 127, 128), 1}, {128, 1, 1}, tk::max(frame.symbols[Symbol::hidden] * 4, 1024)};
    void* argument0 = data_of(frame.tensors[Tensor::x]);
    void* argument1 = data_of(frame.tensors[Tensor::bias]);
    void* argument2 = data_of(frame.tensors[Tensor::row_map]);
    void* argument3 = data_of(frame.tensors[Tensor::out]);
    void* argument4 = data_of(frame.tensors[Tensor::out_sf]);
    float argument5 = frame.scalars[Scalar::clamp_min].f32;
    int32_t argument6 = static_cast<int32_t>(frame.symbols[Symbol::hidden]);
    int32_t argument7 = static_cast<int32_t>(frame.symbols[Symbol::num_tokens]);
    int32_t argument8 = static_cast<int32_t>(frame.symbols[Symbol::out_sf_stride]);
    bool argument9 = is_dtype(frame.tensors[Tensor::out_sf], DType::int32);
    int64_t argument10 = frame.symbols[Symbol::x_stride];
    void* arguments[] = {&argument0, &argument1, &argument2, &argument3, &argument4, &argument5, &argument6, &argument7, &argument8, &argument9, &argument10};
    static constexpr ArgumentDesc descs[] = {{Tensor::x, sizeof(void*)}, {Tensor::bias, sizeof(void*)}, {Tensor::row_map, sizeof(void*)}, {Tensor::out, sizeof(void*)}, {Tensor::out_sf, sizeof(void*)}, {-1, sizeof(float)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}, {-1, sizeof(bool)}, {-1, sizeof(int64_t)}};
    TK_RETURN_IF_ERROR(launcher.launch(frame, 0, geometry, arguments, descs, 11));
  }
  return TK_OK;
}

constexpr LaunchDesc kLaunches0[] = {
    {"tk_demo_cast__e4m3_npc32_nearest_no_transposed", false, true, {1, 1, 1}},
};
constexpr LaunchDesc kLaunches1[] = {
    {"tk_demo_cast__e4m3_npc128_nearest_no_transposed", false, true, {1, 1, 1}},
};
constexpr LaunchDesc kLaunches2[] = {
    {"tk_demo_cast__e4m3_npc128_up_transposed", false, true, {1, 1, 1}},
};
constexpr LaunchDesc kLaunches3[] = {
    {"tk_demo_cast__e2m1_npc32_nearest_no_transposed", false, true, {1, 1, 1}},
};

LaunchState states0[1];
LaunchState states1[1];
LaunchState states2[1];
LaunchState states3[1];

// ---- Variants

constexpr VariantDesc kVariants[] = {
    {"e4m3_npc32_nearest_no_transposed", 1, 0, 0, 0, kLaunches0, states0, 1, nullptr, launch0},
    {"e4m3_npc128_nearest_no_transposed", 1, 4, 0, 0, kLaunches1, states1, 1, nullptr, launch1},
    {"e4m3_npc128_up_transposed", 1, 7, 0, 0, kLaunches2, states2, 1, nullptr, launch2},
    {"e2m1_npc32_nearest_no_transposed", 1, 8, 0, 0, kLaunches3, states3, 1, nullptr, launch0},
};

constexpr KeyDesc kKeys[] = {
    {0, 1, 0},
    {0, 0, 0},
    {0, 0, 0},
    {0, 0, 0},
    {1, 1, 1},
    {0, 0, 0},
    {0, 0, 0},
    {2, 1, 2},
    {3, 1, 3},
    {0, 0, 0},
    {0, 0, 0},
    {0, 0, 0},
    {0, 0, 0},
    {0, 0, 0},
    {0, 0, 0},
    {0, 0, 0},
};

}  // namespace

extern const KernelDesc k_demo_cast;
const KernelDesc k_demo_cast = {
    "demo.cast",
    kKinds, 3,
    kParams, 6, 5,
    kAxes, 4,
    nullptr, 0,
    kKeys, 16,
    kVariants, 4,
    kSignatures,
};

}  // namespace tk

tk_status tk_demo_cast(const tk_demo_cast_args* given, tk_stream stream) {
  tk_demo_cast_args copy;
  const tk_demo_cast_args* args = tk::read_args(given, &copy);
  if (args == nullptr) return tk::fail_args(tk::k_demo_cast, given != nullptr ? &given->size : nullptr, sizeof(copy));
  const tk_tensor* const tensors[] = {args->x, args->bias, args->row_map, args->out, args->out_sf};
  const tk_scalar scalars[] = {{.f32 = args->clamp_min}};
  const int32_t axes[] = {tk::read_axis(args->num_per_channels), tk::read_axis(args->rounding), tk::read_axis(args->transposed)};
  return tk::call(tk::k_demo_cast, tensors, scalars, axes, stream);
}
