/* The kernels of this library as typed C functions: made by build_tools/codegen.py, do not edit.
 *
 * Fill an args struct (zero it, set `size` to its sizeof) and call; the meaning of statuses, tensors and streams is in
 * tilekernels.h. Shapes and strides are in elements, outermost dimension first; `a // b` rounds down. A name in the
 * comments of one struct is the same number wherever it stands. */
#ifndef TILEKERNELS_OPS_H_
#define TILEKERNELS_OPS_H_

#include "tilekernels/tilekernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- demo.cast ---- */

typedef enum tk_demo_cast_rounding {
  TK_DEMO_CAST_ROUNDING_NEAREST = 0,
  TK_DEMO_CAST_ROUNDING_UP = 1
} tk_demo_cast_rounding;

typedef struct tk_demo_cast_args {
  size_t size; /* sizeof(tk_demo_cast_args) */

  /* bfloat16: (num_tokens, hidden), strides (x_stride, 1) */
  const tk_tensor* x;

  /* float32, may be null: (hidden,), dense */
  const tk_tensor* bias;

  /* int32, may be null: (num_tokens,), dense */
  const tk_tensor* row_map;

  /* float32 */
  float clamp_min;

  /* float8_e4m3fn or int8, written:
   *   (num_tokens, hidden), dense
   *   (num_tokens, hidden // 2), dense */
  const tk_tensor* out;

  /* float32 or int32, written:
   *   (num_tokens, (hidden + 31) // 32), strides (out_sf_stride, 1)
   *   (num_tokens, (hidden + 127) // 128), strides (out_sf_stride, 1)
   *   ((hidden + 127) // 128, num_tokens), strides (out_sf_stride, 1) */
  const tk_tensor* out_sf;

  /* 32, 128 */
  int32_t num_per_channels;

  /* nearest, up */
  tk_demo_cast_rounding rounding;

  /* 0 or 1 */
  int32_t transposed;
} tk_demo_cast_args;

/* Cast x, plus bias where given, to a narrow format with one scale per group of channels.
 * On sm_90a (run on H200). */
TK_API tk_status tk_demo_cast(const tk_demo_cast_args* args, tk_stream stream);

/* ---- demo.rank ---- */

typedef struct tk_demo_rank_args {
  size_t size; /* sizeof(tk_demo_rank_args) */

  /* float32: (num_tokens, num_experts), dense */
  const tk_tensor* scores;

  /* int32 */
  int32_t num_sms;

  /* int32, written: (num_sms, num_experts), dense */
  const tk_tensor* workspace;

  /* int64, written: (num_tokens,), dense */
  const tk_tensor* out;
} tk_demo_rank_args;

/* Write the rank of each token by its largest score.
 * On sm_80 (compiled, not run), sm_90a (run on H200). */
TK_API tk_status tk_demo_rank(const tk_demo_rank_args* args, tk_stream stream);

/* What `workspace` must be for a call with these arguments (tk_workspace_size); outputs may be null yet. */
TK_API tk_status tk_demo_rank_workspace_size(const tk_demo_rank_args* args, int32_t num_sms,
                                   tk_workspace_info* info);

/* ---- demo.transpose ---- */

typedef struct tk_demo_transpose_args {
  size_t size; /* sizeof(tk_demo_transpose_args) */

  /* any dtype as wide as uint8 or uint16: (num_rows, num_cols), strides (x_stride, 1) */
  const tk_tensor* x;

  /* any dtype as wide as uint8 or uint16, written: (num_cols, num_rows), dense */
  const tk_tensor* out;
} tk_demo_transpose_args;

/* Write the transpose of x to out.
 * On sm_80 (compiled, not run), sm_90a (run on H200). */
TK_API tk_status tk_demo_transpose(const tk_demo_transpose_args* args, tk_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TILEKERNELS_OPS_H_ */
