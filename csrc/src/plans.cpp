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
  return static_cast<uint64_t>(dtype_of(tensor)) << 32 |
         static_cast<uint64_t>(tensor.device.device_type & 0xFF) << 24 |
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

uint64_t* add_tensor(const tk_tensor& tensor, uint64_t* word) {
  *word++ = tensor_word(tensor);
  for (int32_t i = 0; i < tensor.ndim; ++i) *word++ = static_cast<uint64_t>(tensor.shape[i]);
  if (tensor.strides == nullptr) return word;
  for (int32_t i = 0; i < tensor.ndim; ++i) *word++ = static_cast<uint64_t>(tensor.strides[i]);
  return word;
}

}  // namespace

bool make_key(const Driver& driver, const KernelDesc& kernel, const tk_tensor* const* tensors,
              const tk_scalar* scalars, const int32_t* axes, CallKey* key) {
  constexpr int kMostOfTensor = 1 + 2 * kMaxRank;
  const uint64_t* const end = key->words + CallKey::kMaxWords - kMostOfTensor;
  uint64_t* word = key->words;
  unsigned long long context = 0;
  if (driver.cuCtxGetId(nullptr, &context) != CUDA_SUCCESS) return false;
  *word++ = context;
  for (int32_t i = 0; i < kernel.num_params; ++i) {
    if (word > end) return false;
    if (!kernel.params[i].tensor) {
      *word++ = scalar_word(*scalars++, kernel.params[i].scalar);
      continue;
    }
    const tk_tensor* tensor = *tensors++;
    if (tensor == nullptr) {
      *word++ = 0;  // no dtype is 0
      continue;
    }
    if (!is_plain(*tensor)) return false;
    word = add_tensor(*tensor, word);
  }
  for (int32_t i = 0; i < kernel.num_axes; ++i) {
    if (kernel.axes[i].tensor < 0) *word++ = static_cast<uint64_t>(*axes++);
  }
  key->num_words = static_cast<int32_t>(word - key->words);
  return true;
}

Plan& plan_of(const KernelDesc& kernel, const CallKey& key) {
  constexpr uint64_t kSpread = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio
  uint64_t sum = reinterpret_cast<uintptr_t>(&kernel);
  for (int32_t i = 0; i < key.num_words; ++i) sum += key.words[i];
  return plans[(sum * kSpread >> 32) % kNumPlans];
}

bool is_plan_of(const Plan& plan, const KernelDesc& kernel, const CallKey& key) {
  return plan.kernel == &kernel && plan.key.num_words == key.num_words &&
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
  std::memcpy(plan->key.words, key.words, static_cast<size_t>(key.num_words) * sizeof(uint64_t));
}

}  // namespace tk
