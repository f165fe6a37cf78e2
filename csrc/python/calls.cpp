#include "calls.h"

#include <climits>
#include <vector>

#include "outputs.h"
#include "state.h"

namespace tk::python {

namespace {

struct SelfObject {
  PyObject_HEAD const Entry* entry;
};

// How far the arguments could be read.
enum class Read { failed, opaque, on_host, on_cuda };

// The arguments in the form that tk_launch takes. Not initialised on purpose: only what is read is written.
struct Arguments {
  tk_tensor views[kMaxTensors];
  const tk_tensor* tensors[kMaxTensors];
  tk_scalar scalars[kMaxScalars];
  int32_t axes[kMaxAxes];
  int32_t device;
  int32_t num_requests;            // outputs that are still to be made
  int32_t requested[kMaxTensors];  // which tensors
  int32_t arguments[kMaxTensors];  // and which arguments they are
};

// ---- Refusals ------------------------------------------------------------------------------------------------------

[[gnu::cold]] bool refuse_type(const Entry& entry, const Argument& argument, const char* requirement, PyObject* value) {
  PyErr_Format(error_class(TK_INVALID_TYPE), "%s: %s must be %s, got %s", entry.name.c_str(), argument.name,
               requirement, value == Py_None ? "None" : Py_TYPE(value)->tp_name);
  return false;
}

[[gnu::cold]] bool refuse_value(const Entry& entry, const Argument& argument, const char* requirement,
                                PyObject* value) {
  PyErr_Format(error_class(TK_INVALID_ARGUMENT), "%s: %s must %s, got %R", entry.name.c_str(), argument.name,
               requirement, value);
  return false;
}

[[gnu::cold]] bool refuse_choice(const Entry& entry, const Argument& argument, PyObject* value) {
  std::string choices;
  for (size_t i = 0; i < argument.labels.size(); ++i) {
    if (i > 0) choices += i + 1 == argument.labels.size() ? " or " : ", ";
    const char* label = PyUnicode_AsUTF8(argument.labels[i]);
    choices += label == nullptr ? std::string("?") : "'" + std::string(label) + "'";
  }
  return refuse_value(entry, argument, ("be " + choices).c_str(), value);
}

[[gnu::cold]] PyObject* refuse_count(const Entry& entry, Py_ssize_t num_args) {
  std::string names;
  for (const Argument& argument : entry.arguments) names += (names.empty() ? "" : ", ") + std::string(argument.name);
  PyErr_Format(error_class(TK_INVALID_TYPE), "%s: takes %zu positional arguments (%s), got %zd", entry.name.c_str(),
               entry.arguments.size(), names.c_str(), num_args);
  return nullptr;
}

// ---- Reading scalars -----------------------------------------------------------------------------------------------

// PyBool is a PyLong: True for a count is a slip, not a number.
bool is_int(PyObject* value) { return PyLong_Check(value) && !PyBool_Check(value); }

bool read_float(const Entry& entry, const Argument& argument, PyObject* value, double* out) {
  if (PyFloat_Check(value)) {
    *out = PyFloat_AS_DOUBLE(value);
    return true;
  }
  if (!is_int(value)) return refuse_type(entry, argument, "a float", value);
  *out = PyLong_AsDouble(value);
  if (*out != -1.0 || PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  return refuse_value(entry, argument, "be a float", value);
}

bool read_int(const Entry& entry, const Argument& argument, PyObject* value, int64_t low, int64_t high, int64_t* out) {
  if (!is_int(value)) return refuse_type(entry, argument, "an int", value);
  int overflow = 0;
  *out = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow == 0 && *out >= low && *out <= high) return true;
  return refuse_value(entry, argument, high == INT32_MAX ? "fit into 32 bits" : "fit into 64 bits", value);
}

bool read_int32(const Entry& entry, const Argument& argument, PyObject* value, int32_t* out) {
  int64_t wide = 0;
  if (!read_int(entry, argument, value, INT32_MIN, INT32_MAX, &wide)) return false;
  *out = static_cast<int32_t>(wide);
  return true;
}

bool read_bool(const Entry& entry, const Argument& argument, PyObject* value, int32_t* out) {
  if (!PyBool_Check(value)) return refuse_type(entry, argument, "a bool", value);
  *out = value == Py_True;
  return true;
}

bool read_choice(const Entry& entry, const Argument& argument, PyObject* value, int32_t* out) {
  if (!PyUnicode_Check(value)) return refuse_type(entry, argument, "a string", value);
  const int32_t count = static_cast<int32_t>(argument.labels.size());
  for (*out = 0; *out < count; ++*out) {  // a literal of the caller is interned as the labels are
    if (argument.labels[*out] == value) return true;
  }
  for (*out = 0; *out < count; ++*out) {
    if (PyUnicode_Compare(argument.labels[*out], value) == 0) return true;
  }
  return refuse_choice(entry, argument, value);
}

bool read_scalar(const Entry& entry, const Argument& argument, PyObject* value, tk_scalar* out) {
  double number = 0;
  switch (argument.kind) {
    case Kind::float32:
      if (!read_float(entry, argument, value, &number)) return false;
      out->f32 = static_cast<float>(number);
      return true;
    case Kind::float64: return read_float(entry, argument, value, &out->f64);
    case Kind::int32: return read_int32(entry, argument, value, &out->i32);
    case Kind::int64: return read_int(entry, argument, value, INT64_MIN, INT64_MAX, &out->i64);
    default: return read_bool(entry, argument, value, &out->b);
  }
}

bool read_axis(const Entry& entry, const Argument& argument, PyObject* value, int32_t* out) {
  switch (argument.kind) {
    case Kind::number: return read_int32(entry, argument, value, out);
    case Kind::flag: return read_bool(entry, argument, value, out);
    default: return read_choice(entry, argument, value, out);
  }
}

// ---- Reading all arguments -----------------------------------------------------------------------------------------

bool is_exact_tensor(PyObject* value) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  return type == state.tensor_type || type == state.parameter_type;
}

bool is_tensor(PyObject* value) {
  return state.tensor_type != nullptr &&
         PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject*>(state.tensor_type)) != 0;
}

// Views the tensor, or returns Read::opaque for one that only torch's dispatcher understands: a subclass (fake tensors,
// DTensor), or a tensor without memory (meta, a batch of vmap), which the exchange refuses.
Read read_tensor(const Entry& entry, const Argument& argument, PyObject* value, tk_tensor* view) {
  if (is_exact_tensor(value)) [[likely]] {
    if (state.exchange->dltensor_from_py_object_no_sync(value, view) == 0) [[likely]] {
      return view->device.device_type == TK_CUDA ? Read::on_cuda : Read::on_host;
    }
    PyErr_Clear();
    return Read::opaque;
  }
  if (is_tensor(value)) return Read::opaque;
  refuse_type(entry, argument, "a tensor", value);
  return Read::failed;
}

Read read_arguments(const Entry& entry, PyObject* const* values, Arguments& out) {
  Read result = Read::on_host;
  int num_tensors = 0, num_scalars = 0, num_axes = 0;
  PyObject* const* const first = values;
  out.num_requests = 0;
  for (const Argument& argument : entry.arguments) {
    PyObject* value = *values++;
    if (argument.kind == Kind::tensor) {
      const int index = num_tensors++;
      out.tensors[index] = nullptr;
      if (value == Py_None) continue;
      if (argument.written && is_request(value)) {
        out.requested[out.num_requests] = index;
        out.arguments[out.num_requests++] = static_cast<int32_t>(values - first) - 1;
        continue;
      }
      const Read read = read_tensor(entry, argument, value, &out.views[index]);
      if (read == Read::failed) return read;
      out.tensors[index] = &out.views[index];
      if (read == Read::opaque || result == Read::opaque) {
        result = Read::opaque;
      } else if (read == Read::on_cuda && result == Read::on_host) {
        result = read;
        out.device = out.views[index].device.device_id;
      }
    } else if (argument.kind < Kind::number) {
      if (!read_scalar(entry, argument, value, &out.scalars[num_scalars++])) return Read::failed;
    } else {
      if (!read_axis(entry, argument, value, &out.axes[num_axes++])) return Read::failed;
    }
  }
  return result;
}

const Entry& entry_of(PyObject* self) { return *reinterpret_cast<SelfObject*>(self)->entry; }

// ---- Calling -------------------------------------------------------------------------------------------------------

[[gnu::cold]] PyObject* raise_unset(const Entry& entry) {
  PyErr_Format(PyExc_RuntimeError,
               "%s: set_torch, set_allocator and set_fallback must be called first; import tilekernels does",
               entry.name.c_str());
  return nullptr;
}

PyObject* call_fallback(PyObject* fallback, const Entry& entry, PyObject* const* values, Py_ssize_t count) {
  PyObject* arguments = PyTuple_New(count);
  if (arguments == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(arguments, i, Py_NewRef(values[i]));
  PyObject* result = PyObject_CallFunction(fallback, "sO", entry.name.c_str(), arguments);
  Py_DECREF(arguments);
  return result;
}

// Whether the launch was asked of the driver; else a Python error is set.
bool launch(const Entry& entry, const Arguments& arguments) {
  void* previous = nullptr;
  tk_status status = tk_enter_device(arguments.device, &previous);
  if (status != TK_OK) [[unlikely]]
    return raise_status(status) != nullptr;
  void* stream = nullptr;
  const int failed = state.exchange->current_work_stream(TK_CUDA, arguments.device, &stream);
  if (failed == 0) [[likely]] {
    status = tk_launch(entry.kernel, arguments.tensors, arguments.scalars, arguments.axes, stream);
  }
  // Before the way back, which may leave a message of its own
  if (failed == 0 && status != TK_OK) [[unlikely]]
    raise_status(status);
  if (previous != nullptr) [[unlikely]] {
    const tk_status left = tk_leave_device(previous);
    if (failed == 0 && status == TK_OK && left != TK_OK) return raise_status(left) != nullptr;
  }
  return failed == 0 && status == TK_OK;
}

// The outputs of a call as its caller gets them: one by itself, several as a tuple. Steals them.
PyObject* return_outputs(PyObject* const* outputs, int32_t count) {
  if (count == 1) return outputs[0];
  PyObject* tuple = PyTuple_New(count);
  for (int32_t i = 0; i < count; ++i) {
    if (tuple != nullptr) {
      PyTuple_SET_ITEM(tuple, i, outputs[i]);
    } else {
      Py_DECREF(outputs[i]);
    }
  }
  return tuple;
}

// The call again, with the outputs in the place of their requests.
bool launch_by_fallback(const Entry& entry, PyObject* const* values, const Arguments& arguments,
                        PyObject* const* outputs) {
  std::vector<PyObject*> complete(values, values + entry.arguments.size());
  for (int32_t i = 0; i < arguments.num_requests; ++i) complete[arguments.arguments[i]] = outputs[i];
  PyObject* result = call_fallback(state.fallback, entry, complete.data(), static_cast<Py_ssize_t>(complete.size()));
  Py_XDECREF(result);
  return result != nullptr;
}

// Makes the outputs that are asked for, if the other arguments are good, and launches.
PyObject* make_and_launch(const Entry& entry, PyObject* const* values, Arguments& arguments) {
  const tk_status status = tk_check(entry.kernel, arguments.tensors, arguments.scalars, arguments.axes);
  if (status != TK_OK) [[unlikely]]
    return raise_status(status);
  PyObject* outputs[kMaxTensors];
  int32_t count = 0;
  bool good = true, plain = true;
  while (good && count < arguments.num_requests) {
    const int32_t index = arguments.requested[count], at = arguments.arguments[count];
    PyObject* output = make_output(entry, entry.arguments[at], values[at], arguments.tensors, arguments.device);
    good = output != nullptr;
    if (!good) break;
    outputs[count++] = output;
    // A mode that watches torch (fake tensors, counters) may have made something else of it.
    const Read read = read_tensor(entry, entry.arguments[at], output, &arguments.views[index]);
    good = read != Read::failed;
    plain = plain && read == Read::on_cuda;
    arguments.tensors[index] = &arguments.views[index];
  }
  good = good && (plain ? launch(entry, arguments) : launch_by_fallback(entry, values, arguments, outputs));
  if (good) [[likely]]
    return return_outputs(outputs, count);
  while (count > 0) Py_DECREF(outputs[--count]);
  return nullptr;
}

}  // namespace

PyObject* make_self(const Entry& entry) {
  static PyType_Slot slots[] = {{0, nullptr}};
  static PyType_Spec spec = {"tilekernels._C.Kernel", sizeof(SelfObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) return nullptr;
  SelfObject* self = PyObject_New(SelfObject, reinterpret_cast<PyTypeObject*>(type));
  if (self != nullptr) self->entry = &entry;
  return reinterpret_cast<PyObject*>(self);
}

PyObject* call_kernel(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  const Entry& entry = entry_of(self);
  if (static_cast<size_t>(num_args) != entry.arguments.size()) [[unlikely]]
    return refuse_count(entry, num_args);
  if (state.exchange == nullptr || state.fallback == nullptr) [[unlikely]]
    return raise_unset(entry);
  Arguments arguments;
  switch (read_arguments(entry, args, arguments)) {
    case Read::failed: return nullptr;
    case Read::on_cuda:
      if (arguments.num_requests > 0) return make_and_launch(entry, args, arguments);
      if (!launch(entry, arguments)) [[unlikely]]
        return nullptr;
      Py_RETURN_NONE;
    case Read::on_host:
    case Read::opaque: return call_fallback(state.fallback, entry, args, num_args);
  }
  Py_UNREACHABLE();
}

PyObject* check_kernel(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  const Entry& entry = entry_of(self);
  if (static_cast<size_t>(num_args) != entry.arguments.size()) [[unlikely]]
    return refuse_count(entry, num_args);
  if (state.exchange == nullptr) [[unlikely]]
    return raise_unset(entry);
  Arguments arguments;
  const Read read = read_arguments(entry, args, arguments);
  if (read == Read::failed) return nullptr;
  if (read == Read::opaque) {
    if (state.check_fallback != nullptr) return call_fallback(state.check_fallback, entry, args, num_args);
  } else {
    const tk_status status = tk_check(entry.kernel, arguments.tensors, arguments.scalars, arguments.axes);
    if (status != TK_OK) [[unlikely]]
      return raise_status(status);
  }
  Py_RETURN_NONE;
}

}  // namespace tk::python
