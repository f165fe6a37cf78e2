/* The typed entry of hand_tables.cpp's demo.topk, as codegen writes them into ops.h. */
#ifndef TILEKERNELS_OPS_H_
#define TILEKERNELS_OPS_H_

#include "tilekernels/tilekernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum tk_demo_topk_scoring { TK_DEMO_TOPK_SOFTMAX = 0, TK_DEMO_TOPK_SIGMOID = 1 } tk_demo_topk_scoring;

typedef struct tk_demo_topk_args {
  size_t size;
  const tk_tensor* scores;
  const tk_tensor* bias;
  float scale;
  const tk_tensor* out;
  tk_demo_topk_scoring scoring;
  int32_t with_bias;
} tk_demo_topk_args;

TK_API tk_status tk_demo_topk(const tk_demo_topk_args* args, tk_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TILEKERNELS_OPS_H_ */
