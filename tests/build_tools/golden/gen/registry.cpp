// The table of the kernels: made by build_tools/codegen.py, do not edit.
#include "registry.h"

namespace tk {

extern const KernelDesc k_demo_cast;
extern const KernelDesc k_demo_rank;
extern const KernelDesc k_demo_transpose;

extern const KernelDesc* const kKernels[] = {
    &k_demo_cast,
    &k_demo_rank,
    &k_demo_transpose,
};
extern const int32_t kNumKernels = 3;

extern const char* const kArchs[] = {"sm_80", "sm_90a"};
extern const int32_t kNumArchs = 2;

extern const BuildInfo kBuildInfo = {"golden", 13000};

}  // namespace tk
