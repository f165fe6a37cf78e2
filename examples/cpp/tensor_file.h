// Named tensors in a file, as make_batch.py writes them: one line each (name, dtype, sizes), an empty line, then the
// bytes of all of them in that order.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tilekernels/tilekernels.hpp"

struct FileTensor {
  tk_dtype dtype;
  tilekernels::Dims shape;
  std::vector<unsigned char> bytes;
};

using TensorFile = std::map<std::string, FileTensor>;

inline tk_dtype read_dtype(const std::string& name) {
  static const std::map<std::string, tk_dtype> dtypes = {
      {"float32", tilekernels::kFloat32}, {"bfloat16", tilekernels::kBfloat16},          {"int64", tilekernels::kInt64},
      {"int32", tilekernels::kInt32},     {"float8_e4m3fn", tilekernels::kFloat8E4m3fn},
  };
  const auto found = dtypes.find(name);
  if (found == dtypes.end())
    throw std::runtime_error("the tensor file has a dtype that this example does not read: " + name);
  return found->second;
}

inline TensorFile read_tensor_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path);
  TensorFile tensors;
  std::vector<std::string> names;
  for (std::string line; std::getline(file, line) && !line.empty();) {
    std::istringstream words(line);
    std::string name, dtype;
    words >> name >> dtype;
    std::vector<int64_t> shape;
    for (int64_t size; words >> size;) shape.push_back(size);
    names.push_back(name);
    tensors[name] = {read_dtype(dtype), shape, {}};
  }
  for (const std::string& name : names) {
    FileTensor& tensor = tensors[name];
    int64_t num_bytes = tilekernels::size_of(tensor.dtype);
    for (const int64_t size : tensor.shape) num_bytes *= size;
    tensor.bytes.resize(static_cast<size_t>(num_bytes));
    file.read(reinterpret_cast<char*>(tensor.bytes.data()), num_bytes);
  }
  if (!file) throw std::runtime_error(path + " is cut off");
  return tensors;
}

inline const FileTensor& find_tensor(const TensorFile& file, const std::string& name) {
  const auto found = file.find(name);
  if (found == file.end()) throw std::runtime_error("the tensor file has no " + name);
  return found->second;
}

// The first number of a tensor of int32.
inline int32_t read_int32(const FileTensor& tensor) {
  int32_t value = 0;
  std::memcpy(&value, tensor.bytes.data(), sizeof(value));
  return value;
}
