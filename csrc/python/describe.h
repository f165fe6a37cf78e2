// What the library and the machine hold, as Python dicts.
#pragma once

#include <pybind11/pybind11.h>

#include "tilekernels/tilekernels.h"

namespace tk::python {

// Python's view of one kernel: {"name", "params": [...], "axes": [...]}, with the words of manifest.json.
pybind11::dict describe_kernel(const tk_kernel* kernel);

// One dict per GPU: index, name, capability, num_sms, memory, arch (of this library, or None), wanted_arch. Empty
// without a driver.
pybind11::list describe_devices();

// Whether a variant with these axis values exists for `arch` (None: for any). Axes that are not named may have any
// value.
bool covers(const std::string& kernel, const pybind11::dict& axes, const pybind11::object& arch);

}  // namespace tk::python
