// How much scratch memory a call needs, told by the same checks that the call would make.
#include "answer.h"
#include "call.h"
#include "check.h"
#include "device.h"

namespace tk {

namespace {

constexpr int32_t kMaxTensors = 128;  // codegen refuses more

const WorkspaceDesc* find_workspace(const Signature& signature, int32_t tensor) {
  for (int32_t i = 0; i < signature.num_workspaces; ++i) {
    if (signature.workspaces[i].tensor == tensor) return &signature.workspaces[i];
  }
  return nullptr;
}

bool is_workspace(const KernelDesc& kernel, int32_t tensor) {
  for (int32_t i = 0; i < kernel.num_keys; ++i) {
    const KeyDesc& key = kernel.keys[i];
    if (key.num > 0 && find_workspace(kernel.signatures[key.signature], tensor) != nullptr) return true;
  }
  return false;
}

tk_status count_sms(int32_t asked, int64_t* num_sms) {
  *num_sms = asked;
  if (asked > 0) return TK_OK;
  const Driver* driver = nullptr;
  const Device* device = nullptr;
  TK_RETURN_IF_ERROR(find_driver(&driver));
  TK_RETURN_IF_ERROR(find_current_device(*driver, &device));
  *num_sms = device->num_sms;
  return TK_OK;
}

tk_workspace_info describe(const Frame& frame, const WorkspaceDesc& workspace) {
  const uint32_t word = static_cast<uint32_t>(workspace.dtype);
  tk_workspace_info info = {};
  info.dtype = {static_cast<uint8_t>(word), static_cast<uint8_t>(word >> 8), static_cast<uint16_t>(word >> 16)};
  info.ndim = workspace.rank;
  workspace.shape(frame, info.shape);
  info.num_bytes = itemsize_of(workspace.dtype);
  for (int32_t i = 0; i < workspace.rank; ++i) info.num_bytes *= info.shape[i];
  return info;
}

}  // namespace

tk_status workspace_size(const KernelDesc& kernel, int32_t tensor, const tk_tensor* const* tensors,
                         const tk_scalar* scalars, const int32_t* axes, int32_t num_sms, tk_workspace_info* info) {
  const char* name = tensor_param(kernel, tensor).name;
  if (!is_workspace(kernel, tensor)) {
    return fail(TK_INVALID_ARGUMENT, "%s: param must be a workspace of a size that the library knows, got %s",
                kernel.name, name);
  }
  // What a caller already has as workspaces does not matter.
  const tk_tensor* others[kMaxTensors];
  for (int32_t i = 0; i < kernel.num_tensors; ++i) others[i] = is_workspace(kernel, i) ? nullptr : tensors[i];
  Frame frame;
  TK_RETURN_IF_ERROR(check_frame(frame, kernel, others, scalars, axes));
  const WorkspaceDesc* workspace = find_workspace(*frame.signature, tensor);
  if (workspace == nullptr) return answer(kernel.name, tk_workspace_info{}, info);  // none here: 0 bytes
  if (workspace->num_sms >= 0) {
    TK_RETURN_IF_ERROR(count_sms(num_sms, &frame.symbols[workspace->num_sms]));
    frame.bound |= 1u << workspace->num_sms;
  }
  const uint32_t missing = workspace->symbols & ~frame.bound;
  for (int32_t i = 0; i < frame.signature->num_symbols; ++i) {
    if ((missing >> i & 1) == 0) continue;
    return fail(TK_INVALID_ARGUMENT, "%s: the size of %s depends on %s: the tensors that have it must be given",
                kernel.name, name, frame.signature->symbols[i]);
  }
  return answer(kernel.name, describe(frame, *workspace), info);
}

}  // namespace tk
