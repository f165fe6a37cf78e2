// Whether kernels are launched dependently on the one before (programmatic dependent launch).
#pragma once

namespace tk {

// What the calling thread asked for, otherwise what the process did.
bool is_pdl_on();

}  // namespace tk
