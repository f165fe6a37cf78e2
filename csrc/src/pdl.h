// Whether kernels are launched dependently on the one before (programmatic dependent launch).
#pragma once

#include "driver.h"

namespace tk {

// What the calling thread asked for, otherwise what the process did.
bool is_pdl_on();

// The attribute of such a launch; returns how many that is.
inline unsigned fill_pdl(CUlaunchAttribute* attribute) {
  attribute->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute->value.programmaticStreamSerializationAllowed = 1;
  return 1;
}

}  // namespace tk
