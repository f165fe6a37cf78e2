// demo.rank: made by build_tools/codegen.py, do not edit.
// Write the rank of each token by its largest score.
#include "call.h"
#include "check.h"
#include "launcher.h"
#include "registry.h"
#include "tilekernels/ops.h"

namespace tk {
namespace {

struct Tensor {
  enum : int {scores, workspace, out};
};
struct Scalar {
  enum : int {num_sms};
};
struct Symbol {
  enum : int {num_tokens, num_experts};
};

// ---- Parameters and axes

constexpr DType kDtypes_scores[] = {DType::float32};
constexpr DType kDtypes_workspace[] = {DType::int32};
constexpr DType kDtypes_out[] = {DType::int64};
constexpr ParamDesc kParams[] = {
    {"scores", true, false, false, false, false, kDtypes_scores, 1, 2, ScalarType::none},
    {"num_sms", false, false, false, false, false, nullptr, 0, 0, ScalarType::int32},
    {"workspace", true, true, false, false, false, kDtypes_workspace, 1, 2, ScalarType::none},
    {"out", true, true, false, false, false, kDtypes_out, 1, 1, ScalarType::none},
};
constexpr ScalarType kKinds[] = {ScalarType::none, ScalarType::int32, ScalarType::none, ScalarType::none};

// ---- What a call must satisfy

tk_status bind0(Frame& frame) {
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::scores, DType::float32, 2, false, false));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::workspace, DType::int32, 2, false, true));
  TK_RETURN_IF_ERROR(check_tensor(frame, Tensor::out, DType::int64, 1, false, true));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::num_tokens, Tensor::scores, 0, INT32_MAX));
  TK_RETURN_IF_ERROR(bind_dim(frame, Symbol::num_experts, Tensor::scores, 1, INT32_MAX));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::scores, {frame.symbols[Symbol::num_experts], 1}, "(num_experts, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::workspace, {int64_t{frame.scalars[Scalar::num_sms].i32}, frame.symbols[Symbol::num_experts]}, "(num_sms, num_experts)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::workspace, {frame.symbols[Symbol::num_experts], 1}, "(num_experts, 1)"));
  TK_RETURN_IF_ERROR(check_shape(frame, Tensor::out, {frame.symbols[Symbol::num_tokens]}, "(num_tokens,)"));
  TK_RETURN_IF_ERROR(check_strides(frame, Tensor::out, {1}, "(1,)"));
  TK_RETURN_IF_ERROR(check_guard(frame, frame.symbols[Symbol::num_experts] <= 512, "num_experts <= 512"));
  return TK_OK;
}

constexpr const char* kSymbols[] = {"num_tokens", "num_experts"};

void shape0_0([[maybe_unused]] const Frame& frame, int64_t* shape) {
  shape[0] = int64_t{frame.scalars[Scalar::num_sms].i32};
  shape[1] = frame.symbols[Symbol::num_experts];
}

constexpr WorkspaceDesc kWorkspaces0[] = {
    {Tensor::workspace, DType::int32, 2, -1, 1u << Symbol::num_experts, shape0_0},
};

constexpr Signature kSignatures[] = {
    {bind0, kSymbols, 2, kWorkspaces0, 1},
};

// ---- Launches

tk_status launch0(Frame& frame, Launcher& launcher) {
  {
    const Geometry geometry{{int64_t{frame.scalars[Scalar::num_sms].i32}, 1, 1}, {256, 1, 1}, 0};
    void* argument0 = data_of(frame.tensors[Tensor::scores]);
    void* argument1 = data_of(frame.tensors[Tensor::workspace]);
    int32_t argument2 = static_cast<int32_t>(frame.symbols[Symbol::num_experts]);
    int32_t argument3 = frame.scalars[Scalar::num_sms].i32;
    int32_t argument4 = static_cast<int32_t>(frame.symbols[Symbol::num_tokens]);
    void* arguments[] = {&argument0, &argument1, &argument2, &argument3, &argument4};
    static constexpr ArgumentDesc descs[] = {{Tensor::scores, sizeof(void*)}, {Tensor::workspace, sizeof(void*)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}};
    TK_RETURN_IF_ERROR(launcher.launch(frame, 0, geometry, arguments, descs, 5));
  }
  {
    const Geometry geometry{{tk::floordiv((frame.symbols[Symbol::num_tokens] + int64_t{frame.scalars[Scalar::num_sms].i32}) - 1, int64_t{frame.scalars[Scalar::num_sms].i32}), 1, 1}, {128, 1, 1}, 0};
    void* argument0 = data_of(frame.tensors[Tensor::out]);
    void* argument1 = data_of(frame.tensors[Tensor::workspace]);
    int32_t argument2 = static_cast<int32_t>(frame.symbols[Symbol::num_experts]);
    int32_t argument3 = static_cast<int32_t>(frame.symbols[Symbol::num_tokens]);
    void* arguments[] = {&argument0, &argument1, &argument2, &argument3};
    static constexpr ArgumentDesc descs[] = {{Tensor::out, sizeof(void*)}, {Tensor::workspace, sizeof(void*)}, {-1, sizeof(int32_t)}, {-1, sizeof(int32_t)}};
    TK_RETURN_IF_ERROR(launcher.launch(frame, 1, geometry, arguments, descs, 4));
  }
  return TK_OK;
}

constexpr LaunchDesc kLaunches0[] = {
    {"tk_demo_rank__only_0", true, false, {1, 1, 1}},
    {"tk_demo_rank__only_1", false, false, {1, 1, 1}},
};
constexpr LaunchDesc kLaunches1[] = {
    {"tk_demo_rank__only_0", true, false, {1, 1, 1}},
    {"tk_demo_rank__only_1", false, false, {2, 1, 1}},
};

LaunchState states0[2];
LaunchState states1[2];

// ---- Variants

constexpr VariantDesc kVariants[] = {
    {"only", 0, 0, 0, 1, kLaunches0, states0, 2, nullptr, launch0},
    {"only", 1, 0, 0, 2, kLaunches1, states1, 2, nullptr, launch0},
};

constexpr KeyDesc kKeys[] = {
    {0, 2, 0},
};

}  // namespace

extern const KernelDesc k_demo_rank;
const KernelDesc k_demo_rank = {
    "demo.rank",
    kKinds, 0,
    kParams, 4, 3,
    nullptr, 0,
    nullptr, 0,
    kKeys, 1,
    kVariants, 2,
    kSignatures,
};

}  // namespace tk

tk_status tk_demo_rank(const tk_demo_rank_args* given, tk_stream stream) {
  tk_demo_rank_args copy;
  const tk_demo_rank_args* args = tk::read_args(given, &copy);
  if (args == nullptr) return tk::fail_args(tk::k_demo_rank, given != nullptr ? &given->size : nullptr, sizeof(copy));
  const tk_tensor* const tensors[] = {args->scores, args->workspace, args->out};
  const tk_scalar scalars[] = {{.i32 = args->num_sms}};
  return tk::call(tk::k_demo_rank, tensors, scalars, nullptr, stream);
}

tk_status tk_demo_rank_workspace_size(const tk_demo_rank_args* given, int32_t num_sms, tk_workspace_info* info) {
  tk_demo_rank_args copy;
  const tk_demo_rank_args* args = tk::read_args(given, &copy);
  if (args == nullptr) return tk::fail_args(tk::k_demo_rank, given != nullptr ? &given->size : nullptr, sizeof(copy));
  const tk_tensor* const tensors[] = {args->scores, args->workspace, args->out};
  const tk_scalar scalars[] = {{.i32 = args->num_sms}};
  return tk::workspace_size(tk::k_demo_rank, tk::Tensor::workspace, tensors, scalars, nullptr, num_sms, info);
}
