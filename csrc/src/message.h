// The sentence of the last failure in each thread, in a fixed buffer: making a message never allocates.
#pragma once

#include <cstdint>

#include "registry.h"

namespace tk {

const char* last_message();

// Starts a new message of this thread; add() appends by printf rules and cuts what does not fit.
class Message {
 public:
  Message();
  [[gnu::format(printf, 2, 3)]] Message& add(const char* format, ...);
  Message& add_dtype(DType dtype);
  // "a", "a or b", "a, b or c": call before each item; word is "or" or "and".
  Message& add_separator(int32_t index, int32_t count, const char* word);

 private:
  int32_t length_ = 0;
};

// One-line failure: sets the message and returns `status`.
[[gnu::cold, gnu::format(printf, 2, 3)]] tk_status fail(tk_status status, const char* format, ...);

// A pointer of the caller that is null: "tk_find: name must be a text, got null".
[[gnu::cold]] tk_status fail_null(const char* call, const char* argument, const char* requirement);

// "bfloat16"; null for a dtype without a name here.
const char* dtype_name(DType dtype);

const char* scalar_name(ScalarType type);

}  // namespace tk
