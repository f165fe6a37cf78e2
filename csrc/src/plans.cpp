#include "plans.h"

#include <cstddef>
#include <cstring>

#include "check.h"
#include "loader.h"
#include "pdl.h"

namespace tk {

namespace {

constexpr int kNumPlans = 32;  // a decode step calls about as many kernels, most of them with one set of shapes
thread_local Plan plans[kNumPlans];

static_assert(offsetof(tk_tensor, ndim) % 8 == 0 && offsetof(tk_tensor, dtype) == offsetof(tk_tensor, ndim) + 4 &&
              sizeof(tk_tensor::device) == 8);

uint64_t load_word(const void* address) {
  uint64_t word;
  std::memcpy(&word, address, sizeof(word));
  return word;
}

// The bits of a scalar that its type has, by ScalarType: what else is in the union was never set.
constexpr uint64_t kScalarBits[] = {0, UINT32_MAX, UINT64_MAX, UINT32_MAX, UINT64_MAX, UINT32_MAX};
static_assert(static_cast<int>(ScalarType::float32) == 1 && static_cast<int>(ScalarType::float64) == 2 &&
              static_cast<int>(ScalarType::int32) == 3 && static_cast<int>(ScalarType::int64) == 4 &&
              static_cast<int>(ScalarType::bool_) == 5);

// A tensor without memory is left to the checks, whether it may be depends on its sizes; and so is one without sizes.
bool is_plain(const tk_tensor& tensor) {
  return tensor.ndim >= 0 && tensor.ndim <= kMaxRank && tensor.data != nullptr &&
         (tensor.shape != nullptr || tensor.ndim == 0);
}

// Appends words and adds them up on the way.
struct Writer {
  uint64_t* next;
  uint64_t sum;

  void add(uint64_t word) {
    *next++ = word;
    sum += word;
  }

  // rank, dtype | device, with address % 128 and whether it is dense in bits 8 to 15 of its type, which are zero |
  // sizes | strides
  void add(const tk_tensor& tensor) {
    const uint64_t address = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
    add(load_word(&tensor.ndim));
    add(load_word(&tensor.device) ^ (address % 128 << 9 | static_cast<uint64_t>(tensor.strides == nullptr) << 8));
    if (tensor.ndim == 2) [[likely]] {  // most are
      add(static_cast<uint64_t>(tensor.shape[0]));
      add(static_cast<uint64_t>(tensor.shape[1]));
      if (tensor.strides == nullptr) return;
      add(static_cast<uint64_t>(tensor.strides[0]));
      add(static_cast<uint64_t>(tensor.strides[1]));
      return;
    }
    add_all(tensor.shape, tensor.ndim);
    if (tensor.strides != nullptr) add_all(tensor.strides, tensor.ndim);
  }

  void add_all(const int64_t* values, int32_t count) {
#pragma GCC unroll 1
    for (int32_t i = 0; i < count; ++i) add(static_cast<uint64_t>(values[i]));
  }
};

}  // namespace

bool make_key(const Driver& driver, const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
              const int32_t* axes, CallKey* key) {
  constexpr int kMostOfTensor = 2 + 2 * kMaxRank;
  const uint64_t* const end =
      key->words + CallKey::kMaxWords - kMostOfTensor - kMaxAxes;  // room for one more and the axes
  Writer writer = {key->words, reinterpret_cast<uintptr_t>(&kernel)};
  unsigned long long context = 0;
  if (driver.cuCtxGetId(nullptr, &context) != CUDA_SUCCESS) return false;
  writer.add(context);
  const bool is_short = 1 + kernel.num_tensors * kMostOfTensor + kernel.num_params + kMaxAxes <= CallKey::kMaxWords;
  for (const ScalarType *kind = kernel.kinds, *last = kind + kernel.num_params; kind < last; ++kind) {
    if (!is_short && writer.next > end) return false;
    if (*kind != ScalarType::none) {
      writer.add(load_word(scalars++) & kScalarBits[static_cast<int>(*kind)]);
      continue;
    }
    const tk_tensor* tensor = *tensors++;
    if (tensor == nullptr) {
      writer.add(0);  // of a rank and dtype that no tensor has
      continue;
    }
    if (!is_plain(*tensor)) return false;
    writer.add(*tensor);
  }
  for (int32_t i = 0; i < kernel.num_plain_axes; ++i) writer.add(static_cast<uint64_t>(axes[i]));
  key->num_words = static_cast<int32_t>(writer.next - key->words);
  key->sum = writer.sum;
  return true;
}

Plan& plan_of(const CallKey& key) {
  constexpr uint64_t kSpread = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio
  return plans[(key.sum * kSpread >> 32) % kNumPlans];
}

bool is_plan_of(const Plan& plan, const KernelDesc& kernel, const CallKey& key) {
  if (plan.key.sum != key.sum || plan.kernel != &kernel || plan.key.num_words != key.num_words) return false;
  uint64_t difference = 0;
  for (int32_t i = 0; i < key.num_words; ++i) difference |= plan.key.words[i] ^ key.words[i];
  return difference == 0;
}

void start_plan(Plan* plan) {
  plan->kernel = nullptr;
  plan->ready.num_launches = plan->ready.num_arguments = plan->ready.num_addresses = 0;
}

void note_launch(const CUlaunchConfig& config, const LaunchDesc& launch, int32_t index, void* const* arguments,
                 const ArgumentDesc* descs, int num_descs, ReadyCall* ready) {
  if (ready->num_launches < 0) return;
  const bool is_plain = !launch.cooperative && launch.cluster[0] * launch.cluster[1] * launch.cluster[2] == 1;
  int32_t num_addresses = ready->num_addresses;
  for (int i = 0; i < num_descs; ++i) num_addresses += descs[i].tensor >= 0;
  if (descs == nullptr || !is_plain || ready->num_launches == ReadyCall::kMaxLaunches ||
      ready->num_arguments + num_descs > ReadyCall::kMaxArguments || num_addresses > ReadyCall::kMaxAddresses) {
    ready->num_launches = -1;
    return;
  }
  ReadyCall::Launch& noted = ready->launches[ready->num_launches++];
  noted = {nullptr, config, ready->arguments + ready->num_arguments, &launch, index};
  for (int i = 0; i < num_descs; ++i, ++ready->num_arguments) {
    uint64_t* value = &ready->values[ready->num_arguments];
    ready->arguments[ready->num_arguments] = value;
    std::memcpy(value, arguments[i], static_cast<size_t>(descs[i].size));
    if (descs[i].tensor < 0) continue;
    ready->addresses[ready->num_addresses++] = {static_cast<uint8_t>(ready->num_arguments),
                                                static_cast<uint8_t>(descs[i].tensor)};
  }
}

tk_status launch_ready(Plan& plan, const Driver& driver, const tk_tensor* const* tensors, tk_stream stream) {
  ReadyCall& ready = plan.ready;
  for (int32_t i = 0; i < ready.num_addresses; ++i) {
    const ReadyCall::Address address = ready.addresses[i];
    ready.values[address.value] = reinterpret_cast<uintptr_t>(data_of(tensors[address.tensor]));
  }
  for (int32_t i = 0; i < ready.num_launches; ++i) {
    ReadyCall::Launch& launch = ready.launches[i];
    CUlaunchAttribute attribute;
    launch.config.hStream = stream;
    launch.config.attrs = &attribute;
    launch.config.numAttrs = launch.desc->pdl && is_pdl_on() ? fill_pdl(&attribute) : 0;
    const CUresult result = driver.cuLaunchKernelEx(&launch.config, launch.function, launch.arguments, nullptr);
    if (result != CUDA_SUCCESS) [[unlikely]]
      return fail_launch(driver, *plan.kernel, *plan.device, *launch.desc, result);
  }
  return TK_OK;
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
  for (int32_t i = 0; i < plan->ready.num_launches; ++i) {
    ReadyCall::Launch& launch = plan->ready.launches[i];
    launch.function = launch.index < Plan::kMaxLaunches ? plan->functions[launch.index] : nullptr;
    if (launch.function == nullptr) plan->ready.num_launches = -1;
  }
  plan->key.num_words = key.num_words;
  plan->key.sum = key.sum;
  std::memcpy(plan->key.words, key.words, static_cast<size_t>(key.num_words) * sizeof(uint64_t));
}

}  // namespace tk
