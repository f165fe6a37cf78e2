// demo.transpose: made by build_tools/codegen.py, do not edit.
// Write the transpose of x to out.
#include "call.h"
#include "check.h"
#include "launcher.h"
#include "registry.h"
#include "tilekernels/ops.h"

namespace tk {
namespace {

struct Tensor {
  enum : int {x, out};
};
struct Symbol {
  enum : int {num_rows, num_cols, x_stride};
};

// ---- Parameters and axes

constexpr DType kDtypes_x[] = {DType::uint8, DType::uint16};
constexpr DType kDtypes_out[] = {DType::uint8, DType::uint16};
constexpr ParamDesc kParams[] = {
    {"x", true, false, false, false, true, kDtypes_x, 2, 2, ScalarType::none},
    {"out", true, true, false, false, true, kDtypes_out, 2, 2, ScalarType::none},
};
constexpr ScalarType kKinds[] = {ScalarType::none, ScalarType::none};

constexpr const char* kLabels_itemsize[] = {"1", "2"};
constexpr int64_t kValues_itemsize[] = {1, 2};
constexpr AxisDesc kAxes[] = {
    {"itemsize", TK_AXIS_ITEMSIZE_OF, 0, 2, kLabels_itemsize, kValues_itemsize},
};

constexpr const char* kForms[] = {"aligned", "general"};

// ---- What a call must satisfy

tk_status bind0(Frame& frame) {
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::x, DType::none, 2, false, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::out, DType::none, 2, false, true));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::num_rows, Tensor::x, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::num_cols, Tensor::x, 1, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_stride(frame, Symbol::x_stride, Tensor::x, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::x, {frame.symbols[Symbol::x_stride], 1}, "(x_stride, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::out, {frame.symbols[Symbol::num_cols], frame.symbols[Symbol::num_rows]}, "(num_cols, num_rows)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::out, {frame.symbols[Symbol::num_rows], 1}, "(num_rows, 1)"));
  return TK_OK;
}

constexpr const char* kSymbols[] = {"num_rows", "num_cols", "x_stride"};
constexpr Signature kSignatures[] = {
    {bind0, kSymbols, 3},
};

// ---- What single variants need beyond that

const char* guard0(const Frame& frame) {
  if (!(tk::floormod(frame.symbols[Symbol::num_cols], 8) == 0)) return "num_cols % 8 == 0";
  if (!(tk::floormod(frame.symbols[Symbol::num_rows], 8) == 0)) return "num_rows % 8 == 0";
  if (!(tk::floormod(frame.symbols[Symbol::x_stride], 8) == 0)) return "x_stride % 8 == 0";
  if (!(aligned(frame.tensors[Tensor::x], 16))) return "alignment of x to 16 bytes";
  if (!(aligned(frame.tensors[Tensor::out], 16))) return "alignment of out to 16 bytes";
  return nullptr;
}

// ---- Launches

constexpr TensorMapDesc kMap0 = {Tensor::x, DType::uint16, 2, {64, 64}, {1, 1}, 0, 3, 2, 0};

tk_status launch0(Frame& frame, Launcher& launcher) {
  {
    const Geometry geometry{{tk::floordiv(frame.symbols[Symbol::num_cols] + 63, 64), tk::floordiv(frame.symbols[Symbol::num_rows] + 63, 64), 1}, {256, 1, 1}, 8320};
    void* argument0 = data_of(frame.tensors[Tensor::out]);
    void* argument1 = data_of(frame.tensors[Tensor::x]);
    int32_t argument2 = static_cast<int32_t>(frame.symbols[Symbol::num_cols]);
    int32_t argument3 = static_cast<int32_t>(frame.symbols[Symbol::num_rows]);
    int32_t argument4 = static_cast<int32_t>(frame.symbols[Symbol::x_stride]);
    void* arguments[] = {&argument0, &argument1, &argument2, &argument3, &argument4};
    static constexpr ArgumentDesc descs[] = {{Tensor::out, sizeof(void*)}, {Tensor::x, sizeof(void*)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}};
    TK_RETURN_IF_ERROR(launcher.launch(frame, 0, geometry, arguments, descs, 5));
  }
  return TK_OK;
}

tk_status launch1(Frame& frame, Launcher& launcher) {
  {
    const Geometry geometry{{tk::floordiv(frame.symbols[Symbol::num_cols] + 63, 64), tk::floordiv(frame.symbols[Symbol::num_rows] + 63, 64), 1}, {256, 1, 1}, 8320};
    if (!is_empty(geometry)) {
      void* argument0 = data_of(frame.tensors[Tensor::out]);
      TensorMap argument1;
      const int64_t argument1_dim[] = {frame.symbols[Symbol::num_cols], frame.symbols[Symbol::num_rows]};
      const int64_t argument1_stride[] = {frame.symbols[Symbol::x_stride] * 2};
      TK_RETURN_IF_ERROR(launcher.make_map(frame, kMap0, argument1_dim, argument1_stride, &argument1));
      int32_t argument2 = static_cast<int32_t>(frame.symbols[Symbol::num_cols]);
      int32_t argument3 = static_cast<int32_t>(frame.symbols[Symbol::num_rows]);
      void* arguments[] = {&argument0, &argument1, &argument2, &argument3};
      TK_RETURN_IF_ERROR(launcher.launch(frame, 0, geometry, arguments));
    }
  }
  return TK_OK;
}

constexpr LaunchDesc kLaunches0[] = {
    {"tk_demo_transpose__b1_general", false, false, {1, 1, 1}},
};
constexpr LaunchDesc kLaunches1[] = {
    {"tk_demo_transpose__b1_general", false, false, {1, 1, 1}},
};
constexpr LaunchDesc kLaunches2[] = {
    {"tk_demo_transpose__b2_aligned", false, false, {1, 1, 1}},
};
constexpr LaunchDesc kLaunches3[] = {
    {"tk_demo_transpose__b2_general", false, false, {1, 1, 1}},
};
constexpr LaunchDesc kLaunches4[] = {
    {"tk_demo_transpose__b2_aligned", false, false, {1, 1, 1}},
};
constexpr LaunchDesc kLaunches5[] = {
    {"tk_demo_transpose__b2_general", false, false, {1, 1, 1}},
};

LaunchState states0[1];
LaunchState states1[1];
LaunchState states2[1];
LaunchState states3[1];
LaunchState states4[1];
LaunchState states5[1];

// ---- Variants

constexpr VariantDesc kVariants[] = {
    {"b1_general", 0, 0, 1, 3, kLaunches0, states0, 1, nullptr, launch0},
    {"b1_general", 1, 0, 1, 4, kLaunches1, states1, 1, nullptr, launch0},
    {"b2_aligned", 0, 1, 0, 3, kLaunches2, states2, 1, guard0, launch0},
    {"b2_general", 0, 1, 1, 3, kLaunches3, states3, 1, nullptr, launch0},
    {"b2_aligned", 1, 1, 0, 4, kLaunches4, states4, 1, guard0, launch1},
    {"b2_general", 1, 1, 1, 4, kLaunches5, states5, 1, nullptr, launch0},
};

constexpr KeyDesc kKeys[] = {
    {0, 2, 0},
    {2, 4, 0},
};

}  // namespace

extern const KernelDesc k_demo_transpose;
const KernelDesc k_demo_transpose = {
    "demo.transpose",
    kKinds, 0,
    kParams, 2, 2,
    kAxes, 1,
    kForms, 2,
    kKeys, 2,
    kVariants, 6,
    kSignatures,
};

}  // namespace tk

tk_status tk_demo_transpose(const tk_demo_transpose_args* given, tk_stream stream) {
  tk_demo_transpose_args copy;
  const tk_demo_transpose_args* args = tk::read_args(given, &copy);
  if (args == nullptr) return tk::fail_args(tk::k_demo_transpose, given != nullptr ? &given->size : nullptr, sizeof(copy));
  const tk_tensor* const tensors[] = {args->x, args->out};
  return tk::call(tk::k_demo_transpose, tensors, nullptr, nullptr, stream);
}
