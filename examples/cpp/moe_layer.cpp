// One mixture-of-experts layer over a batch from a file: gate, mapping, expansion, cast, product, SwiGLU with cast,
// product, reduction; run call by call, then as a CUDA graph, and each time compared with what the Python references
// say.
//
//   python make_batch.py batch.tensors expected.tensors
//   moe_layer batch.tensors expected.tensors
//
// The host never learns the routing, so the graph is right for every batch of this size. Where an engine multiplies FP8
// matrices expert by expert, this has a plain product: values are cast back to bf16, and all experts share their
// weights.
#include <tilekernels/ops.h>
#include <tilekernels/quant.hpp>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

#include "cuda_driver.h"
#include "tensor_file.h"

namespace {

using namespace tilekernels;

constexpr int64_t kGroup = 128;     // channels that share a scale
constexpr float kClampMin = 1e-4f;  // of a group's largest value, so that scales of zeros are no zeros

// Behind a matrix product, whose sum has another order than the reference's, so that some values round to the
// neighbour: the norm of the difference, of the norm of the result. Half a unit in bfloat16's last place.
constexpr double kTolerance = 1.0 / 256;

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

// What is compared with the file's tensor of that name.
struct Result {
  const char* name;
  Value* value;
  double tolerance = 0;  // 0: byte by byte
};

class MoeLayer {
 public:
  explicit MoeLayer(const TensorFile& batch)
      : scores(find_tensor(batch, "scores")),
        x(find_tensor(batch, "x")),
        topk_weights(find_tensor(batch, "topk_weights")),
        up_weight(find_tensor(batch, "up_weight")),
        down_weight(find_tensor(batch, "down_weight")),
        num_tokens(x.view.shape()[0]),
        hidden(x.view.shape()[1]),
        num_experts(scores.view.shape()[1]),
        num_topk(topk_weights.view.shape()[1]),
        intermediate(down_weight.view.shape()[1]),
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
    cast.clamp_min = kClampMin;
    cast.num_per_channels = kGroup;

    cast_back.x = data.view;
    cast_back.x_sf = sf.view;
    cast_back.out = restored.view;
    cast_back.block_rows = 1;
    cast_back.block_cols = kGroup;

    up.a = restored.view;
    up.b = up_weight.view;
    up.out = gates_and_values.view;

    swiglu.x = gates_and_values.view;
    swiglu.pos_to_expert = pos_to_expert.view;  // rows without an expert are passed over
    swiglu.out = activated_data.view;
    swiglu.out_sf = activated_sf.view;
    swiglu.alignment = 1;  // of segments, which are not given
    swiglu.routed_scaling_factor = 1.0f;
    swiglu.clamp_min = kClampMin;
    swiglu.num_per_channels = kGroup;
    swiglu.num_parts = 1;  // a warp for each row

    activated_back.x = activated_data.view;
    activated_back.x_sf = activated_sf.view;
    activated_back.out = activated.view;
    activated_back.block_rows = 1;
    activated_back.block_cols = kGroup;

    down.a = activated.view;
    down.b = down_weight.view;
    down.out = returned.view;

    reduce.x = returned.view;
    reduce.topk_weights = topk_weights.view;
    reduce.token_topk_to_pos = token_topk_to_pos.view;
    reduce.out = out.view;
  }

  // Ten launches on the stream; the host neither waits nor allocates.
  void run(const cuda::Stream& stream) const {
    check(tk_moe_topk_gate(&gate, stream.get()));
    check(tk_moe_get_fused_mapping(&mapping, stream.get()));
    check(tk_moe_expand_to_fused(&expand, stream.get()));
    check(tk_quant_per_token_cast(&cast, stream.get()));
    check(tk_quant_cast_back(&cast_back, stream.get()));
    check(tk_gemm_matmul(&up, stream.get()));
    check(tk_quant_swiglu_forward_and_per_token_cast(&swiglu, stream.get()));
    check(tk_quant_cast_back(&activated_back, stream.get()));
    check(tk_gemm_matmul(&down, stream.get()));
    check(tk_moe_reduce_fused(&reduce, stream.get()));
  }

  std::vector<Result> results() {
    return {{"topk_idx", &topk_idx},
            {"pos_to_expert", &pos_to_expert},
            {"token_topk_to_pos", &token_topk_to_pos},
            {"expanded", &expanded},
            {"data", &data},
            {"sf", &sf},
            {"restored", &restored},
            {"gates_and_values", &gates_and_values, kTolerance},
            {"out", &out, kTolerance}};
  }

 private:
  static constexpr int32_t kNumBlocks =
      8;  // of the mapping, which waits for all of them: few are faster for few tokens

  Value scores, x, topk_weights, up_weight, down_weight;
  int64_t num_tokens, hidden, num_experts, num_topk, intermediate, alignment, num_positions;

  Value topk_idx{kInt64, {num_tokens, num_topk}};
  Value pos_to_expert{kInt32, {num_positions}}, pos_to_token{kInt32, {num_positions}};
  Value pos_to_token_topk{kInt32, {num_positions}}, token_topk_to_pos{kInt32, {num_tokens, num_topk}};
  Value expert_start{kInt32, {num_experts}}, expert_end{kInt32, {num_experts}};
  Value num_tokens_per_expert{kInt32, {num_experts}};
  Value expanded{kBfloat16, {num_positions, hidden}};
  Value data{kFloat8E4m3fn, {num_positions, hidden}}, sf{kFloat32, {num_positions, hidden / kGroup}};
  Value restored{kBfloat16, {num_positions, hidden}};
  Value gates_and_values{kBfloat16, {num_positions, 2 * intermediate}};
  Value activated_data{kFloat8E4m3fn, {num_positions, intermediate}};
  Value activated_sf{kFloat32, {num_positions, intermediate / kGroup}};
  Value activated{kBfloat16, {num_positions, intermediate}};
  Value returned{kBfloat16, {num_positions, hidden}};  // rows without an expert hold nothing of meaning
  Value out{kBfloat16, {num_tokens, hidden}};
  std::unique_ptr<Value> workspace;

  tk_moe_topk_gate_args gate = make_args<tk_moe_topk_gate_args>();
  tk_moe_get_fused_mapping_args mapping = make_args<tk_moe_get_fused_mapping_args>();
  tk_moe_expand_to_fused_args expand = make_args<tk_moe_expand_to_fused_args>();
  tk_quant_per_token_cast_args cast = make_args<tk_quant_per_token_cast_args>();
  tk_quant_cast_back_args cast_back = make_args<tk_quant_cast_back_args>();
  tk_gemm_matmul_args up = make_args<tk_gemm_matmul_args>();
  tk_quant_swiglu_forward_and_per_token_cast_args swiglu = make_args<tk_quant_swiglu_forward_and_per_token_cast_args>();
  tk_quant_cast_back_args activated_back = make_args<tk_quant_cast_back_args>();
  tk_gemm_matmul_args down = make_args<tk_gemm_matmul_args>();
  tk_moe_reduce_fused_args reduce = make_args<tk_moe_reduce_fused_args>();
};

size_t count_different(const std::vector<unsigned char>& got, const std::vector<unsigned char>& wanted) {
  size_t num_different = 0;
  for (size_t i = 0; i < got.size(); ++i) num_different += got[i] != wanted[i];
  return num_different;
}

float read_bfloat16(const std::vector<unsigned char>& bytes, size_t index) {
  uint16_t half = 0;
  std::memcpy(&half, &bytes[2 * index], sizeof(half));
  const uint32_t bits = uint32_t{half} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The norm of the difference of two tensors of bfloat16, of the norm of the second; NaN if the first has one.
double relative_difference(const std::vector<unsigned char>& got, const std::vector<unsigned char>& wanted) {
  double squared = 0, total = 0;
  for (size_t i = 0; i < got.size() / 2; ++i) {
    const double value = read_bfloat16(wanted, i), difference = read_bfloat16(got, i) - value;
    squared += difference * difference;
    total += value * value;
  }
  return std::sqrt(squared / total);
}

bool is_right(const char* how, const Result& result, const std::vector<unsigned char>& wanted) {
  const std::vector<unsigned char> got = result.value->memory.download<unsigned char>();
  if (got.size() != wanted.size())
    throw std::runtime_error(std::string(result.name) + " has another size than the reference");
  if (result.tolerance == 0) {
    const size_t num_different = count_different(got, wanted);
    std::printf("%s: %s: %zu of %zu bytes differ from the reference\n", how, result.name, num_different, got.size());
    return num_different == 0;
  }
  const double difference = relative_difference(got, wanted);
  const bool is_close = difference <= result.tolerance;
  std::printf("%s: %s: %s, %.2g from the reference\n", how, result.name, is_close ? "close" : "wrong", difference);
  return is_close;
}

// Runs the layer and compares every result with the file. All memory is wiped before, with bytes that make a NaN.
template <typename Run>
bool is_right(const char* how, MoeLayer& layer, const TensorFile& expected, const Run& run) {
  for (const Result& result : layer.results()) result.value->memory.fill(0xFF);
  run();
  bool right = true;
  for (const Result& result : layer.results()) right &= is_right(how, result, find_tensor(expected, result.name).bytes);
  return right;
}

}  // namespace

int main(int num_arguments, char** arguments) try {
  if (num_arguments != 3) throw std::runtime_error("usage: moe_layer batch.tensors expected.tensors");
  const TensorFile batch = read_tensor_file(arguments[1]), expected = read_tensor_file(arguments[2]);
  const DeviceScope device(0);
  const cuda::Stream stream;
  MoeLayer layer(batch);

  bool right = is_right("eager", layer, expected, [&] {
    layer.run(stream);
    stream.synchronize();
  });

  // Every kernel is loaded by now; a program that captures first calls tk_preload before.
  const cuda::Graph graph(stream, [&] { layer.run(stream); });
  right &= is_right("graph", layer, expected, [&] {
    graph.launch(stream);
    stream.synchronize();
  });
  return right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
