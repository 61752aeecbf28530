// Argument checks shared by the ops. Each throws std::runtime_error whose text starts with
// "ValueError: " or "IndexError: "; ops.py turns it into that exception. Texts name the argument,
// what was found and what is allowed. Nothing here may call a torch function that can fail: the
// stable ABI loses the text of torch's own errors.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "attention_params.h"

namespace wim::checks {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <class... Parts>
[[noreturn]] void value_error(const Parts&... parts) {
  throw std::runtime_error(text("ValueError: ", parts...));
}

template <class... Parts>
[[noreturn]] void index_error(const Parts&... parts) {
  throw std::runtime_error(text("IndexError: ", parts...));
}

// A dimension's name in the documentation and its size; -1 accepts any.
struct Dim {
  const char* name;
  int64_t size = -1;
};

std::string shape_text(const Tensor& tensor);
std::string strides_text(const Tensor& tensor);
std::string device_text(const Tensor& tensor);
std::string dtype_text(ScalarType dtype);

void is_tensor(const char* name, const Tensor& tensor);
void on_cpu(const char* name, const Tensor& tensor);
void same_device(const char* name, const Tensor& tensor, const char* reference_name,
                 const Tensor& reference);
void has_dtype(const char* name, const Tensor& tensor, ScalarType dtype, const char* why = "");
void has_shape(const char* name, const Tensor& tensor, std::initializer_list<Dim> dims);
void last_dim_contiguous(const char* name, const Tensor& tensor);

// float32, bfloat16 or float16.
DType attention_dtype(const char* name, const Tensor& tensor);

// [rows, heads, dim] with a contiguous last dimension; dimension names as in the documentation.
RowsView rows_view(const char* name, const Tensor& tensor, std::initializer_list<Dim> dims);
CacheView cache_view(const char* name, const Tensor& tensor, bool may_be_transposed);

// Both caches, which must agree with each other and have the dtype `dtype` of the argument
// `dtype_of`.
void cache_views(const Tensor& k_cache, const Tensor& v_cache, ScalarType dtype,
                 const char* dtype_of, CacheView* k, CacheView* v);

// A contiguous one-dimensional int32 / int64 vector on the CPU.
const int32_t* int32_vector(const char* name, const Tensor& tensor, Dim dim);
const int64_t* int64_vector(const char* name, const Tensor& tensor, Dim dim);

// A tensor that is written: refuses what expand() makes, many indices that mean one element.
void writable(const char* name, const Tensor& tensor);

// What is written must not change what is read; with `may_be_same` the two may be the very same
// view.
void apart(const char* name, const Tensor& written, const char* read_name, const Tensor& read,
           bool may_be_same = false);

}  // namespace wim::checks
