// What Python tells the module once after import, and the way from a tk_status to a Python exception.
#pragma once

#include <Python.h>

#include "exchange.h"

namespace tk::python {

// Owned references, replaced by the set_ functions and kept for the life of the process. All access is under the GIL.
struct State {
  PyObject* tensor_type = nullptr;     // torch.Tensor
  PyObject* parameter_type = nullptr;  // torch.nn.Parameter
  const ExchangeApi* exchange = nullptr;
  PyObject* empty_strided = nullptr;   // torch.empty_strided
  PyObject* device_type = nullptr;     // torch.device
  PyObject* dtype_type = nullptr;      // torch.dtype
  PyObject* fallback = nullptr;        // fallback(kernel name, arguments)
  PyObject* check_fallback = nullptr;  // the same for a check; may stay unset
  PyObject* argument_error = nullptr;
  PyObject* argument_type_error = nullptr;
  PyObject* not_built_error = nullptr;
  PyObject* device_error = nullptr;
};

extern State state;

// The exception class of a status; Python's own where set_errors was not called.
PyObject* error_class(tk_status status);

// Sets the Python error of a failed call of the library, with the sentence of tk_last_error. Returns null.
PyObject* raise_status(tk_status status);

}  // namespace tk::python
