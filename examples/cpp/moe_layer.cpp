// One mixture-of-experts layer over a batch from a file: gate, mapping, expansion, cast, (the experts), reduction; run
// call by call, then as a CUDA graph, and each time compared byte by byte with what the Python references say.
//
//   python make_batch.py batch.tensors expected.tensors
//   moe_layer batch.tensors expected.tensors
//
// The experts' matrix products are an engine's own: here each expert returns its rows as they are.
#include <tilekernels/ops.h>
#include <tilekernels/quant.hpp>

#include <cstdio>
#include <memory>
#include <utility>

#include "cuda_driver.h"
#include "tensor_file.h"

namespace {

using namespace tilekernels;

constexpr int64_t kGroup = 128;  // channels that share a scale

// Device memory with its shape.
struct Value {
  Value(tk_dtype dtype, const Dims& shape)
      : memory(num_bytes(dtype, shape)), view(Tensor::dense(memory.get(), dtype, shape)) {}
  explicit Value(const FileTensor& tensor)
      : memory(tensor.bytes), view(Tensor::dense(memory.get(), tensor.dtype, tensor.shape)) {}

  static size_t num_bytes(tk_dtype dtype, const Dims& shape) {
    int64_t bytes = size_of(dtype);
    for (const int64_t size : shape) bytes *= size;
    return static_cast<size_t>(bytes);
  }

  cuda::Buffer memory;
  Tensor view;
};

class MoeLayer {
 public:
  explicit MoeLayer(const TensorFile& batch)
      : scores(find_tensor(batch, "scores")),
        x(find_tensor(batch, "x")),
        topk_weights(find_tensor(batch, "topk_weights")),
        num_tokens(x.view.shape()[0]),
        hidden(x.view.shape()[1]),
        num_experts(scores.view.shape()[1]),
        num_topk(topk_weights.view.shape()[1]),
        alignment(read_int32(find_tensor(batch, "alignment"))),
        // Room for any routing: each expert's segment is rounded up.
        num_positions((num_tokens * num_topk + (alignment - 1) * num_experts) / alignment * alignment) {
    gate.scores = scores.view;
    gate.topk_idx = topk_idx.view;

    mapping.topk_idx = topk_idx.view;
    mapping.pos_to_expert = pos_to_expert.view;
    mapping.pos_to_token = pos_to_token.view;
    mapping.pos_to_token_topk = pos_to_token_topk.view;
    mapping.token_topk_to_pos = token_topk_to_pos.view;
    mapping.expert_start = expert_start.view;
    mapping.expert_end = expert_end.view;
    mapping.num_tokens_per_expert = num_tokens_per_expert.view;
    mapping.alignment = static_cast<int32_t>(alignment);
    auto needed = make_args<tk_workspace_info>();
    check(tk_moe_get_fused_mapping_workspace_size(&mapping, kNumBlocks, &needed));
    workspace = std::make_unique<Value>(needed.dtype, Dims(needed.shape, static_cast<size_t>(needed.ndim)));
    mapping.workspace = workspace->view;

    expand.x = x.view;
    expand.token_topk_to_pos = token_topk_to_pos.view;
    expand.pos_to_expert = pos_to_expert.view;
    expand.out = expanded.view;

    cast.x = expanded.view;
    cast.out = data.view;
    cast.out_sf = sf.view;
    cast.x_block_rows = cast.x_block_cols = 1;
    cast.clamp_min = 1e-4f;
    cast.num_per_channels = kGroup;

    reduce.x = expanded.view;  // what the experts return
    reduce.topk_weights = topk_weights.view;
    reduce.token_topk_to_pos = token_topk_to_pos.view;
    reduce.out = out.view;
  }

  // Five launches on the stream; the host neither waits nor allocates.
  void run(const cuda::Stream& stream) const {
    check(tk_moe_topk_gate(&gate, stream.get()));
    check(tk_moe_get_fused_mapping(&mapping, stream.get()));
    check(tk_moe_expand_to_fused(&expand, stream.get()));
    check(tk_quant_per_token_cast(&cast, stream.get()));
    check(tk_moe_reduce_fused(&reduce, stream.get()));
  }

  std::vector<std::pair<const char*, Value*>> results() {
    return {{"topk_idx", &topk_idx},
            {"pos_to_expert", &pos_to_expert},
            {"token_topk_to_pos", &token_topk_to_pos},
            {"expanded", &expanded},
            {"data", &data},
            {"sf", &sf},
            {"out", &out}};
  }

 private:
  static constexpr int32_t kNumBlocks =
      8;  // of the mapping, which waits for all of them: few are faster for few tokens

  Value scores, x, topk_weights;
  int64_t num_tokens, hidden, num_experts, num_topk, alignment, num_positions;

  Value topk_idx{kInt64, {num_tokens, num_topk}};
  Value pos_to_expert{kInt32, {num_positions}}, pos_to_token{kInt32, {num_positions}};
  Value pos_to_token_topk{kInt32, {num_positions}}, token_topk_to_pos{kInt32, {num_tokens, num_topk}};
  Value expert_start{kInt32, {num_experts}}, expert_end{kInt32, {num_experts}};
  Value num_tokens_per_expert{kInt32, {num_experts}};
  Value expanded{kBfloat16, {num_positions, hidden}};
  Value data{kFloat8E4m3fn, {num_positions, hidden}}, sf{kFloat32, {num_positions, hidden / kGroup}};
  Value out{kBfloat16, {num_tokens, hidden}};
  std::unique_ptr<Value> workspace;

  tk_moe_topk_gate_args gate = make_args<tk_moe_topk_gate_args>();
  tk_moe_get_fused_mapping_args mapping = make_args<tk_moe_get_fused_mapping_args>();
  tk_moe_expand_to_fused_args expand = make_args<tk_moe_expand_to_fused_args>();
  tk_quant_per_token_cast_args cast = make_args<tk_quant_per_token_cast_args>();
  tk_moe_reduce_fused_args reduce = make_args<tk_moe_reduce_fused_args>();
};

// Compares every result with the file and wipes it, so that the next run has to write it again.
bool is_right(const char* how, MoeLayer& layer, const TensorFile& expected) {
  bool right = true;
  for (const auto& [name, value] : layer.results()) {
    const std::vector<unsigned char> got = value->memory.download<unsigned char>();
    const std::vector<unsigned char>& wanted = find_tensor(expected, name).bytes;
    if (got.size() != wanted.size())
      throw std::runtime_error(std::string(name) + " has another size than the reference");
    size_t num_different = 0;
    for (size_t i = 0; i < got.size(); ++i) num_different += got[i] != wanted[i];
    right &= num_different == 0;
    std::printf("%s: %s: %zu of %zu bytes differ from the reference\n", how, name, num_different, got.size());
    value->memory.fill(0xFF);
  }
  return right;
}

}  // namespace

int main(int num_arguments, char** arguments) try {
  if (num_arguments != 3) throw std::runtime_error("usage: moe_layer batch.tensors expected.tensors");
  const TensorFile batch = read_tensor_file(arguments[1]), expected = read_tensor_file(arguments[2]);
  const DeviceScope device(0);
  const cuda::Stream stream;
  MoeLayer layer(batch);

  layer.run(stream);
  stream.synchronize();
  bool right = is_right("eager", layer, expected);

  // Every kernel is loaded by now; a program that captures first calls tk_preload before.
  const cuda::Graph graph(stream, [&] { layer.run(stream); });
  graph.launch(stream);
  stream.synchronize();
  right &= is_right("graph", layer, expected);
  return right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
