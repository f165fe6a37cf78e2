// What a typed entry of the library costs on the host over cuLaunchKernelEx of the same kernel, in microseconds.
//
// The raw launch is taken from a captured graph: its kernel node holds the function, the grid and the packed arguments
// that the entry launched. Bursts of both alternate; medians are printed as JSON lines. Built by host_overhead.py.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "tilekernels/ops.h"
#include "tilekernels/tilekernels.hpp"

namespace {

constexpr int kBurst = 200;  // launches between two synchronisations: the queue never fills
constexpr int kRounds = 300;

template <typename Function>
void load(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) {
    std::fprintf(stderr, "libcuda.so.1 has no %s\n", name);
    std::exit(1);
  }
}

struct Driver {
  decltype(&cuInit) init;
  decltype(&cuDevicePrimaryCtxRetain) retain;
  decltype(&cuCtxSetCurrent) set_current;
  decltype(&cuMemAlloc) allocate;
  decltype(&cuMemsetD8) fill;
  decltype(&cuStreamCreate) create_stream;
  decltype(&cuStreamSynchronize) synchronize;
  decltype(&cuStreamBeginCapture) begin_capture;
  decltype(&cuStreamEndCapture) end_capture;
  decltype(&cuGraphGetNodes) nodes;
  decltype(&cuGraphKernelNodeGetParams) node_params;
  decltype(&cuLaunchKernelEx) launch;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
      std::fprintf(stderr, "no NVIDIA driver: %s\n", dlerror());
      std::exit(1);
    }
    load(library, "cuInit", init);
    load(library, "cuDevicePrimaryCtxRetain", retain);
    load(library, "cuCtxSetCurrent", set_current);
    load(library, "cuMemAlloc_v2", allocate);
    load(library, "cuMemsetD8_v2", fill);
    load(library, "cuStreamCreate", create_stream);
    load(library, "cuStreamSynchronize", synchronize);
    load(library, "cuStreamBeginCapture_v2", begin_capture);
    load(library, "cuStreamEndCapture", end_capture);
    load(library, "cuGraphGetNodes", nodes);
    load(library, "cuGraphKernelNodeGetParams_v2", node_params);
    load(library, "cuLaunchKernelEx", launch);
  }
};

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) {
    std::fprintf(stderr, "%s failed with CUDA error %d\n", what, static_cast<int>(result));
    std::exit(1);
  }
}

void* allocate(const Driver& driver, size_t num_bytes) {
  CUdeviceptr pointer = 0;
  check(driver.allocate(&pointer, num_bytes), "cuMemAlloc");
  check(driver.fill(pointer, 0, num_bytes), "cuMemsetD8");
  return reinterpret_cast<void*>(pointer);
}

// Microseconds a call of `call`, over one burst.
double time_burst(const Driver& driver, CUstream stream, const std::function<void()>& burst) {
  const auto start = std::chrono::steady_clock::now();
  burst();
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
  check(driver.synchronize(stream), "cuStreamSynchronize");
  return elapsed.count() / kBurst;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// `entry` makes one call of the library on the stream.
template <typename Entry>
void measure(const Driver& driver, CUstream stream, const char* kernel, const Entry& entry) {
  CUgraph graph = nullptr;
  CUgraphNode node = nullptr;
  size_t num_nodes = 1;
  check(driver.begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
  entry();
  check(driver.end_capture(stream, &graph), "cuStreamEndCapture");
  check(driver.nodes(graph, &node, &num_nodes), "cuGraphGetNodes");
  CUDA_KERNEL_NODE_PARAMS params = {};
  check(driver.node_params(node, &params), "cuGraphKernelNodeGetParams");
  const CUfunction function = params.func != nullptr ? params.func : reinterpret_cast<CUfunction>(params.kern);
  CUlaunchConfig config = {};
  config.gridDimX = params.gridDimX, config.gridDimY = params.gridDimY, config.gridDimZ = params.gridDimZ;
  config.blockDimX = params.blockDimX, config.blockDimY = params.blockDimY, config.blockDimZ = params.blockDimZ;
  config.sharedMemBytes = params.sharedMemBytes;
  config.hStream = stream;

  const auto raw_burst = [&] {
    for (int i = 0; i < kBurst; ++i) check(driver.launch(&config, function, params.kernelParams, nullptr), kernel);
  };
  const auto entry_burst = [&] {
    for (int i = 0; i < kBurst; ++i) entry();
  };
  std::vector<double> raw, typed, over;
  for (int round = -20; round < kRounds; ++round) {
    const double raw_us = time_burst(driver, stream, raw_burst);
    const double typed_us = time_burst(driver, stream, entry_burst);
    if (round < 0) continue;  // warming up
    raw.push_back(raw_us), typed.push_back(typed_us), over.push_back(typed_us - raw_us);
  }
  std::printf("{\"kernel\": \"%s\", \"raw_us\": %.4f, \"entry_us\": %.4f, \"over_raw_us\": %.4f}\n", kernel, median(raw),
              median(typed), median(over));
}

}  // namespace

int main() {
  const Driver driver;
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  check(driver.init(0), "cuInit");
  check(driver.retain(&context, 0), "cuDevicePrimaryCtxRetain");
  check(driver.set_current(context), "cuCtxSetCurrent");
  check(driver.create_stream(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  try {
    using tilekernels::Tensor;
    tilekernels::check(tk_preload(nullptr, 0, 0));

    const Tensor x = Tensor::dense(allocate(driver, 64 * 512 * 2), tilekernels::kBfloat16, {64, 512});
    const Tensor transposed = Tensor::dense(allocate(driver, 64 * 512 * 2), tilekernels::kBfloat16, {512, 64});
    tk_transpose_transpose_args transpose = {};
    transpose.size = sizeof(transpose);
    transpose.x = &x.view();
    transpose.out = &transposed.view();
    measure(driver, stream, "transpose.transpose", [&] { tilekernels::check(tk_transpose_transpose(&transpose, stream)); });

    const Tensor tokens = Tensor::dense(allocate(driver, 8 * 4096 * 2), tilekernels::kBfloat16, {8, 4096});
    const Tensor data = Tensor::dense(allocate(driver, 8 * 4096), tilekernels::kFloat8E4m3fn, {8, 4096});
    const Tensor scales = Tensor::dense(allocate(driver, 8 * 32 * 4), tilekernels::kFloat32, {8, 32});
    tk_quant_per_token_cast_args cast = {};
    cast.size = sizeof(cast);
    cast.x = &tokens.view();
    cast.out = &data.view();
    cast.out_sf = &scales.view();
    cast.x_block_rows = 1;
    cast.x_block_cols = 1;
    cast.clamp_min = 1e-4f;
    cast.num_per_channels = 128;
    measure(driver, stream, "quant.per_token_cast", [&] { tilekernels::check(tk_quant_per_token_cast(&cast, stream)); });
  } catch (const tilekernels::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
