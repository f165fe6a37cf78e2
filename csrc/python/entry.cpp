#include "entry.h"

#include <algorithm>
#include <stdexcept>

#include "calls.h"

namespace tk::python {

namespace {

Kind scalar_kind(const std::string& dtype) {
  if (dtype == "float32") return Kind::float32;
  if (dtype == "float64") return Kind::float64;
  if (dtype == "int32") return Kind::int32;
  if (dtype == "int64") return Kind::int64;
  return Kind::boolean;
}

void add_params(Entry& entry, int32_t num_params) {
  int num_tensors = 0;
  for (int32_t i = 0; i < num_params; ++i) {
    tk_param_info info{};
    info.size = sizeof info;
    tk_describe_param(entry.kernel, i, &info);
    const Kind kind = info.is_tensor ? Kind::tensor : scalar_kind(tk_param_dtype(entry.kernel, i, 0));
    entry.arguments.push_back({kind, info.name, info.written != 0, info.is_tensor ? num_tensors++ : -1, {}});
  }
}

void add_plain_axes(Entry& entry, int32_t num_axes) {
  for (int32_t i = 0; i < num_axes; ++i) {
    tk_axis_info info{};
    info.size = sizeof info;
    tk_describe_axis(entry.kernel, i, &info);
    if (info.kind == TK_AXIS_NUMBER) entry.arguments.push_back({Kind::number, info.name, false, -1, {}});
    if (info.kind == TK_AXIS_FLAG) entry.arguments.push_back({Kind::flag, info.name, false, -1, {}});
    if (info.kind != TK_AXIS_CHOICE) continue;
    Argument& argument = entry.arguments.emplace_back(Argument{Kind::choice, info.name, false, -1, {}});
    for (int32_t label = 0; label < info.num_values; ++label) {
      argument.labels.push_back(PyUnicode_InternFromString(info.labels[label]));
    }
  }
}

void refuse_too_many(const Entry& entry) {
  const auto count = [&](Kind first, Kind last) {
    return std::count_if(entry.arguments.begin(), entry.arguments.end(),
                         [&](const Argument& argument) { return argument.kind >= first && argument.kind <= last; });
  };
  if (count(Kind::tensor, Kind::tensor) > kMaxTensors || count(Kind::float32, Kind::boolean) > kMaxScalars ||
      count(Kind::number, Kind::choice) > kMaxAxes) {
    throw std::runtime_error(entry.name + ": has more parameters than the Python module can pass");
  }
}

Entry* make_entry(const tk_kernel* kernel) {
  tk_kernel_info info{};
  info.size = sizeof info;
  tk_describe_kernel(kernel, &info);
  Entry* entry = new Entry;
  entry->kernel = kernel;
  entry->name = info.name;
  entry->identifier = entry->name;
  std::replace(entry->identifier.begin(), entry->identifier.end(), '.', '_');
  entry->check_name = "check_" + entry->identifier;
  add_params(*entry, info.num_params);
  add_plain_axes(*entry, info.num_axes);
  refuse_too_many(*entry);
  return entry;
}

bool add_function(PyObject* module, PyObject* self, PyObject* module_name, PyMethodDef& method) {
  PyObject* function = PyCFunction_NewEx(&method, self, module_name);
  if (function == nullptr) return false;
  const int failed = PyObject_SetAttrString(module, method.ml_name, function);
  Py_DECREF(function);
  return failed == 0;
}

PyMethodDef fastcall_method(const std::string& name, PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  // The cast through void is how a FASTCALL function gets into a PyMethodDef without a warning.
  return {name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, nullptr};
}

}  // namespace

std::vector<Entry*> make_entries(int32_t first) {
  std::vector<Entry*> entries;
  for (int32_t i = first; i < tk_num_kernels(); ++i) entries.push_back(make_entry(tk_kernel_at(i)));
  return entries;
}

bool add_functions(PyObject* module, const std::vector<Entry*>& entries) {
  PyObject* module_name = PyModule_GetNameObject(module);
  bool good = module_name != nullptr;
  for (Entry* entry : entries) {
    if (!good) break;
    entry->call_method = fastcall_method(entry->identifier, call_kernel);
    entry->check_method = fastcall_method(entry->check_name, check_kernel);
    PyObject* self = make_self(*entry);
    good = self != nullptr && add_function(module, self, module_name, entry->call_method) &&
           add_function(module, self, module_name, entry->check_method);
    Py_XDECREF(self);
  }
  Py_XDECREF(module_name);
  return good;
}

}  // namespace tk::python
