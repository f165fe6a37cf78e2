// Helpers of generated code: binding symbols, checks with one wording, and the functions of the expression language.
// The test is inline; the message is made out of line, where speed does not matter.
#pragma once

#include <cstring>

#include "registry.h"

namespace tk {

#define TK_RETURN_IF_ERROR(expression)                \
  do {                                                \
    const tk_status tk_status_of_call = (expression); \
    if (tk_status_of_call != TK_OK) [[unlikely]]      \
      return tk_status_of_call;                       \
  } while (0)

// ---- Expression language. All arithmetic is int64; division rounds down. -------------------------------------------

// A quotient by zero is 0: a divisor may be a scalar of the caller, who must get a message and not a SIGFPE.
constexpr int64_t floordiv(int64_t a, int64_t b) {
  return b == 0 ? 0 : a / b - ((a % b != 0) && ((a % b < 0) != (b < 0)));
}
constexpr int64_t floormod(int64_t a, int64_t b) { return a - floordiv(a, b) * b; }
constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t select(bool condition, int64_t a, int64_t b) { return condition ? a : b; }
constexpr bool and_(bool a, bool b) { return a && b; }
constexpr bool or_(bool a, bool b) { return a || b; }
constexpr bool not_(bool a) { return !a; }
constexpr int64_t shl(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) << b); }
constexpr int64_t shr(int64_t a, int64_t b) { return a >> b; }

constexpr DType dtype_of(const tk_tensor& tensor) {
  return static_cast<DType>(pack_dtype(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes));
}
constexpr int64_t itemsize_of(DType dtype) {
  const uint32_t word = static_cast<uint32_t>(dtype);
  return ((word >> 8 & 0xFF) * (word >> 16) + 7) / 8;
}

// First element, or null for an absent tensor: what a kernel gets as its argument.
inline void* data_of(const tk_tensor* tensor) {
  if (tensor == nullptr || tensor->data == nullptr) return nullptr;
  return static_cast<unsigned char*>(tensor->data) + tensor->byte_offset;
}
// An absent tensor is aligned: nothing is read there.
inline bool aligned(const tk_tensor* tensor, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data_of(tensor)) % static_cast<uintptr_t>(bytes) == 0;
}
constexpr bool is_null(const tk_tensor* tensor) { return tensor == nullptr; }
constexpr bool is_dtype(const tk_tensor* tensor, DType dtype) {
  return tensor != nullptr && dtype_of(*tensor) == dtype;
}

// ---- Shapes and strides --------------------------------------------------------------------------------------------

// No size or stride reaches it, so that sums of products of them stay within int64.
constexpr int64_t kMaxExtent = (int64_t{1} << 48) - 1;

constexpr int64_t kAny = INT64_MIN;  // expected value that a check passes over: it depends on a tensor that is absent

constexpr int64_t dense_stride(const tk_tensor& tensor, int axis) {
  uint64_t stride = 1;  // sizes that nobody has checked yet may overflow
  for (int i = axis + 1; i < tensor.ndim; ++i) stride *= static_cast<uint64_t>(tensor.shape[i]);
  return static_cast<int64_t>(stride);
}
constexpr int64_t stride_of(const tk_tensor& tensor, int axis) {
  return tensor.strides != nullptr ? tensor.strides[axis] : dense_stride(tensor, axis);
}
constexpr bool has_elements(const tk_tensor& tensor) {
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return false;
  }
  return true;
}
// More elements than any memory has: products of its sizes could leave int64.
constexpr bool has_too_many_elements(const tk_tensor& tensor) {
  int64_t left = kMaxExtent;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] <= 0) return false;
    left /= tensor.shape[i];
  }
  return left == 0;
}
// The stride of a dimension of at most one element is never used, and callers leave anything there.
constexpr bool stride_matters(const tk_tensor& tensor, int axis) {
  return tensor.shape[axis] > 1 && has_elements(tensor);
}

// For guards of a single form. An absent tensor fits.
constexpr bool shape_is(const tk_tensor* tensor, int axis, int64_t expected) {
  return tensor == nullptr || tensor->shape[axis] == expected;
}
constexpr bool stride_is(const tk_tensor* tensor, int axis, int64_t expected) {
  return tensor == nullptr || !stride_matters(*tensor, axis) || stride_of(*tensor, axis) == expected;
}

// ---- Failures: set the message and return the status ---------------------------------------------------------------

[[gnu::cold]] tk_status fail_present(const Frame& frame, int tensor);  // "x_sf must be None in this configuration"
[[gnu::cold]] tk_status fail_absent(const Frame& frame, int tensor);   // "x must be given, got None"
[[gnu::cold]] tk_status fail_dtype(const Frame& frame, int tensor, const DType* allowed, int32_t num_allowed);
[[gnu::cold]] tk_status fail_rank(const Frame& frame, int tensor, int rank);
[[gnu::cold]] tk_status fail_shape(const Frame& frame, int tensor, const int64_t* expected, int rank, const char* text);
[[gnu::cold]] tk_status fail_strides(const Frame& frame, int tensor, const int64_t* expected, int rank,
                                     const char* text);
[[gnu::cold]] tk_status fail_range(const Frame& frame, int tensor, int axis, bool stride, int64_t value, int64_t limit);
[[gnu::cold]] tk_status fail_too_many_elements(const Frame& frame, int tensor);
[[gnu::cold]] tk_status fail_guard(const Frame& frame, const char* text);

// ---- What Signature::bind is made of -------------------------------------------------------------------------------
// Order: check_tensor or check_absent for each tensor; then bind_dim and bind_stride; then check_shape and
// check_strides, whose expected values are expressions over frame.symbols, kAny unless knows(frame, mask of the
// symbols in it); then check_guard. All of them pass over absent tensors.

constexpr bool knows(const Frame& frame, uint32_t mask) { return (frame.bound & mask) == mask; }

// Presence, dtype and rank. DType::none: the dtype was settled by ParamDesc (raw tensors, tensors with `accepts`).
inline tk_status check_tensor(const Frame& frame, int tensor, DType dtype, int rank, bool nullable, bool written) {
  const tk_tensor* view = frame.tensors[tensor];
  if (view == nullptr) {
    if (nullable || (written && frame.check_only)) return TK_OK;
    return fail_absent(frame, tensor);
  }
  if (dtype != DType::none && dtype_of(*view) != dtype) [[unlikely]]
    return fail_dtype(frame, tensor, &dtype, 1);
  if (view->ndim != rank) [[unlikely]]
    return fail_rank(frame, tensor, rank);
  return TK_OK;
}

inline tk_status check_absent(const Frame& frame, int tensor) {
  return frame.tensors[tensor] == nullptr ? TK_OK : fail_present(frame, tensor);
}

inline tk_status bind_value(Frame& frame, int symbol, int tensor, int axis, bool stride, int64_t value, int64_t limit) {
  if (static_cast<uint64_t>(value) > static_cast<uint64_t>(min(limit, kMaxExtent))) [[unlikely]]
    return fail_range(frame, tensor, axis, stride, value, min(limit, kMaxExtent));
  frame.symbols[symbol] = value;
  frame.bound |= 1u << symbol;
  return TK_OK;
}

// Binds a symbol to shape[axis], unless another tensor has bound it: check_shape then compares. `limit` is the largest
// value of the symbol's type. A symbol whose tensors are all absent stays unknown and 0: guards on it are passed over.
inline tk_status bind_dim(Frame& frame, int symbol, int tensor, int axis, int64_t limit = INT64_MAX) {
  const tk_tensor* view = frame.tensors[tensor];
  if (view == nullptr || knows(frame, 1u << symbol)) return TK_OK;
  return bind_value(frame, symbol, tensor, axis, false, view->shape[axis], limit);
}

// The same for strides[axis]; where the stride does not matter, the dense one is taken, so that guards on it hold.
inline tk_status bind_stride(Frame& frame, int symbol, int tensor, int axis, int64_t limit = INT64_MAX) {
  const tk_tensor* view = frame.tensors[tensor];
  if (view == nullptr || knows(frame, 1u << symbol)) return TK_OK;
  const int64_t stride = stride_matters(*view, axis) ? stride_of(*view, axis) : dense_stride(*view, axis);
  return bind_value(frame, symbol, tensor, axis, true, stride, limit);
}

// text: the shape in symbols, "(num_tokens, num_topk)".
template <int Rank>
inline tk_status check_shape(const Frame& frame, int tensor, const int64_t (&expected)[Rank], const char* text) {
  const tk_tensor* view = frame.tensors[tensor];
  if (view == nullptr) return TK_OK;
  for (int i = 0; i < Rank; ++i) {
    if (view->shape[i] != expected[i] && expected[i] != kAny) [[unlikely]] {
      return fail_shape(frame, tensor, expected, Rank, text);
    }
  }
  return TK_OK;
}

template <int Rank>
inline tk_status check_strides(const Frame& frame, int tensor, const int64_t (&expected)[Rank], const char* text) {
  const tk_tensor* view = frame.tensors[tensor];
  if (view == nullptr) return TK_OK;
  for (int i = 0; i < Rank; ++i) {
    if (expected[i] != kAny && stride_of(*view, i) != expected[i] && stride_matters(*view, i)) [[unlikely]] {
      return fail_strides(frame, tensor, expected, Rank, text);
    }
  }
  return TK_OK;
}

inline tk_status check_guard(const Frame& frame, bool holds, const char* text) {
  return holds ? TK_OK : fail_guard(frame, text);
}

// ---- What typed C entries are made of ------------------------------------------------------------------------------

// An axis of an argument struct, which may be a number that its enum does not have: reading that as the enum would be
// undefined.
template <typename Axis>
inline int32_t read_axis(const Axis& axis) {
  static_assert(sizeof(Axis) == sizeof(int32_t));
  int32_t value;
  std::memcpy(&value, &axis, sizeof(value));
  return value;
}

// Larger than any argument struct: what was never set is mostly larger.
constexpr size_t kMaxArgsBytes = 8192;

// Whether a caller's struct may be read, and holds nothing that this library does not know: a header that is newer may
// have more fields, as long as they are zero.
[[gnu::cold]] bool is_known_size(const void* given, size_t size, size_t known);

// The arguments of a typed entry: the caller's, or a copy of the part that its `size` field says it has, with zeros for
// the fields it does not know. Null: see fail_args.
template <typename Args>
inline const Args* read_args(const Args* given, Args* copy) {
  if (given == nullptr) [[unlikely]]
    return nullptr;
  if (given->size == sizeof(Args)) [[likely]]
    return given;
  if (!is_known_size(given, given->size, sizeof(Args))) return nullptr;
  if (given->size > sizeof(Args)) return given;
  std::memset(copy, 0, sizeof(Args));
  std::memcpy(copy, given, given->size);
  return copy;
}

}  // namespace tk
