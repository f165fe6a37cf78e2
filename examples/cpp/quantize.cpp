// The smallest program: a matrix becomes FP8 with one scale for 128 neighbouring values of a row.
#include <tilekernels/ops.h>
#include <tilekernels/quant.hpp>

#include <cstdio>

#include "cuda_driver.h"

int main() try {
  using namespace tilekernels;
  const int64_t num_tokens = 4, hidden = 512, group = 128, num_groups = hidden / group;
  const DeviceScope device(0);  // the context that cudart and torch use too
  const cuda::Stream stream;

  const cuda::Buffer x(std::vector<uint16_t>(num_tokens * hidden, 0x3F80));  // 1.0 in bfloat16
  const cuda::Buffer data(num_tokens * hidden), sf(num_tokens * num_groups * sizeof(float));
  const auto x_view = Tensor::dense(x.get(), kBfloat16, {num_tokens, hidden});
  const auto data_view = make_data(data.get(), Format::e4m3, num_tokens, hidden);
  const auto sf_view = make_scales(sf.get(), ScaleType::float32, ScaleOrder::row_major, num_tokens, num_groups);

  auto args = make_args<tk_quant_per_token_cast_args>();
  args.x = x_view;
  args.out = data_view;
  args.out_sf = sf_view;
  args.x_block_rows = args.x_block_cols = 1;  // x is not quantised itself
  args.clamp_min = 1e-4f;
  args.num_per_channels = group;
  check(tk_quant_per_token_cast(&args, stream.get()));

  stream.synchronize();
  std::printf("1.0 is 0x%02x times %g\n", data.download<unsigned char>()[0], sf.download<float>()[0]);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
