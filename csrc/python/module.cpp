// The Python module tilekernels._C. The functions of the kernels are METH_FASTCALL (calls.cpp); pybind11 carries the
// rest: what Python sets once, and what it asks of the library and the machine. Importing it needs no GPU, driver or
// torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "calls.h"
#include "describe.h"
#include "entry.h"
#include "outputs.h"
#include "state.h"

namespace py = pybind11;

namespace tk::python {

namespace {

void replace(PyObject*& slot, py::handle value) {
  Py_XSETREF(slot, value.inc_ref().ptr());  // NOLINT: the macro is CPython's own
}

// The table of our major version among those that the array library offers.
const ExchangeApi* find_exchange(py::handle capsule) {
  auto* header = static_cast<ExchangeHeader*>(PyCapsule_GetPointer(capsule.ptr(), kExchangeCapsule));
  if (header == nullptr) throw py::error_already_set();
  while (header != nullptr && header->version.major != kExchangeMajor) header = header->prev_api;
  const auto* api = reinterpret_cast<const ExchangeApi*>(header);
  if (api != nullptr && api->dltensor_from_py_object_no_sync != nullptr) return api;
  throw py::import_error(
      "tilekernels needs a torch whose tensors are read by the DLPack exchange API of major version 1");
}

void set_torch(const py::type& tensor_type, const py::type& parameter_type, const py::object& exchange_api) {
  state.exchange = find_exchange(exchange_api);
  replace(state.tensor_type, tensor_type);
  replace(state.parameter_type, parameter_type);
}

void set_allocator(const py::function& empty_strided, const py::type& device_type, const py::type& dtype_type) {
  replace(state.empty_strided, empty_strided);
  replace(state.device_type, device_type);
  replace(state.dtype_type, dtype_type);
  open_allocator();
}

void set_errors(const py::type& argument_error, const py::type& argument_type_error, const py::type& not_built_error,
                const py::type& device_error) {
  replace(state.argument_error, argument_error);
  replace(state.argument_type_error, argument_type_error);
  replace(state.not_built_error, not_built_error);
  replace(state.device_error, device_error);
}

void set_fallback(const py::function& fallback) { replace(state.fallback, fallback); }

void set_check_fallback(const py::function& fallback) { replace(state.check_fallback, fallback); }

void preload(const std::optional<std::vector<std::string>>& names, int32_t device) {
  std::vector<const char*> pointers;
  if (names.has_value()) {
    for (const std::string& name : *names) pointers.push_back(name.c_str());
  }
  static const char* const kNone[] = {""};  // no names is not the same as null, which means all
  const char* const* list = !names.has_value() ? nullptr : pointers.empty() ? kNone : pointers.data();
  tk_status status;
  {
    const py::gil_scoped_release released;  // loading takes milliseconds
    status = tk_preload(list, static_cast<int32_t>(pointers.size()), device);
  }
  if (status == TK_OK) return;
  raise_status(status);
  throw py::error_already_set();
}

py::object driver_version() {
  int32_t version = 0;
  const tk_status status = tk_driver_version(&version);
  if (status == TK_OK) return py::int_(version);
  if (status == TK_NO_DRIVER) return py::none();
  raise_status(status);
  throw py::error_already_set();
}

py::list archs() {
  py::list result;
  for (int32_t i = 0; tk_arch_at(i) != nullptr; ++i) result.append(tk_arch_at(i));
  return result;
}

py::list packs() {
  py::list result;
  for (int32_t i = 0; i < tk_num_packs(); ++i) result.append(tk_pack_at(i));
  return result;
}

// Functions for the kernels that have none yet: at import all, later those that a pack brought (they come last).
void add_new_functions(py::handle module) {
  static int32_t num_known = 0;
  const std::vector<Entry*> entries = make_entries(num_known);
  num_known += static_cast<int32_t>(entries.size());
  if (!add_functions(module.ptr(), entries)) throw py::error_already_set();
}

void load_pack(py::handle module, const std::string& path) {
  const tk_status status = tk_load_pack(path.c_str());
  if (status == TK_OK) return add_new_functions(module);
  raise_status(status);
  throw py::error_already_set();
}

py::list kernels() {
  py::list result;
  for (int32_t i = 0; i < tk_num_kernels(); ++i) result.append(describe_kernel(tk_kernel_at(i)));
  return result;
}

}  // namespace

PYBIND11_MODULE(_C, module, py::multiple_interpreters::not_supported()) {
  module.doc() = "The compiled kernels of tilekernels.";
  module.def("set_torch", &set_torch, py::arg("tensor_type"), py::arg("parameter_type"), py::arg("exchange_api"));
  module.def("set_allocator", &set_allocator, py::arg("empty_strided"), py::arg("device_type"), py::arg("dtype_type"));
  module.def("set_errors", &set_errors, py::arg("argument_error"), py::arg("argument_type_error"),
             py::arg("not_built_error"), py::arg("device_error"));
  module.def("set_fallback", &set_fallback, py::arg("fallback"));
  module.def("set_check_fallback", &set_check_fallback, py::arg("fallback"));
  module.def("kernels", &kernels);
  module.def("preload", &preload, py::arg("names") = py::none(), py::arg("device") = -1);
  module.def("set_pdl", [](bool enabled) { tk_set_pdl(enabled ? 1 : 0); }, py::arg("enabled"));
  module.def("get_pdl", [] { return tk_get_pdl() != 0; });
  module.def("devices", &describe_devices);
  module.def("driver_version", &driver_version, "CUDA version of the driver, such as 13000; None without one");
  module.def("required_driver_version", &tk_required_driver_version);
  module.def("covers", &covers, py::arg("kernel"), py::arg("axes"), py::arg("arch") = py::none());
  module.def("archs", &archs);
  module.def("packs", &packs, "Paths of the overlay packs that are loaded");
  // by its plain address: a reference from a function of the module to the module would keep both alive for ever
  const py::handle self = module;
  module.def("load_pack", [self](const std::string& path) { load_pack(self, path); }, py::arg("path"));
  module.def("version", [] { return py::str(tk_version()); });
  add_new_functions(module);
}

}  // namespace tk::python
