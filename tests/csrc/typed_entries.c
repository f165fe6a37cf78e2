/* Calls the golden kernels through ops.h as a C engine does; test_generated.py compiles and runs it. */
#include <stdio.h>
#include <string.h>

#include "tilekernels/ops.h"

static tk_tensor make(uint8_t code, uint8_t bits, int32_t ndim, const int64_t* shape) {
  tk_tensor view;
  memset(&view, 0, sizeof(view));
  view.data = (void*)0x10000;
  view.device.device_type = TK_CUDA;
  view.ndim = ndim;
  view.dtype.code = code;
  view.dtype.bits = bits;
  view.dtype.lanes = 1;
  view.shape = shape;
  return view;
}

static int expect(tk_status status, tk_status wanted, const char* text) {
  if (status == wanted && (text == NULL || strcmp(tk_last_error(), text) == 0)) return 1;
  fprintf(stderr, "%s: %s\n", tk_status_name(status), tk_last_error());
  return 0;
}

int main(void) {
  const int64_t x_shape[] = {3, 256}, sf_shape[] = {2, 3}, map_shape[] = {3};
  tk_tensor x = make(TK_BFLOAT, 16, 2, x_shape), out = make(TK_FLOAT8_E4M3FN, 8, 2, x_shape);
  tk_tensor out_sf = make(TK_FLOAT, 32, 2, sf_shape), row_map = make(TK_INT, 32, 1, map_shape);
  void* previous = NULL;
  tk_demo_cast_args args;
  memset(&args, 0, sizeof(args));
  if (!expect(tk_enter_device(0, &previous), TK_OK, NULL)) return 1;
  if (!expect(tk_demo_cast(&args, NULL), TK_INVALID_ARGUMENT,
              "demo.cast: the arguments must be a struct whose size field is sizeof that struct, 72 here, got 0")) {
    return 1;
  }
  args.size = sizeof(args);
  args.x = &x;
  args.row_map = &row_map;
  args.clamp_min = 0.5f;
  args.out = &out;
  args.out_sf = &out_sf;
  args.num_per_channels = 128;
  args.rounding = TK_DEMO_CAST_ROUNDING_UP;
  args.transposed = 1;
  if (!expect(tk_demo_cast(&args, NULL), TK_OK, NULL)) return 1;
  args.num_per_channels = 64;
  if (!expect(tk_demo_cast(&args, NULL), TK_INVALID_ARGUMENT, "demo.cast: num_per_channels must be 32 or 128, got 64"))
    return 1;
  {
    const int64_t scores_shape[] = {10, 64};
    tk_tensor scores = make(TK_FLOAT, 32, 2, scores_shape);
    tk_workspace_info info;
    tk_demo_rank_args rank;
    memset(&rank, 0, sizeof(rank));
    memset(&info, 0, sizeof(info));
    rank.size = sizeof(rank);
    rank.scores = &scores;
    rank.num_sms = 8;
    if (!expect(tk_demo_rank_workspace_size(&rank, 0, &info), TK_INVALID_ARGUMENT,
                "demo.rank: the info struct must have its size field set, got null or a size of 0")) {
      return 1;
    }
    info.size = sizeof(info);
    if (!expect(tk_demo_rank_workspace_size(&rank, 0, &info), TK_OK, NULL)) return 1;
    if (info.num_bytes != 8 * 64 * 4 || info.ndim != 2 || info.shape[1] != 64 || info.dtype.bits != 32) return 1;
  }
  puts(tk_status_name(TK_OK));
  return 0;
}
