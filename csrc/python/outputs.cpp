#include "outputs.h"

#include <dlfcn.h>

#include <string>

#include "state.h"

namespace tk::python {

namespace {

constexpr Py_ssize_t kFirstSize = 2, kMostSizes = 8;

struct Sizes {
  Py_ssize_t count;
  int64_t values[kMostSizes];
  int64_t alignment;
};

// ---- Reading requests -----------------------------------------------------------------------------------------------

PyObject* refuse_request(const Entry& entry, const Argument& argument, PyObject* request) {
  PyErr_Format(error_class(TK_INVALID_ARGUMENT), "%s: %s must be a tensor or (dtype, alignment, *sizes), got %R",
               entry.name.c_str(), argument.name, request);
  return nullptr;
}

bool read_number(PyObject* value, int64_t* number) {
  *number = PyLong_Check(value) ? PyLong_AsLongLong(value) : -1;
  if (*number >= 0) return true;
  PyErr_Clear();
  return false;
}

bool read_derived_size(const Entry& entry, PyObject* derived, const tk_tensor* const* tensors, int64_t* size) {
  int64_t numbers[4];
  if (PyTuple_GET_SIZE(derived) != 4) return false;
  for (Py_ssize_t i = 0; i < 4; ++i) {
    if (!read_number(PyTuple_GET_ITEM(derived, i), &numbers[i])) return false;
  }
  const auto [at, dim, factor, divisor] = numbers;
  if (at >= static_cast<int64_t>(entry.arguments.size()) || entry.arguments[at].tensor < 0 || divisor == 0)
    return false;
  const tk_tensor* tensor = tensors[entry.arguments[at].tensor];
  if (tensor == nullptr || dim >= tensor->ndim) return false;
  *size = (tensor->shape[dim] * factor + divisor - 1) / divisor;
  return true;
}

bool read_request(const Entry& entry, PyObject* request, const tk_tensor* const* tensors, Sizes* sizes) {
  sizes->count = PyTuple_GET_SIZE(request) - kFirstSize;
  if (sizes->count < 1 || sizes->count > kMostSizes) return false;
  if (!read_number(PyTuple_GET_ITEM(request, 1), &sizes->alignment)) return false;
  if (sizes->alignment > 0 && sizes->count != 2) return false;
  for (Py_ssize_t i = 0; i < sizes->count; ++i) {
    PyObject* size = PyTuple_GET_ITEM(request, kFirstSize + i);
    const bool good = PyTuple_CheckExact(size) ? read_derived_size(entry, size, tensors, &sizes->values[i])
                                               : read_number(size, &sizes->values[i]);
    if (!good) return false;
  }
  return true;
}

// ---- torch.empty_strided --------------------------------------------------------------------------------------------

PyObject* make_tuple(const int64_t* values, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; tuple != nullptr && i < count; ++i) {
    PyObject* value = PyLong_FromLongLong(values[i]);
    if (value == nullptr) {
      Py_CLEAR(tuple);
    } else {
      PyTuple_SET_ITEM(tuple, i, value);
    }
  }
  return tuple;
}

PyObject* call_empty_strided(PyObject* size, PyObject* stride, PyObject* dtype, PyObject* device) {
  static PyObject* names = [] {
    PyObject *dtype_name = PyUnicode_InternFromString("dtype"), *device_name = PyUnicode_InternFromString("device");
    return PyTuple_Pack(2, dtype_name, device_name);
  }();
  PyObject* arguments[] = {size, stride, dtype, device};
  return PyObject_Vectorcall(state.empty_strided, arguments, 2, names);
}

PyObject* allocate_by_python(const int64_t* sizes, const int64_t* strides, Py_ssize_t count, PyObject* dtype,
                             int32_t device) {
  PyObject *size = make_tuple(sizes, count), *stride = make_tuple(strides, count);
  PyObject* where = PyObject_CallFunction(state.device_type, "si", "cuda", device);
  PyObject* tensor = nullptr;
  if (size != nullptr && stride != nullptr && where != nullptr) tensor = call_empty_strided(size, stride, dtype, where);
  Py_XDECREF(size);
  Py_XDECREF(stride);
  Py_XDECREF(where);
  return tensor;
}

// ---- The same below Python ------------------------------------------------------------------------------------------

// torch's C interface for compiled models allocates in 0.3 us on the host, Python's function takes 1.4 to do so:
// parsing its arguments is most of it. What that interface lacks is the way to a Python object, which is the function
// that every C++ extension of torch calls. Where either cannot be found, Python's function does it all.

using Handle = void*;  // the address of an at::Tensor

struct Allocator {
  int32_t (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
  int32_t (*as_strided)(Handle, const int64_t*, const int64_t*, Handle*);
  int32_t (*delete_tensor)(Handle);
  PyObject* (*wrap)(const void*);  // THPVariable_Wrap(const at::TensorBase&)
  int32_t cuda;                    // torch's number of the device type
  void* library;
};
Allocator allocator;

template <typename Function>
bool find(void* library, const char* name, Function*& function) {
  function = library != nullptr ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
  return function != nullptr;
}

// torch's number of a dtype, by the function that is named after it; -1: it has none.
int32_t ask_dtype_code(PyObject* dtype) {
  PyObject* text = PyObject_Str(dtype);
  const char* name = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
  int32_t (*code)() = nullptr;
  const std::string prefix = "torch.";
  if (name != nullptr && std::string(name).compare(0, prefix.size(), prefix) == 0) {
    find(allocator.library, ("aoti_torch_dtype_" + std::string(name + prefix.size())).c_str(), code);
  }
  Py_XDECREF(text);
  PyErr_Clear();
  return code != nullptr ? code() : -1;
}

// dtypes are single objects that live for ever, so their addresses are their names.
int32_t dtype_code(PyObject* dtype) {
  struct Known {
    PyObject* dtype;
    int32_t code;
  };
  constexpr int kMostKnown = 16;
  static Known known[kMostKnown];
  static int num_known = 0;
  for (int i = 0; i < num_known; ++i) {
    if (known[i].dtype == dtype) return known[i].code;
  }
  const int32_t code = ask_dtype_code(dtype);
  if (num_known < kMostKnown) known[num_known++] = {Py_NewRef(dtype), code};
  return code;
}

// Sizes and strides of a tensor, and the rows of it that are wanted: all of them but for padded columns.
struct Layout {
  const int64_t *sizes, *strides;
  Py_ssize_t count;
  int64_t num_rows;

  bool is_padded() const { return num_rows != sizes[0]; }
};

// Null without a Python error: Python has to do it, and to word what is wrong (no memory, most of all).
PyObject* allocate_below_python(const Layout& layout, PyObject* dtype, int32_t device) {
  const int32_t code = allocator.wrap != nullptr ? dtype_code(dtype) : -1;
  Handle handle = nullptr, rows = nullptr;
  if (code < 0) return nullptr;
  if (allocator.empty_strided(layout.count, layout.sizes, layout.strides, code, allocator.cuda, device, &handle) != 0) {
    return nullptr;
  }
  if (layout.is_padded()) {
    const int64_t sizes[] = {layout.num_rows, layout.sizes[1]};
    const int32_t failed = allocator.as_strided(handle, sizes, layout.strides, &rows);
    allocator.delete_tensor(handle);
    if (failed != 0) return nullptr;
    handle = rows;
  }
  PyObject* tensor = allocator.wrap(handle);
  allocator.delete_tensor(handle);
  return tensor;
}

// The first rows of a tensor.
PyObject* slice_rows(PyObject* tensor, int64_t num_rows) {
  PyObject* stop = PyLong_FromLongLong(num_rows);
  PyObject* slice = stop != nullptr ? PySlice_New(nullptr, stop, nullptr) : nullptr;
  PyObject* rows = slice != nullptr ? PyObject_GetItem(tensor, slice) : nullptr;
  Py_XDECREF(slice);
  Py_XDECREF(stop);
  return rows;
}

PyObject* allocate(const Layout& layout, PyObject* dtype, int32_t device) {
  PyObject* tensor = allocate_below_python(layout, dtype, device);
  if (tensor != nullptr || PyErr_Occurred() != nullptr) return tensor;
  tensor = allocate_by_python(layout.sizes, layout.strides, layout.count, dtype, device);
  if (tensor == nullptr || !layout.is_padded()) return tensor;
  PyObject* rows = slice_rows(tensor, layout.num_rows);
  Py_DECREF(tensor);
  return rows;
}

// ---- Layouts --------------------------------------------------------------------------------------------------------

PyObject* make_dense(const Sizes& sizes, PyObject* dtype, int32_t device) {
  int64_t strides[kMostSizes], stride = 1;
  for (Py_ssize_t i = sizes.count - 1; i >= 0; --i) {
    strides[i] = stride;
    if (sizes.values[i] > 1) stride *= sizes.values[i];
  }
  return allocate({sizes.values, strides, sizes.count, sizes.values[0]}, dtype, device);
}

PyObject* make_columns(const Sizes& sizes, PyObject* dtype, int32_t device) {
  const int64_t num_rows = sizes.values[0];
  const int64_t pitch = (num_rows + sizes.alignment - 1) / sizes.alignment * sizes.alignment;
  const int64_t padded_sizes[] = {pitch, sizes.values[1]}, strides[] = {1, pitch};
  return allocate({padded_sizes, strides, 2, num_rows}, dtype, device);
}

}  // namespace

bool is_request(PyObject* value) {
  return PyTuple_CheckExact(value) && PyTuple_GET_SIZE(value) > kFirstSize &&
         reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(value, 0))) == state.dtype_type;
}

void open_allocator() {
  // Found only if torch has loaded them; nothing is loaded here.
  void* core = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  void* binding = dlopen("libtorch_python.so", RTLD_NOLOAD | RTLD_LAZY);
  int32_t (*cuda)() = nullptr;
  Allocator found = {};
  found.library = core;
  if (find(core, "aoti_torch_empty_strided", found.empty_strided) &&
      find(core, "aoti_torch_as_strided", found.as_strided) &&
      find(core, "aoti_torch_delete_tensor_object", found.delete_tensor) &&
      find(core, "aoti_torch_device_type_cuda", cuda) &&
      find(binding, "_Z16THPVariable_WrapRKN2at10TensorBaseE", found.wrap)) {
    found.cuda = cuda();
    allocator = found;
  }
}

PyObject* make_output(const Entry& entry, const Argument& argument, PyObject* request, const tk_tensor* const* tensors,
                      int32_t device) {
  Sizes sizes;
  if (!read_request(entry, request, tensors, &sizes)) return refuse_request(entry, argument, request);
  PyObject* dtype = PyTuple_GET_ITEM(request, 0);
  return sizes.alignment > 0 ? make_columns(sizes, dtype, device) : make_dense(sizes, dtype, device);
}

}  // namespace tk::python
