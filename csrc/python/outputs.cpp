#include "outputs.h"

#include "state.h"

namespace tk::python {

namespace {

constexpr Py_ssize_t kFirstSize = 2, kMostSizes = 8;
constexpr int kMaxDevices = 64;

struct Sizes {
  Py_ssize_t count;
  int64_t values[kMostSizes];
  int64_t alignment;
};

PyObject* refuse_request(const Entry& entry, const Argument& argument, PyObject* request) {
  PyErr_Format(error_class(TK_INVALID_ARGUMENT), "%s: %s must be a tensor or (dtype, alignment, *sizes), got %R",
               entry.name.c_str(), argument.name, request);
  return nullptr;
}

bool read_size(PyObject* value, int64_t* size) {
  *size = PyLong_Check(value) ? PyLong_AsLongLong(value) : -1;
  if (*size >= 0) return true;
  PyErr_Clear();
  return false;
}

bool read_request(PyObject* request, Sizes* sizes) {
  sizes->count = PyTuple_GET_SIZE(request) - kFirstSize;
  if (sizes->count < 1 || sizes->count > kMostSizes) return false;
  if (!read_size(PyTuple_GET_ITEM(request, 1), &sizes->alignment)) return false;
  if (sizes->alignment > 0 && sizes->count != 2) return false;
  for (Py_ssize_t i = 0; i < sizes->count; ++i) {
    if (!read_size(PyTuple_GET_ITEM(request, kFirstSize + i), &sizes->values[i])) return false;
  }
  return true;
}

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

// torch.device("cuda", device), made once.
PyObject* device_of(int32_t device) {
  static PyObject* devices[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) return PyObject_CallFunction(state.device_type, "si", "cuda", device);
  if (devices[device] == nullptr) devices[device] = PyObject_CallFunction(state.device_type, "si", "cuda", device);
  return Py_XNewRef(devices[device]);
}

PyObject* call_empty_strided(PyObject* size, PyObject* stride, PyObject* dtype, PyObject* device) {
  static PyObject* names = [] {
    PyObject *dtype_name = PyUnicode_InternFromString("dtype"), *device_name = PyUnicode_InternFromString("device");
    return PyTuple_Pack(2, dtype_name, device_name);
  }();
  PyObject* arguments[] = {size, stride, dtype, device};
  return PyObject_Vectorcall(state.empty_strided, arguments, 2, names);
}

PyObject* allocate(const int64_t* sizes, const int64_t* strides, Py_ssize_t count, PyObject* dtype, int32_t device) {
  PyObject *size = make_tuple(sizes, count), *stride = make_tuple(strides, count), *where = device_of(device);
  PyObject* tensor = nullptr;
  if (size != nullptr && stride != nullptr && where != nullptr) tensor = call_empty_strided(size, stride, dtype, where);
  Py_XDECREF(size);
  Py_XDECREF(stride);
  Py_XDECREF(where);
  return tensor;
}

PyObject* make_dense(const Sizes& sizes, PyObject* dtype, int32_t device) {
  int64_t strides[kMostSizes], stride = 1;
  for (Py_ssize_t i = sizes.count - 1; i >= 0; --i) {
    strides[i] = stride;
    if (sizes.values[i] > 1) stride *= sizes.values[i];
  }
  return allocate(sizes.values, strides, sizes.count, dtype, device);
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

PyObject* make_columns(const Sizes& sizes, PyObject* dtype, int32_t device) {
  const int64_t num_rows = sizes.values[0];
  const int64_t pitch = (num_rows + sizes.alignment - 1) / sizes.alignment * sizes.alignment;
  const int64_t padded_sizes[] = {pitch, sizes.values[1]}, strides[] = {1, pitch};
  PyObject* padded = allocate(padded_sizes, strides, 2, dtype, device);
  if (padded == nullptr || pitch == num_rows) return padded;
  PyObject* rows = slice_rows(padded, num_rows);
  Py_DECREF(padded);
  return rows;
}

}  // namespace

PyObject* make_output(const Entry& entry, const Argument& argument, PyObject* request, int32_t device) {
  Sizes sizes;
  if (!read_request(request, &sizes)) return refuse_request(entry, argument, request);
  PyObject* dtype = PyTuple_GET_ITEM(request, 0);
  return sizes.alignment > 0 ? make_columns(sizes, dtype, device) : make_dense(sizes, dtype, device);
}

}  // namespace tk::python
