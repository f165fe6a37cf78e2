// The cubins of this library, from manifest.json; made by build_tools/embed.py, do not edit.
#include "registry.h"

extern "C" {
extern const unsigned char tk_blob_0[];
extern const unsigned char tk_blob_1[];
extern const unsigned char tk_blob_2[];
extern const unsigned char tk_blob_3[];
extern const unsigned char tk_blob_4[];
}

namespace tk {

extern const Blob kBlobs[] = {
    {"demo.cast-sm_90a-0", "sm_90a", tk_blob_0, 293},
    {"demo.rank-sm_80-0", "sm_80", tk_blob_1, 88},
    {"demo.rank-sm_90a-0", "sm_90a", tk_blob_2, 89},
    {"demo.transpose-sm_80-0", "sm_80", tk_blob_3, 153},
    {"demo.transpose-sm_90a-0", "sm_90a", tk_blob_4, 154},
};
extern const int32_t kNumBlobs = 5;

}  // namespace tk
