// Formats and scale layouts of the quant operators as enums, and the tensors that they make of plain memory (C++17).
//
//   const auto data = tilekernels::make_data(data_pointer, Format::e4m3, num_tokens, hidden);
//   const auto sf = tilekernels::make_scales(sf_pointer, ScaleType::packed, ScaleOrder::col_major, num_tokens,
//   num_groups);
#ifndef TILEKERNELS_QUANT_HPP_
#define TILEKERNELS_QUANT_HPP_

#include "tilekernels/tilekernels.hpp"

namespace tilekernels {

enum class Format {
  e4m3,  // one byte a value
  e2m1,  // two values in an int8, the lower four bits first
  e5m6   // twelve bits a value, in uint8
};

enum class ScaleType {
  float32,
  packed,  // powers of two: four neighbouring exponents (UE8M0) in an int32
  e4m3     // float8_e4m3fn
};

enum class ScaleOrder {
  row_major,
  col_major  // column after column, each starting on kScaleAlignment bytes, as tensor maps want it
};

constexpr int64_t kScaleAlignment = 16;

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

constexpr tk_dtype dtype_of(Format format) {
  return format == Format::e4m3 ? kFloat8E4m3fn : format == Format::e2m1 ? kInt8 : kUint8;
}
constexpr tk_dtype dtype_of(ScaleType type) {
  return type == ScaleType::float32 ? kFloat32 : type == ScaleType::packed ? kInt32 : kFloat8E4m3fn;
}

// Bytes of a row of `hidden` values.
constexpr int64_t row_bytes(Format format, int64_t hidden) {
  return format == Format::e4m3 ? hidden : format == Format::e2m1 ? hidden / 2 : hidden * 12 / 8;
}

// Quantised values of a (num_tokens, hidden) matrix, dense; needs num_tokens * row_bytes(format, hidden) bytes.
inline Tensor make_data(const void* data, Format format, int64_t num_tokens, int64_t hidden,
                        tk_device device = {TK_CUDA, 0}) {
  return Tensor::dense(data, dtype_of(format), {num_tokens, row_bytes(format, hidden)}, device);
}

// Where the scales of num_rows by num_groups groups lie; groups are counted as scales, also where four share a word.
struct ScaleLayout {
  int64_t num_columns;  // stored elements of a row
  int64_t pitch;        // elements from one row (row-major) or column (column-major) to the next
  int64_t num_bytes;    // memory, padding included
};

constexpr ScaleLayout layout_scales(ScaleType type, ScaleOrder order, int64_t num_rows, int64_t num_groups) {
  const int64_t num_columns = type == ScaleType::packed ? (num_groups + 3) / 4 : num_groups;
  const int64_t size = size_of(dtype_of(type));
  const bool is_row_major = order == ScaleOrder::row_major;
  const int64_t pitch = is_row_major ? num_columns : round_up(num_rows, kScaleAlignment / size);
  return {num_columns, pitch, (is_row_major ? num_rows : num_columns) * pitch * size};
}

// Scales as an operator takes and writes them; needs layout_scales(...).num_bytes bytes.
inline Tensor make_scales(const void* data, ScaleType type, ScaleOrder order, int64_t num_rows, int64_t num_groups,
                          tk_device device = {TK_CUDA, 0}) {
  const ScaleLayout layout = layout_scales(type, order, num_rows, num_groups);
  const Dims strides = order == ScaleOrder::row_major ? Dims{layout.pitch, 1} : Dims{1, layout.pitch};
  return Tensor(data, dtype_of(type), {num_rows, layout.num_columns}, strides, device);
}

}  // namespace tilekernels

#endif  // TILEKERNELS_QUANT_HPP_
