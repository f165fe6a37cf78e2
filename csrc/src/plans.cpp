#include "plans.h"

#include <cstring>

#include "check.h"
#include "loader.h"

namespace tk {

namespace {

constexpr int kNumPlans = 32;  // a decode step calls about as many kernels, most of them with one set of shapes
thread_local Plan plans[kNumPlans];

// dtype 32 | device type 8 | device 12 | rank 4 | address % 128, 7 | dense 1 bits
uint64_t tensor_word(const tk_tensor& tensor) {
  const uint64_t address = reinterpret_cast<uintptr_t>(data_of(&tensor)) % 128;
  return static_cast<uint64_t>(dtype_of(tensor)) << 32 | static_cast<uint64_t>(tensor.device.device_type & 0xFF) << 24 |
         static_cast<uint64_t>(tensor.device.device_id & 0xFFF) << 12 | static_cast<uint64_t>(tensor.ndim) << 8 |
         address << 1 | static_cast<uint64_t>(tensor.strides == nullptr);
}

// The bits that the type has: what else is in the union was never set.
uint64_t scalar_word(const tk_scalar& scalar, ScalarType type) {
  switch (type) {
    case ScalarType::float64:
    case ScalarType::int64: return static_cast<uint64_t>(scalar.i64);
    case ScalarType::bool_: return scalar.b != 0;
    case ScalarType::float32:
    case ScalarType::int32:
    case ScalarType::none: return static_cast<uint32_t>(scalar.i32);
  }
  return 0;
}

// A tensor without memory is left to the checks: whether it may be depends on its sizes.
bool is_plain(const tk_tensor& tensor) { return tensor.ndim >= 0 && tensor.ndim <= kMaxRank && tensor.data != nullptr; }

// Appends words and adds them up on the way.
struct Writer {
  uint64_t* next;
  uint64_t sum;

  void add(uint64_t word) {
    *next++ = word;
    sum += word;
  }

  void add(const tk_tensor& tensor) {
    add(tensor_word(tensor));
    if (tensor.ndim == 2 && tensor.strides != nullptr) [[likely]] {  // most are: 12 instructions instead of 50
      const uint64_t sizes[] = {static_cast<uint64_t>(tensor.shape[0]), static_cast<uint64_t>(tensor.shape[1]),
                                static_cast<uint64_t>(tensor.strides[0]), static_cast<uint64_t>(tensor.strides[1])};
      std::memcpy(next, sizes, sizeof(sizes));
      next += 4;
      sum += sizes[0] + sizes[1] + sizes[2] + sizes[3];
      return;
    }
    for (int32_t i = 0; i < tensor.ndim; ++i) add(static_cast<uint64_t>(tensor.shape[i]));
    if (tensor.strides == nullptr) return;
    for (int32_t i = 0; i < tensor.ndim; ++i) add(static_cast<uint64_t>(tensor.strides[i]));
  }
};

}  // namespace

bool make_key(const Driver& driver, const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
              const int32_t* axes, CallKey* key) {
  constexpr int kMostOfTensor = 1 + 2 * kMaxRank;
  const uint64_t* const end =
      key->words + CallKey::kMaxWords - kMostOfTensor - kMaxAxes;  // room for one more and the axes
  Writer writer = {key->words, reinterpret_cast<uintptr_t>(&kernel)};
  unsigned long long context = 0;
  if (driver.cuCtxGetId(nullptr, &context) != CUDA_SUCCESS) return false;
  writer.add(context);
  const bool is_short = 1 + kernel.num_tensors * kMostOfTensor + kernel.num_params + kMaxAxes <= CallKey::kMaxWords;
  for (const ParamDesc* param = kernel.params; param < kernel.params + kernel.num_params; ++param) {
    if (!is_short && writer.next > end) return false;
    if (!param->tensor) {
      writer.add(scalar_word(*scalars++, param->scalar));
      continue;
    }
    const tk_tensor* tensor = *tensors++;
    if (tensor == nullptr) {
      writer.add(0);  // no dtype is 0
      continue;
    }
    if (!is_plain(*tensor)) return false;
    writer.add(*tensor);
  }
  for (int32_t i = 0; i < kernel.num_axes; ++i) {
    if (kernel.axes[i].tensor < 0) writer.add(static_cast<uint64_t>(*axes++));
  }
  key->num_words = static_cast<int32_t>(writer.next - key->words);
  key->sum = writer.sum;
  return true;
}

Plan& plan_of(const CallKey& key) {
  constexpr uint64_t kSpread = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio
  return plans[(key.sum * kSpread >> 32) % kNumPlans];
}

bool is_plan_of(const Plan& plan, const KernelDesc& kernel, const CallKey& key) {
  return plan.key.sum == key.sum && plan.kernel == &kernel && plan.key.num_words == key.num_words &&
         std::memcmp(plan.key.words, key.words, static_cast<size_t>(key.num_words) * sizeof(uint64_t)) == 0;
}

void keep_plan(const Driver& driver, const Frame& frame, const Device& device, const VariantDesc& variant,
               const CallKey& key, Plan* plan) {
  plan->kernel = frame.kernel;
  plan->variant = &variant;
  plan->signature = frame.signature;
  plan->device = &device;
  plan->bound = frame.bound;
  std::memcpy(plan->symbols, frame.symbols, sizeof(plan->symbols));
  for (int32_t i = 0; i < Plan::kMaxLaunches; ++i) {
    plan->functions[i] = nullptr;
    if (i >= variant.num_launches) continue;
    // Not loaded: this launch was empty.
    if ((variant.states[i].ready.load(std::memory_order_acquire) >> device.ordinal & 1) == 0) continue;
    CUkernel kernel = variant.states[i].kernel.load(std::memory_order_relaxed);
    if (driver.cuKernelGetFunction(&plan->functions[i], kernel) != CUDA_SUCCESS) plan->functions[i] = nullptr;
  }
  plan->key.num_words = key.num_words;
  plan->key.sum = key.sum;
  std::memcpy(plan->key.words, key.words, static_cast<size_t>(key.num_words) * sizeof(uint64_t));
}

}  // namespace tk
