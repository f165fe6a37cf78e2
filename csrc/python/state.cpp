#include "state.h"

namespace tk::python {

State state;

PyObject* error_class(tk_status status) {
  const auto or_default = [](PyObject* chosen, PyObject* fallback) { return chosen != nullptr ? chosen : fallback; };
  switch (status) {
    case TK_INVALID_ARGUMENT: return or_default(state.argument_error, PyExc_ValueError);
    case TK_INVALID_TYPE: return or_default(state.argument_type_error, PyExc_TypeError);
    case TK_NOT_BUILT:
    case TK_NO_KERNEL_FOR_DEVICE: return or_default(state.not_built_error, PyExc_RuntimeError);
    default: return or_default(state.device_error, PyExc_RuntimeError);
  }
}

PyObject* raise_status(tk_status status) {
  PyErr_SetString(error_class(status), tk_last_error());
  return nullptr;
}

}  // namespace tk::python
