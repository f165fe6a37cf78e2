// The messages of check.h: each check is worded here once, as "<kernel>: <argument> must <requirement>, got <actual>".
#include "check.h"

#include "message.h"

namespace tk {

namespace {

Message start(const Frame& frame, int tensor) {
  Message message;
  message.add("%s: %s ", frame.kernel->name, tensor_param(*frame.kernel, tensor).name);
  return message;
}

void add_tuple(Message& message, const int64_t* values, int rank) {
  message.add("(");
  for (int i = 0; i < rank; ++i) {
    if (i > 0) message.add(", ");
    if (values[i] == kAny) {
      message.add("any");
    } else {
      message.add("%lld", static_cast<long long>(values[i]));
    }
  }
  message.add(rank == 1 ? ",)" : ")");
}

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool has_letter(const char* text) {
  for (; *text != '\0'; ++text) {
    if (is_letter(*text)) return true;
  }
  return false;
}

// "(num_tokens, num_topk) = (4, 2)", or only the numbers where the text is made of numbers alone.
void add_expected(Message& message, const int64_t* expected, int rank, const char* text) {
  if (has_letter(text)) message.add("%s = ", text);
  add_tuple(message, expected, rank);
}

bool same(const char* name, const char* word, int length) {
  return std::strncmp(name, word, static_cast<size_t>(length)) == 0 && name[length] == '\0';
}

bool add_symbol(Message& message, const Frame& frame, const char* word, int length, const char* before) {
  for (int32_t i = 0; frame.signature != nullptr && i < frame.signature->num_symbols; ++i) {
    if (!same(frame.signature->symbols[i], word, length)) continue;
    message.add("%s%.*s = %lld", before, length, word, static_cast<long long>(frame.symbols[i]));
    return true;
  }
  return false;
}

void add_scalar(Message& message, const tk_scalar& value, ScalarType type) {
  switch (type) {
    case ScalarType::float32: message.add("%g", static_cast<double>(value.f32)); break;
    case ScalarType::float64: message.add("%g", value.f64); break;
    case ScalarType::int64: message.add("%lld", static_cast<long long>(value.i64)); break;
    case ScalarType::bool_: message.add(value.b != 0 ? "True" : "False"); break;
    case ScalarType::int32:
    case ScalarType::none: message.add("%d", static_cast<int>(value.i32)); break;
  }
}

bool add_param(Message& message, const Frame& frame, const char* word, int length, const char* before) {
  int tensor = 0, scalar = 0;
  for (int32_t i = 0; i < frame.kernel->num_params; ++i) {
    const ParamDesc& param = frame.kernel->params[i];
    const int index = param.tensor ? tensor++ : scalar++;
    if (!same(param.name, word, length)) continue;
    message.add("%s%.*s", before, length, word);
    if (!param.tensor) {
      message.add(" = ");
      add_scalar(message, frame.scalars[index], param.scalar);
    } else if (const tk_tensor* view = frame.tensors[index]) {
      message.add(" of ");
      message.add_dtype(dtype_of(*view)).add(" at address %p", data_of(view));
    } else {
      message.add(" = None");
    }
    return true;
  }
  return false;
}

// The values of the names in an expression: "num_topk = 40, num_experts = 8". A name that stands twice is shown once.
void add_values(Message& message, const Frame& frame, const char* text) {
  const char* before = ", got ";
  for (const char* at = text; *at != '\0';) {
    if (!is_letter(*at)) {
      ++at;
      continue;
    }
    int length = 0;
    while (is_letter(at[length]) || is_digit(at[length])) ++length;
    bool seen = false;
    for (const char* earlier = text; earlier < at && !seen; ++earlier) {
      const bool starts = earlier == text || !(is_letter(earlier[-1]) || is_digit(earlier[-1]));
      seen = starts && std::strncmp(earlier, at, static_cast<size_t>(length)) == 0 && !is_letter(earlier[length]) &&
             !is_digit(earlier[length]);
    }
    if (!seen && (add_symbol(message, frame, at, length, before) || add_param(message, frame, at, length, before))) {
      before = ", ";
    }
    at += length;
  }
}

}  // namespace

bool is_known_size(const void* given, size_t size, size_t known) {
  if (size < sizeof(size_t) || size % alignof(void*) != 0 || size > kMaxArgsBytes) return false;
  for (size_t i = known; i < size; ++i) {
    if (static_cast<const unsigned char*>(given)[i] != 0) return false;
  }
  return true;
}

tk_status fail_present(const Frame& frame, int tensor) {
  start(frame, tensor).add("must be None in this configuration, got a tensor");
  return TK_INVALID_ARGUMENT;
}

tk_status fail_absent(const Frame& frame, int tensor) {
  start(frame, tensor).add("must be a tensor, got None");
  return TK_INVALID_TYPE;
}

tk_status fail_dtype(const Frame& frame, int tensor, const DType* allowed, int32_t num_allowed) {
  Message message = start(frame, tensor);
  message.add("must be ");
  for (int32_t i = 0; i < num_allowed; ++i) message.add_separator(i, num_allowed, "or").add_dtype(allowed[i]);
  message.add(", got ").add_dtype(dtype_of(*frame.tensors[tensor]));
  return TK_INVALID_TYPE;
}

tk_status fail_rank(const Frame& frame, int tensor, int rank) {
  const tk_tensor& view = *frame.tensors[tensor];
  Message message = start(frame, tensor);
  message.add("must have %d dimension%s, got %d", rank, rank == 1 ? "" : "s", static_cast<int>(view.ndim));
  if (view.ndim < 0 || view.ndim > kMaxRank || (view.shape == nullptr && view.ndim > 0)) return TK_INVALID_ARGUMENT;
  message.add(" of shape ");
  add_tuple(message, view.shape, view.ndim);
  return TK_INVALID_ARGUMENT;
}

tk_status fail_shape(const Frame& frame, int tensor, const int64_t* expected, int rank, const char* text) {
  Message message = start(frame, tensor);
  message.add("must have shape ");
  add_expected(message, expected, rank, text);
  message.add(", got ");
  add_tuple(message, frame.tensors[tensor]->shape, rank);
  return TK_INVALID_ARGUMENT;
}

tk_status fail_strides(const Frame& frame, int tensor, const int64_t* expected, int rank, const char* text) {
  const tk_tensor& view = *frame.tensors[tensor];
  int64_t strides[kMaxRank];
  const int shown = rank < kMaxRank ? rank : kMaxRank;
  for (int i = 0; i < shown; ++i) strides[i] = stride_of(view, i);
  Message message = start(frame, tensor);
  message.add("must have strides ");
  add_expected(message, expected, rank, text);
  message.add(", got ");
  add_tuple(message, strides, shown);
  message.add(" for shape ");
  add_tuple(message, view.shape, shown);
  return TK_INVALID_ARGUMENT;
}

tk_status fail_range(const Frame& frame, int tensor, int axis, bool stride, int64_t value, int64_t limit) {
  Message message = start(frame, tensor);
  message.add("must have a %s ", stride ? "stride" : "size");
  if (value < 0) {
    message.add("of at least 0");
  } else {
    message.add("below %lld", static_cast<long long>(limit) + 1);
  }
  message.add(" in dimension %d, got %lld", axis, static_cast<long long>(value));
  return TK_INVALID_ARGUMENT;
}

tk_status fail_too_many_elements(const Frame& frame, int tensor) {
  const tk_tensor& view = *frame.tensors[tensor];
  Message message = start(frame, tensor);
  message.add("must have at most %lld elements, got shape ", static_cast<long long>(kMaxExtent));
  add_tuple(message, view.shape, view.ndim);
  return TK_INVALID_ARGUMENT;
}

tk_status fail_guard(const Frame& frame, const char* text) {
  Message message;
  message.add("%s: %s is required", frame.kernel->name, text);
  add_values(message, frame, text);
  return TK_INVALID_ARGUMENT;
}

}  // namespace tk
