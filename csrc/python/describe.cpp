#include "describe.h"

#include <string>
#include <vector>

#include "state.h"

namespace py = pybind11;

namespace tk::python {

namespace {

[[noreturn]] void raise(tk_status status) {
  raise_status(status);
  throw py::error_already_set();
}

void require(tk_status status) {
  if (status != TK_OK) raise(status);
}

const char* kind_name(int32_t kind) {
  switch (kind) {
    case TK_AXIS_DTYPE_OF: return "dtype_of";
    case TK_AXIS_ITEMSIZE_OF: return "itemsize_of";
    default: return "value";
  }
}

py::dict describe_param(const tk_kernel* kernel, int32_t index) {
  tk_param_info info{};
  info.size = sizeof info;
  require(tk_describe_param(kernel, index, &info));
  py::dict param;
  param["name"] = info.name;
  param["kind"] = info.is_tensor ? "tensor" : "scalar";
  if (!info.is_tensor) {
    param["dtype"] = tk_param_dtype(kernel, index, 0);
    return param;
  }
  py::list dtypes;
  for (int32_t i = 0; i < info.num_dtypes; ++i) dtypes.append(tk_param_dtype(kernel, index, i));
  param["dtypes"] = dtypes;
  param["rank"] = info.rank;
  param["raw"] = info.raw != 0;
  param["written"] = info.written != 0;
  param["nullable"] = info.nullable != 0;
  param["optional"] = info.optional != 0;
  return param;
}

tk_axis_info read_axis(const tk_kernel* kernel, int32_t index) {
  tk_axis_info info{};
  info.size = sizeof info;
  require(tk_describe_axis(kernel, index, &info));
  return info;
}

py::object axis_value(const tk_axis_info& axis, int32_t index) {
  switch (axis.kind) {
    case TK_AXIS_FLAG: return py::bool_(axis.values[index] != 0);
    case TK_AXIS_NUMBER:
    case TK_AXIS_ITEMSIZE_OF: return py::int_(axis.values[index]);
    default: return py::str(axis.labels[index]);
  }
}

py::dict describe_axis(const tk_kernel* kernel, int32_t index) {
  const tk_axis_info info = read_axis(kernel, index);
  py::dict axis;
  axis["name"] = info.name;
  axis["kind"] = kind_name(info.kind);
  if (info.param >= 0) {
    tk_param_info param{};
    param.size = sizeof param;
    require(tk_describe_param(kernel, info.param, &param));
    axis["of"] = param.name;
  }
  py::list values;
  for (int32_t i = 0; i < info.num_values; ++i) values.append(axis_value(info, i));
  axis["values"] = values;
  return axis;
}

tk_kernel_info read_kernel(const tk_kernel* kernel) {
  tk_kernel_info info{};
  info.size = sizeof info;
  require(tk_describe_kernel(kernel, &info));
  return info;
}

py::object text_or_none(const char* text) {
  return text == nullptr ? py::object(py::none()) : py::object(py::str(text));
}

py::dict describe_device(int32_t index) {
  tk_device_info info{};
  info.size = sizeof info;
  require(tk_describe_device(index, &info));
  py::dict device;
  device["index"] = index;
  device["name"] = info.name;
  device["capability"] = py::make_tuple(info.compute_capability_major, info.compute_capability_minor);
  device["num_sms"] = info.num_sms;
  device["max_shared_memory"] = info.max_shared_memory;
  device["total_memory"] = info.total_memory;
  device["arch"] = text_or_none(info.arch);
  device["wanted_arch"] = text_or_none(info.wanted_arch);
  return device;
}

// The position of `value` among the values of an axis. A bool is no number here, as in a call.
int32_t find_label(const std::string& kernel, const tk_axis_info& axis, py::handle value) {
  std::string choices;
  for (int32_t i = 0; i < axis.num_values; ++i) {
    const py::object candidate = axis_value(axis, i);
    if (py::type::of(candidate).is(py::type::of(value)) && candidate.equal(value)) return i;
    choices += (i == 0 ? "" : i + 1 == axis.num_values ? " or " : ", ") + py::cast<std::string>(py::repr(candidate));
  }
  const std::string text =
      kernel + ": " + axis.name + " must be " + choices + ", got " + py::cast<std::string>(py::repr(value));
  PyErr_SetString(error_class(TK_INVALID_ARGUMENT), text.c_str());
  throw py::error_already_set();
}

void set_labels(const std::string& name, const tk_kernel* kernel, const py::dict& axes, std::vector<int32_t>& labels) {
  std::string known;
  size_t num_found = 0;
  for (size_t i = 0; i < labels.size(); ++i) {
    const tk_axis_info axis = read_axis(kernel, static_cast<int32_t>(i));
    known += (i == 0 ? "" : ", ") + std::string(axis.name);
    if (!axes.contains(axis.name)) continue;
    labels[i] = find_label(name, axis, axes[axis.name]);
    ++num_found;
  }
  if (num_found == axes.size()) return;
  const std::string text = name + ": axes must be among (" + known + "), got " + py::cast<std::string>(py::repr(axes));
  PyErr_SetString(error_class(TK_INVALID_ARGUMENT), text.c_str());
  throw py::error_already_set();
}

}  // namespace

py::dict describe_kernel(const tk_kernel* kernel) {
  const tk_kernel_info info = read_kernel(kernel);
  py::list params, axes;
  for (int32_t i = 0; i < info.num_params; ++i) params.append(describe_param(kernel, i));
  for (int32_t i = 0; i < info.num_axes; ++i) axes.append(describe_axis(kernel, i));
  py::dict result;
  result["name"] = info.name;
  result["params"] = params;
  result["axes"] = axes;
  return result;
}

py::list describe_devices() {
  py::list devices;
  int32_t count = 0;
  const tk_status status = tk_num_devices(&count);
  if (status == TK_NO_DRIVER || status == TK_NO_DEVICE || status == TK_DRIVER_TOO_OLD) return devices;
  require(status);
  for (int32_t i = 0; i < count; ++i) devices.append(describe_device(i));
  return devices;
}

bool covers(const std::string& name, const py::dict& axes, const py::object& arch) {
  const tk_kernel* kernel = nullptr;
  if (tk_find(name.c_str(), &kernel) != TK_OK) return false;
  std::vector<int32_t> labels(static_cast<size_t>(read_kernel(kernel).num_axes), -1);
  set_labels(name, kernel, axes, labels);
  const std::string arch_name = arch.is_none() ? "" : py::cast<std::string>(arch);
  return tk_covers(kernel, labels.data(), arch.is_none() ? nullptr : arch_name.c_str()) != 0;
}

}  // namespace tk::python
