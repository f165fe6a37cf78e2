// The C interface for C++17 programs: tensors that own their shape, failures as exceptions. All of it is inline and
// lives on the caller's side; nothing of C++ crosses the library.
//
//   using tilekernels::Tensor;
//   Tensor scores = Tensor::dense(pointer, tilekernels::kFloat32, {num_tokens, num_experts});
//   tk_moe_topk_gate_args args = {};
//   args.size = sizeof(args);
//   args.scores = &scores.view();
//   tilekernels::check(tk_moe_topk_gate(&args, stream));
#ifndef TILEKERNELS_TILEKERNELS_HPP_
#define TILEKERNELS_TILEKERNELS_HPP_

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tilekernels/tilekernels.h"

namespace tilekernels {

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

inline constexpr tk_dtype kBool = {TK_BOOL, 8, 1};
inline constexpr tk_dtype kInt8 = {TK_INT, 8, 1};
inline constexpr tk_dtype kInt32 = {TK_INT, 32, 1};
inline constexpr tk_dtype kInt64 = {TK_INT, 64, 1};
inline constexpr tk_dtype kUint8 = {TK_UINT, 8, 1};
inline constexpr tk_dtype kFloat16 = {TK_FLOAT, 16, 1};
inline constexpr tk_dtype kBfloat16 = {TK_BFLOAT, 16, 1};
inline constexpr tk_dtype kFloat32 = {TK_FLOAT, 32, 1};
inline constexpr tk_dtype kFloat64 = {TK_FLOAT, 64, 1};
inline constexpr tk_dtype kFloat8E4m3fn = {TK_FLOAT8_E4M3FN, 8, 1};
inline constexpr tk_dtype kFloat8E5m2 = {TK_FLOAT8_E5M2, 8, 1};
inline constexpr tk_dtype kFloat8E8m0fnu = {TK_FLOAT8_E8M0FNU, 8, 1};

// A view of memory that somebody else owns, with its own shape and strides. Copying copies the view.
class Tensor {
 public:
  // Strides in elements. Throws std::invalid_argument if their number is not that of the dimensions.
  Tensor(const void* data, tk_dtype dtype, std::vector<int64_t> shape, std::vector<int64_t> strides,
         tk_device device = {TK_CUDA, 0})
      : shape_(std::move(shape)), strides_(std::move(strides)) {
    if (shape_.size() != strides_.size()) {
      throw std::invalid_argument("tilekernels::Tensor: strides must have " + std::to_string(shape_.size()) +
                                  " elements, one per dimension, got " + std::to_string(strides_.size()));
    }
    // Outputs and inputs share one type; only the kernel knows which it writes.
    view_.data = const_cast<void*>(data);
    view_.device = device;
    view_.ndim = static_cast<int32_t>(shape_.size());
    view_.dtype = dtype;
    point_to_own();
  }

  static Tensor dense(const void* data, tk_dtype dtype, std::vector<int64_t> shape, tk_device device = {TK_CUDA, 0}) {
    std::vector<int64_t> strides(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      strides[i] = stride;
      stride *= shape[i];
    }
    return Tensor(data, dtype, std::move(shape), std::move(strides), device);
  }

  Tensor(const Tensor& other) : shape_(other.shape_), strides_(other.strides_), view_(other.view_) { point_to_own(); }
  Tensor& operator=(const Tensor& other) {
    shape_ = other.shape_;
    strides_ = other.strides_;
    view_ = other.view_;
    point_to_own();
    return *this;
  }

  // What the C functions take; valid as long as this tensor.
  const tk_tensor& view() const { return view_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<int64_t>& strides() const { return strides_; }

 private:
  void point_to_own() {
    view_.shape = shape_.data();
    view_.strides = strides_.data();
  }

  std::vector<int64_t> shape_, strides_;
  tk_tensor view_ = {};
};

// Makes the primary context of a device (the one of cudart) current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device) { check(tk_enter_device(device, &previous_)); }
  ~DeviceScope() { tk_leave_device(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  void* previous_ = nullptr;
};

}  // namespace tilekernels

#endif  // TILEKERNELS_TILEKERNELS_HPP_
