// Which GPU runs code of which arch, as data.
#pragma once

#include <cstdint>

namespace tk {

// 0: code of `arch` ("sm_90a") does not run on this compute capability. Otherwise the higher, the more specific.
int32_t arch_rank(const char* arch, int32_t major, int32_t minor);

// The arch to build for a GPU; null if the project has none for it.
const char* wanted_arch(int32_t major, int32_t minor);

}  // namespace tk
