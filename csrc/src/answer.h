// How a struct of the public header is filled for a caller who may know fewer of its fields.
#pragma once

#include <cstring>

#include "message.h"

namespace tk {

// Copies as much of an answer as the caller's struct has room for, and keeps the caller's size.
template <typename Info>
tk_status answer(const char* call, Info value, Info* info) {
  if (info == nullptr || info->size < sizeof(size_t)) {
    return fail(TK_INVALID_ARGUMENT, "%s: the info struct must have its size field set, got null or a size of 0", call);
  }
  const size_t size = info->size;
  value.size = size;
  std::memcpy(info, &value, size < sizeof(Info) ? size : sizeof(Info));
  return TK_OK;
}

}  // namespace tk
