// The C interface for C++17 programs: tensor views that own their shape, argument structs, failures as exceptions or as
// statuses. All of it is inline and lives on the caller's side; nothing of C++ crosses the library. Nothing allocates
// but a failure's message.
//
//   using tilekernels::Tensor;
//   const auto scores = Tensor::dense(pointer, tilekernels::kFloat32, {num_tokens, num_experts});
//   auto args = tilekernels::make_args<tk_moe_topk_gate_args>();
//   args.scores = scores;
//   tilekernels::check(tk_moe_topk_gate(&args, stream));                                       // throws Error, or
//   if (tilekernels::Status status = tk_moe_topk_gate(&args, stream); !status) log(status.message());
//
// quant.hpp adds formats and scale layouts, torch.hpp views of at::Tensor; neither is included here. Compiled without
// exceptions, what would throw is not there (check, Error), and a wrong shape of a Tensor ends the program.
#ifndef TILEKERNELS_TILEKERNELS_HPP_
#define TILEKERNELS_TILEKERNELS_HPP_

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "tilekernels/tilekernels.h"

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS)
#define TILEKERNELS_EXCEPTIONS 1
#else
#define TILEKERNELS_EXCEPTIONS 0
#endif

namespace tilekernels {

// ---- Failures ------------------------------------------------------------------------------------------------------

// What a call returned, with the library's sentence where it failed. Made from the tk_status of any call.
class [[nodiscard]] Status {
 public:
  Status(tk_status code) : code_(code) {  // NOLINT: implicit, so that `Status status = tk_...()` reads well
    if (code != TK_OK) message_ = tk_last_error();
  }
  explicit operator bool() const { return code_ == TK_OK; }
  tk_status code() const { return code_; }
  const char* name() const { return tk_status_name(code_); }
  const std::string& message() const { return message_; }

 private:
  tk_status code_;
  std::string message_;
};

#if TILEKERNELS_EXCEPTIONS
// A failure with the library's sentence as what().
class Error : public std::runtime_error {
 public:
  explicit Error(tk_status status) : std::runtime_error(tk_last_error()), status_(status) {}
  tk_status status() const { return status_; }

 private:
  tk_status status_;
};

// Throws Error unless the call went well.
inline void check(tk_status status) {
  if (status != TK_OK) throw Error(status);
}
#endif

// A mistake of the program that the library cannot see.
[[noreturn]] inline void refuse(const std::string& sentence) {
#if TILEKERNELS_EXCEPTIONS
  throw std::invalid_argument(sentence);
#else
  std::fprintf(stderr, "%s\n", sentence.c_str());
  std::abort();
#endif
}

// ---- Tensors -------------------------------------------------------------------------------------------------------

inline constexpr tk_dtype kBool = {TK_BOOL, 8, 1};
inline constexpr tk_dtype kInt8 = {TK_INT, 8, 1};
inline constexpr tk_dtype kInt16 = {TK_INT, 16, 1};
inline constexpr tk_dtype kInt32 = {TK_INT, 32, 1};
inline constexpr tk_dtype kInt64 = {TK_INT, 64, 1};
inline constexpr tk_dtype kUint8 = {TK_UINT, 8, 1};
inline constexpr tk_dtype kUint16 = {TK_UINT, 16, 1};
inline constexpr tk_dtype kUint32 = {TK_UINT, 32, 1};
inline constexpr tk_dtype kFloat16 = {TK_FLOAT, 16, 1};
inline constexpr tk_dtype kBfloat16 = {TK_BFLOAT, 16, 1};
inline constexpr tk_dtype kFloat32 = {TK_FLOAT, 32, 1};
inline constexpr tk_dtype kFloat64 = {TK_FLOAT, 64, 1};
inline constexpr tk_dtype kFloat8E4m3fn = {TK_FLOAT8_E4M3FN, 8, 1};
inline constexpr tk_dtype kFloat8E5m2 = {TK_FLOAT8_E5M2, 8, 1};
inline constexpr tk_dtype kFloat8E8m0fnu = {TK_FLOAT8_E8M0FNU, 8, 1};
inline constexpr tk_dtype kFloat4E2m1fnX2 = {TK_FLOAT4_E2M1FN, 4, 2};

// Bytes of one element; of one pair for formats that are stored in pairs.
constexpr int64_t size_of(tk_dtype dtype) { return (int64_t{dtype.bits} * dtype.lanes + 7) / 8; }

constexpr int32_t kMaxDims = 8;  // of the tensors that the library takes

// Up to kMaxDims numbers: the sizes or strides of a tensor, outermost first.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<int64_t> values) : Dims(values.begin(), values.size()) {}
  Dims(const std::vector<int64_t>& values) : Dims(values.data(), values.size()) {}  // NOLINT: implicit
  Dims(const int64_t* values, size_t count) : count_(static_cast<int32_t>(count)) {
    if (count > kMaxDims) {
      refuse("tilekernels::Dims: must be at most " + std::to_string(kMaxDims) + " numbers, got " +
             std::to_string(count));
    }
    for (int32_t i = 0; i < count_; ++i) values_[i] = values[i];
  }
  // Strides of a tensor of this shape without gaps.
  Dims dense_strides() const {
    Dims strides = *this;
    int64_t stride = 1;
    for (int32_t i = count_; i-- > 0;) {
      strides.values_[i] = stride;
      stride *= values_[i];
    }
    return strides;
  }
  int32_t size() const { return count_; }
  const int64_t* data() const { return values_; }
  const int64_t* begin() const { return values_; }
  const int64_t* end() const { return values_ + count_; }
  int64_t operator[](int32_t index) const { return values_[index]; }

 private:
  int32_t count_ = 0;
  int64_t values_[kMaxDims] = {};
};

// A view of memory that somebody else owns, with its own shape and strides (in elements). Copying copies the view. Goes
// wherever the C functions take a const tk_tensor*, and is needed until the call returns, no longer.
class Tensor {
 public:
  Tensor(const void* data, tk_dtype dtype, const Dims& shape, const Dims& strides, tk_device device = {TK_CUDA, 0})
      : shape_(shape), strides_(strides) {
    if (shape.size() != strides.size()) {
      refuse("tilekernels::Tensor: strides must have " + std::to_string(shape.size()) +
             " elements, one per dimension, got " + std::to_string(strides.size()));
    }
    // Outputs and inputs share one type; only the kernel knows which it writes.
    view_.data = const_cast<void*>(data);
    view_.device = device;
    view_.ndim = shape.size();
    view_.dtype = dtype;
    point_to_own();
  }

  // Without gaps.
  static Tensor dense(const void* data, tk_dtype dtype, const Dims& shape, tk_device device = {TK_CUDA, 0}) {
    return Tensor(data, dtype, shape, shape.dense_strides(), device);
  }

  // From a DLTensor of any dlpack.h. (The C functions take a DLTensor* too, cast to const tk_tensor*.)
  template <typename DLTensor>
  static Tensor from_dlpack(const DLTensor& tensor) {
    static_assert(sizeof(DLTensor) == sizeof(tk_tensor), "the layout of DLTensor is that of tk_tensor");
    const Dims shape(tensor.shape, static_cast<size_t>(tensor.ndim));
    const tk_dtype dtype = {tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes};
    const tk_device device = {static_cast<int32_t>(tensor.device.device_type), tensor.device.device_id};
    const Dims strides = tensor.strides == nullptr ? shape.dense_strides() : Dims(tensor.strides, shape.size());
    Tensor view(tensor.data, dtype, shape, strides, device);
    view.view_.byte_offset = tensor.byte_offset;
    return view;
  }

  Tensor(const Tensor& other) : shape_(other.shape_), strides_(other.strides_), view_(other.view_) { point_to_own(); }
  Tensor& operator=(const Tensor& other) {
    shape_ = other.shape_;
    strides_ = other.strides_;
    view_ = other.view_;
    point_to_own();
    return *this;
  }

  // What the C functions take; valid as long as this tensor, so not of a temporary.
  const tk_tensor& view() const& { return view_; }
  const tk_tensor& view() const&& = delete;
  operator const tk_tensor*() const& { return &view_; }  // NOLINT: implicit, for the fields of argument structs
  operator const tk_tensor*() const&& = delete;

  const Dims& shape() const { return shape_; }
  const Dims& strides() const { return strides_; }
  void* data() const { return view_.data; }
  tk_dtype dtype() const { return view_.dtype; }

 private:
  void point_to_own() {
    view_.shape = shape_.data();
    view_.strides = strides_.data();
  }

  Dims shape_, strides_;
  tk_tensor view_ = {};
};

// ---- Calls ---------------------------------------------------------------------------------------------------------

// An argument struct of ops.h, or an info struct of tilekernels.h: zero but for its size.
template <typename Args>
Args make_args() {
  Args args = {};
  args.size = sizeof(Args);
  return args;
}

// The tensor that tk_workspace_size asks for; `data` has at least info.num_bytes.
inline Tensor make_workspace(const void* data, const tk_workspace_info& info, tk_device device = {TK_CUDA, 0}) {
  return Tensor::dense(data, info.dtype, Dims(info.shape, static_cast<size_t>(info.ndim)), device);
}

// Makes the primary context of a device (the one of cudart) current for a scope.
class DeviceScope {
 public:
  DeviceScope(int32_t device, tk_status* status) { *status = tk_enter_device(device, &previous_); }
#if TILEKERNELS_EXCEPTIONS
  explicit DeviceScope(int32_t device) { check(tk_enter_device(device, &previous_)); }
#endif
  ~DeviceScope() { tk_leave_device(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  void* previous_ = nullptr;
};

// Launches the calls of this thread dependently, or not, for a scope.
class PdlScope {
 public:
  explicit PdlScope(bool enabled) : previous_(tk_set_thread_pdl(enabled ? TK_PDL_ON : TK_PDL_OFF)) {}
  ~PdlScope() { tk_set_thread_pdl(previous_); }
  PdlScope(const PdlScope&) = delete;
  PdlScope& operator=(const PdlScope&) = delete;

 private:
  tk_pdl_mode previous_;
};

// ---- What the library holds ----------------------------------------------------------------------------------------

// Whether a kernel such as "moe.topk_gate" is in the library at all, or for an arch such as "sm_90a".
inline bool covers(const char* name, const char* arch = nullptr) {
  const tk_kernel* kernel = nullptr;
  return tk_find(name, &kernel) == TK_OK && tk_covers(kernel, nullptr, arch) != 0;
}

// Every variant of a kernel; none if the library does not have it.
inline std::vector<tk_variant_info> variants(const char* name) {
  const tk_kernel* kernel = nullptr;
  auto described = make_args<tk_kernel_info>();
  if (tk_find(name, &kernel) != TK_OK || tk_describe_kernel(kernel, &described) != TK_OK) return {};
  std::vector<tk_variant_info> found(static_cast<size_t>(described.num_variants), make_args<tk_variant_info>());
  for (int32_t i = 0; i < described.num_variants; ++i) tk_describe_variant(kernel, i, &found[static_cast<size_t>(i)]);
  return found;
}

}  // namespace tilekernels

#endif  // TILEKERNELS_TILEKERNELS_HPP_
