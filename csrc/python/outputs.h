// Outputs that a call asks for instead of giving them: made by torch's allocator after the check and before the launch.
//
// A request is a tuple (dtype, alignment, *sizes). Alignment 0 asks for a dense tensor; otherwise for a matrix that is
// stored column after column, each starting on a multiple of `alignment` rows, whose storage owns the rows in between.
// A size is a number, or (argument, dim, factor, divisor): that size of the argument-th argument, times factor, over
// divisor, rounded up.
#pragma once

#include <Python.h>

#include "entry.h"

namespace tk::python {

// Other tuples are a caller's mistake, and refused like anything that is no tensor.
bool is_request(PyObject* value);

// Finds the ways into torch's allocator; once, when torch is known.
void open_allocator();

// A new tensor on cuda:`device`; null with a Python error set. tensors: the kernel's, as tk_launch takes them.
PyObject* make_output(const Entry& entry, const Argument& argument, PyObject* request, const tk_tensor* const* tensors,
                      int32_t device);

}  // namespace tk::python
