#include "message.h"

#include <cstdarg>
#include <cstdio>

namespace tk {

namespace {

constexpr int32_t kMessageBytes = 2048;
thread_local char message[kMessageBytes];

int32_t append(int32_t length, const char* format, va_list arguments) {
  if (length >= kMessageBytes - 1) return length;
  const int written = std::vsnprintf(message + length, static_cast<size_t>(kMessageBytes - length), format, arguments);
  if (written < 0) return length;
  return length + written < kMessageBytes ? length + written : kMessageBytes - 1;
}

struct DTypeName {
  DType dtype;
  const char* name;
};

constexpr DTypeName kDTypeNames[] = {
    {DType::none, "None"},
    {DType::bool_, "bool"},
    {DType::int8, "int8"},
    {DType::int16, "int16"},
    {DType::int32, "int32"},
    {DType::int64, "int64"},
    {DType::uint8, "uint8"},
    {DType::uint16, "uint16"},
    {DType::uint32, "uint32"},
    {DType::uint64, "uint64"},
    {DType::float16, "float16"},
    {DType::float32, "float32"},
    {DType::float64, "float64"},
    {DType::bfloat16, "bfloat16"},
    {DType::complex64, "complex64"},
    {DType::complex128, "complex128"},
    {DType::float8_e4m3fn, "float8_e4m3fn"},
    {DType::float8_e4m3fnuz, "float8_e4m3fnuz"},
    {DType::float8_e5m2, "float8_e5m2"},
    {DType::float8_e5m2fnuz, "float8_e5m2fnuz"},
    {DType::float8_e8m0fnu, "float8_e8m0fnu"},
    {DType::float4_e2m1fn_x2, "float4_e2m1fn_x2"},
};

}  // namespace

const char* last_message() { return message; }

const char* dtype_name(DType dtype) {
  for (const DTypeName& entry : kDTypeNames) {
    if (entry.dtype == dtype) return entry.name;
  }
  return nullptr;
}

const char* scalar_name(ScalarType type) {
  switch (type) {
    case ScalarType::float32: return "float32";
    case ScalarType::float64: return "float64";
    case ScalarType::int32: return "int32";
    case ScalarType::int64: return "int64";
    case ScalarType::bool_: return "bool";
    case ScalarType::none: break;
  }
  return "none";
}

Message::Message() { message[0] = '\0'; }

Message& Message::add(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  length_ = append(length_, format, arguments);
  va_end(arguments);
  return *this;
}

Message& Message::add_dtype(DType dtype) {
  if (const char* name = dtype_name(dtype)) return add("%s", name);
  const uint32_t word = static_cast<uint32_t>(dtype);
  return add("a dtype of code %u, %u bits, %u lanes", word & 0xFF, word >> 8 & 0xFF, word >> 16);
}

Message& Message::add_separator(int32_t index, int32_t count, const char* word) {
  if (index == 0) return *this;
  return index + 1 == count ? add(" %s ", word) : add(", ");
}

tk_status fail_null(const char* call, const char* argument, const char* requirement) {
  return fail(TK_INVALID_ARGUMENT, "%s: %s must be %s, got null", call, argument, requirement);
}

tk_status fail(tk_status status, const char* format, ...) {
  message[0] = '\0';
  va_list arguments;
  va_start(arguments, format);
  append(0, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace tk
