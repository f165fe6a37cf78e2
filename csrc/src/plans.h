// What a thread's last calls came to, so that a call like an earlier one goes straight to its launches.
//
// Checking and choosing read only shapes, strides, dtypes, alignments, scalars and axes. Those are packed into a key;
// where a key is met again, so is its answer. Serving repeats a few dozen calls, and the checks of a cast cost 0.3 us
// of the 3.5 that a launch takes. Plans belong to a thread: no lock, and nothing to allocate.
#pragma once

#include "driver.h"
#include "launcher.h"
#include "registry.h"

namespace tk {

struct Device;

// Everything that checks, guards and grids depend on: one word and its sizes and strides for each tensor, one for each
// scalar and axis, the context. Addresses count by their low bits alone, which is what guards ask for.
struct CallKey {
  static constexpr int kMaxWords = 128;
  int32_t num_words;
  uint64_t sum;  // of the words and the kernel's address
  uint64_t words[kMaxWords];
};

// The launches of a call as the driver takes them. In a call with the same key only addresses and the stream differ, so
// that it costs their patching: the launch function would go through tables, frame and symbols, which the driver's own
// work has driven out of the first cache each time.
struct ReadyCall {
  static constexpr int kMaxLaunches = 3, kMaxArguments = 32, kMaxAddresses = 16;
  struct Launch {
    CUfunction function;
    CUlaunchConfig config;
    void** arguments;
    const LaunchDesc* desc;
    int32_t index;  // among the variant's launches
  };
  struct Address {
    uint8_t value, tensor;  // values[value] is the address of that tensor
  };
  // -1: by the launch function (tensor maps, cooperative grids and clusters, long argument lists)
  int32_t num_launches;
  int32_t num_arguments, num_addresses;
  Address addresses[kMaxAddresses];
  Launch launches[kMaxLaunches];
  void* arguments[kMaxArguments];
  uint64_t values[kMaxArguments];
};

struct Plan {
  static constexpr int kMaxLaunches = 8;
  const KernelDesc* kernel;  // null: nothing is planned here
  const VariantDesc* variant;
  const Device* device;
  ReadyCall ready;
  CallKey key;
  // For the launch function, where the call is not ready
  const Signature* signature;
  uint32_t bound;
  int64_t symbols[kMaxSymbols];
  // Of the key's context, which saves the driver finding them in every launch (0.1 us); null until known
  CUfunction functions[kMaxLaunches];
};

// False where the call is too long for a key, where there is no context, or where the tensors are not even readable.
bool make_key(const Driver& driver, const KernelDesc& kernel, const tk_tensor* const* tensors, const tk_scalar* scalars,
              const int32_t* axes, CallKey* key);

// The one place where this thread keeps the plan of such a call, whatever stands there now.
Plan& plan_of(const CallKey& key);

bool is_plan_of(const Plan& plan, const KernelDesc& kernel, const CallKey& key);

// Empties a plan, for the launches of a call that is under way.
void start_plan(Plan* plan);

// One launch more of the call; after one that cannot be repeated by patching its addresses, none is.
void note_launch(const CUlaunchConfig& config, const LaunchDesc& launch, int32_t index, void* const* arguments,
                 const ArgumentDesc* descs, int num_descs, ReadyCall* ready);

// The launches of a call whose plan is ready.
tk_status launch_ready(Plan& plan, const Driver& driver, const tk_tensor* const* tensors, tk_stream stream);

// After a call that succeeded.
void keep_plan(const Driver& driver, const Frame& frame, const Device& device, const VariantDesc& variant,
               const CallKey& key, Plan* plan);

}  // namespace tk
