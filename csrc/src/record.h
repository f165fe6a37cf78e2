// TILEKERNELS_RECORD=file: what this process wanted and the library did not hold, or held in a general form only, as a
// profile that `python -m build_tools build --profile file` takes as it is.
#pragma once

#include <atomic>

#include "registry.h"

namespace tk {

// Whether TILEKERNELS_RECORD is set; read once.
bool recording();

// One call that had no variant, or (`general`) that fell to a form behind the first. `digits`: the axis values, open
// ones negative; null: the kernel is not in the library at all. `arch`: that of the GPU, null where it is not known.
[[gnu::cold]] void record(const char* name, const KernelDesc* kernel, const int32_t* digits, const char* arch,
                          bool general);

// `fmt = ["e2m1"], num_per_channels = [128]`: axis values as a line of a profile has them.
class Message;
void add_profile_values(Message& message, const KernelDesc& kernel, const int32_t* digits);

}  // namespace tk
