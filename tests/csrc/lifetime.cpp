// Loads and unloads the library and the driver in the order that the arguments say, as a program with plugins does:
//
//   lifetime libtilekernels.so.0 STEP ...
//
// Steps: open, close, launch, open_driver, close_driver, fork (a child that does nothing), at_exit and static (launch
// in a handler of exit, and in a destructor of a global), threads (four that launch until the process is gone). Prints
// each launch's status.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tilekernels/tilekernels.h"

namespace {

const char* path = nullptr;
void *library = nullptr, *driver = nullptr;

template <typename Function>
Function* find(const char* name) {
  // By path: a plugin host looks a library up anew, and it stays in place after dlclose.
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  auto* function = handle != nullptr ? reinterpret_cast<Function*>(dlsym(handle, name)) : nullptr;
  if (function == nullptr) {
    std::fprintf(stderr, "no %s: %s\n", name, dlerror());
    std::_Exit(2);
  }
  dlclose(handle);
  return function;
}

tk_status launch() {
  void* previous = nullptr;
  const tk_kernel* kernel = nullptr;
  tk_status status = find<decltype(tk_enter_device)>("tk_enter_device")(0, &previous);
  if (status == TK_OK) status = find<decltype(tk_find)>("tk_find")("demo.transpose", &kernel);
  if (status != TK_OK) return status;
  const int64_t x_shape[] = {100, 200}, out_shape[] = {200, 100};
  tk_tensor x = {reinterpret_cast<void*>(0x10000), {TK_CUDA, 0}, 2, {TK_BFLOAT, 16, 1}, x_shape, nullptr, 0};
  tk_tensor out = {reinterpret_cast<void*>(0x20000), {TK_CUDA, 0}, 2, {TK_BFLOAT, 16, 1}, out_shape, nullptr, 0};
  const tk_tensor* const tensors[] = {&x, &out};
  return find<decltype(tk_launch)>("tk_launch")(kernel, tensors, nullptr, nullptr, nullptr);
}

void show_launch() {
  const tk_status status = launch();
  std::printf("%s\n", find<decltype(tk_status_name)>("tk_status_name")(status));
  std::fflush(stdout);
}

struct Global {
  bool active = false;
  ~Global() {
    if (active) show_launch();
  }
} global;

void start_threads() {
  for (int i = 0; i < 4; ++i) {
    std::thread([] {
      while (launch() == TK_OK) {
      }
    }).detach();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

void run_child() {
  const pid_t child = fork();
  if (child == 0) std::_Exit(0);
  int state = 0;
  waitpid(child, &state, 0);
  std::printf("child %d\n", state);
}

void step(const char* name) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("open")) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (is("close")) dlclose(library);
  if (is("launch")) show_launch();
  if (is("open_driver")) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (is("close_driver")) dlclose(driver);
  if (is("fork")) run_child();
  if (is("at_exit")) std::atexit(show_launch);
  if (is("static")) global.active = true;
  if (is("threads")) start_threads();
}

}  // namespace

int main(int num_arguments, char** arguments) {
  path = arguments[1];
  for (int i = 2; i < num_arguments; ++i) step(arguments[i]);
  return 0;
}
