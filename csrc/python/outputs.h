// Outputs that a call asks for instead of giving them: made by torch's allocator after the check and before the launch.
//
// A request is a tuple (dtype, alignment, *sizes). Alignment 0 asks for a dense tensor; otherwise for a matrix that is stored
// column after column, each starting on a multiple of `alignment` rows, whose storage owns the rows in between.
#pragma once

#include <Python.h>

#include "entry.h"

namespace tk::python {

inline bool is_request(PyObject* value) { return PyTuple_CheckExact(value); }

// A new tensor on cuda:`device`; null with a Python error set.
PyObject* make_output(const Entry& entry, const Argument& argument, PyObject* request, int32_t device);

}  // namespace tk::python
