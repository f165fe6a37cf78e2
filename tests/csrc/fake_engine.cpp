// The other half of the fake libcuda.so.1: what engines call themselves. Memory that is the host's, contexts, streams
// and graphs that count the launches captured into them.
#include "fake_driver.h"

#include <atomic>
#include <cstring>
#include <map>

using namespace fake;

namespace {

struct Graph {
  int num_launches;
};
std::mutex mutex;
std::map<void*, Graph*> capturing;  // by stream
std::atomic<int> num_capturing;     // so that a launch takes no lock while there is none, as in a driver

}  // namespace

bool fake::is_capturing() { return num_capturing > 0; }

bool fake::add_captured(void* stream) {
  if (!is_capturing()) return false;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = capturing.find(stream);
  if (found == capturing.end()) return false;
  ++found->second->num_launches;
  return true;
}

// ---- Contexts ------------------------------------------------------------------------------------------------------

FAKE cuCtxCreate_v2(void** context, unsigned, int device) {
  NEEDS_INIT;
  current = new Context{device, false};
  *context = current;
  return kSuccess;
}

// Other threads keep the destroyed context as their current one: it is never freed.
FAKE cuCtxDestroy_v2(void* context) {
  NEEDS_INIT;
  static_cast<Context*>(context)->destroyed = true;
  if (current == context) current = nullptr;
  return kSuccess;
}

FAKE cuCtxSynchronize() {
  NEEDS_CONTEXT;
  return kSuccess;
}

// ---- Memory --------------------------------------------------------------------------------------------------------

FAKE cuMemAlloc_v2(void** memory, size_t num_bytes) {
  NEEDS_CONTEXT;
  FAIL_IF_ASKED("cuMemAlloc_v2");
  // As aligned as the driver's memory is.
  *memory = std::aligned_alloc(256, (num_bytes + 255) / 256 * 256);
  if (*memory == nullptr) return kOutOfMemory;
  std::memset(*memory, 0, num_bytes);
  return kSuccess;
}

FAKE cuMemFree_v2(void* memory) {
  NEEDS_CONTEXT;
  std::free(memory);
  return kSuccess;
}

FAKE cuMemsetD8_v2(void* memory, unsigned char value, size_t num_bytes) {
  NEEDS_CONTEXT;
  std::memset(memory, value, num_bytes);
  return kSuccess;
}

FAKE cuMemcpyHtoD_v2(void* to, const void* from, size_t num_bytes) {
  NEEDS_CONTEXT;
  std::memcpy(to, from, num_bytes);
  return kSuccess;
}

FAKE cuMemcpyDtoH_v2(void* to, const void* from, size_t num_bytes) {
  NEEDS_CONTEXT;
  std::memcpy(to, from, num_bytes);
  return kSuccess;
}

// ---- Streams and graphs --------------------------------------------------------------------------------------------

FAKE cuStreamCreate(void** stream, unsigned) {
  NEEDS_CONTEXT;
  *stream = new char;
  return kSuccess;
}

FAKE cuStreamDestroy_v2(void* stream) {
  delete static_cast<char*>(stream);
  return kSuccess;
}

FAKE cuStreamSynchronize(void*) {
  NEEDS_CONTEXT;
  return kSuccess;
}

FAKE cuStreamBeginCapture_v2(void* stream, int) {
  NEEDS_CONTEXT;
  const std::lock_guard<std::mutex> lock(mutex);
  capturing[stream] = new Graph{0};
  num_capturing = static_cast<int>(capturing.size());
  return kSuccess;
}

FAKE cuStreamEndCapture(void* stream, void** graph) {
  NEEDS_CONTEXT;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = capturing.find(stream);
  if (found == capturing.end()) return kInvalidValue;
  *graph = found->second;
  capturing.erase(found);
  num_capturing = static_cast<int>(capturing.size());
  return kSuccess;
}

FAKE cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  *executable = new Graph(*static_cast<Graph*>(graph));
  return kSuccess;
}

FAKE cuGraphLaunch(void* executable, void*) {
  NEEDS_CONTEXT;
  record("{\"call\": \"cuGraphLaunch\", \"num_launches\": " + number(static_cast<Graph*>(executable)->num_launches) +
         "}");
  return kSuccess;
}

FAKE cuGraphDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return kSuccess;
}

FAKE cuGraphExecDestroy(void* executable) {
  delete static_cast<Graph*>(executable);
  return kSuccess;
}
