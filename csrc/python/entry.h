// One kernel as Python sees it: what the two functions `<family>_<kernel>` and `check_<family>_<kernel>` need to read
// their positional arguments. Filled once at import from the C interface; calls only read it.
#pragma once

#include <Python.h>

#include <string>
#include <vector>

#include "tilekernels/tilekernels.h"

namespace tk::python {

constexpr int kMaxTensors = 128, kMaxScalars = 32, kMaxAxes = 16;  // of one kernel; import refuses more

enum class Kind { tensor, float32, float64, int32, int64, boolean, number, flag, choice };

// A positional argument: a parameter, or a plain axis (number, flag, choice).
struct Argument {
  Kind kind;
  const char* name;
  bool written;                   // a tensor that the kernel writes: it may be asked for instead of given
  int tensor;                     // its index among the tensors; -1: it is none
  std::vector<PyObject*> labels;  // of a choice: interned strings, so that a literal is found by its address
};

struct Entry {
  const tk_kernel* kernel = nullptr;
  std::string name;        // "moe.topk_gate"
  std::string identifier;  // "moe_topk_gate"
  std::string check_name;  // "check_moe_topk_gate"
  std::vector<Argument> arguments;
  PyMethodDef call_method{}, check_method{};
};

// The kernels of the library and its packs from number `first` on; throws std::runtime_error for one that this module
// cannot call. Entries live as long as the process: Python functions point to them.
std::vector<Entry*> make_entries(int32_t first);

// Adds both functions of each entry to a module. False: a Python error is set.
bool add_functions(PyObject* module, const std::vector<Entry*>& entries);

}  // namespace tk::python
