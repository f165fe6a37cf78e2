// The two functions behind every kernel: positional METH_FASTCALL, with the Entry as `self`. This is the path of each
// launch from Python; it allocates nothing but the outputs it is asked for and keeps the GIL, which a launch of a few
// microseconds is not worth giving away.
#pragma once

#include <Python.h>

#include "entry.h"

namespace tk::python {

// The Python object that carries an Entry to the functions below.
PyObject* make_self(const Entry& entry);

// Launches on torch's current stream if every tensor is exactly torch's own and one is on CUDA, else calls the
// fallback. Returns the outputs that were asked for (outputs.h), None where there are none.
PyObject* call_kernel(PyObject* self, PyObject* const* args, Py_ssize_t num_args);

// Checks the arguments; written tensors may be None. Tensors that cannot be looked at (fake, meta, subclasses) are left
// to the fallback of the call that follows.
PyObject* check_kernel(PyObject* self, PyObject* const* args, Py_ssize_t num_args);

}  // namespace tk::python
