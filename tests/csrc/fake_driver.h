// What the two halves of the fake libcuda.so.1 share: fake_driver.cpp has the calls of the library, fake_engine.cpp
// those of the programs that use it.
#pragma once

#include <cstdlib>
#include <mutex>
#include <string>

#include <fcntl.h>
#include <unistd.h>

#define FAKE extern "C" __attribute__((visibility("default"))) int

namespace fake {

enum {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNotFound = 500,
  kContextIsDestroyed = 709,
  kStreamCaptureUnsupported = 900,
};

struct Context {
  int device;
  bool primary;
  bool destroyed = false;
};

extern bool initialised;
extern thread_local Context* current;

// kSuccess if a usable context is current in this thread.
inline int context_state() {
  if (current == nullptr) return kInvalidContext;
  return current->destroyed ? kContextIsDestroyed : kSuccess;
}

// One line of the log.
inline void record(const std::string& line) {
  const char* path = std::getenv("FAKE_CUDA_LOG");
  if (path == nullptr) return;
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
  const std::string text = line + "\n";
  if (write(file, text.data(), text.size()) < 0) std::abort();
  close(file);
}

inline std::string number(long long value) { return std::to_string(value); }

// The error that $FAKE_CUDA_FAIL asks for this call, else 0.
int failure(const char* call);

// Whether launches on this stream are being captured into a graph, which then counts one more; on any stream.
bool add_captured(void* stream);
bool is_capturing();

}  // namespace fake

#define FAIL_IF_ASKED(call) \
  if (const int asked = fake::failure(call)) return asked
#define NEEDS_INIT \
  if (!fake::initialised) return fake::kNotInitialized
#define NEEDS_CONTEXT \
  if (const int state = fake::context_state()) return state
