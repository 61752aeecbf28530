#include "torch_ops_checks.h"

#include <torch/headeronly/core/DeviceType.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace wim::checks {
namespace {

std::string dims_text(std::initializer_list<Dim> dims) {
  std::string names, sizes;
  for (const Dim& dim : dims) {
    names += (names.empty() ? "" : ", ") + std::string(dim.name);
    sizes += (sizes.empty() ? "" : ", ") +
             (dim.size < 0 ? std::string("any") : std::to_string(dim.size));
  }
  return "[" + names + "] = [" + sizes + "]";
}

// The bytes from the first to past the last element; {0, 0} for an empty tensor.
std::pair<uintptr_t, uintptr_t> extent(const Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  int64_t low = 0, high = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const int64_t reach = (tensor.size(d) - 1) * tensor.stride(d);
    (reach < 0 ? low : high) += reach;
  }
  const auto base = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  return {base + low * bytes, base + high * bytes};
}

// Seen modulo `period` elements: how many elements the dimensions with smaller strides span, or -1
// if a larger stride is no multiple of the period.
int64_t span_within(const Tensor& tensor, int64_t period) {
  int64_t span = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) <= 1) continue;
    const int64_t stride = tensor.stride(d);
    if (stride < 0 || (stride >= period && stride % period != 0)) return -1;
    if (stride < period) span += (tensor.size(d) - 1) * stride;
  }
  return span;
}

// Slices of one packed buffer (query | out) interleave without touching: there is a stride modulo
// which they lie in disjoint intervals.
bool interleaved(const Tensor& a, const Tensor& b, int64_t distance) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    const int64_t period = a.stride(d);
    if (a.size(d) <= 1 || period <= 1) continue;
    const int64_t a_span = span_within(a, period), b_span = span_within(b, period);
    const int64_t offset = ((distance % period) + period) % period;
    if (a_span > 0 && b_span > 0 && a_span <= offset && offset + b_span <= period) return true;
  }
  return false;
}

// True when writing `a` may change an element of `b`.
bool may_overlap(const Tensor& a, const Tensor& b) {
  const auto [a_low, a_high] = extent(a);
  const auto [b_low, b_high] = extent(b);
  if (a_low >= b_high || b_low >= a_high) return false;
  const auto bytes = static_cast<int64_t>(a.element_size());
  const auto distance = static_cast<int64_t>(b_low - a_low);
  return a.element_size() != b.element_size() || distance % bytes != 0 ||
         !interleaved(a, b, distance / bytes);
}

bool same_view(const Tensor& a, const Tensor& b) {
  bool same =
      a.data_ptr() == b.data_ptr() && a.dim() == b.dim() && a.element_size() == b.element_size();
  for (int64_t d = 0; same && d < a.dim(); ++d)
    same = a.size(d) == b.size(d) && a.stride(d) == b.stride(d);
  return same;
}

}  // namespace

std::string shape_text(const Tensor& tensor) {
  std::string result;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    result += (d ? ", " : "") + std::to_string(tensor.size(d));
  return "[" + result + "]";
}

std::string strides_text(const Tensor& tensor) {
  std::string result;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    result += (d ? ", " : "") + std::to_string(tensor.stride(d));
  return "[" + result + "]";
}

std::string device_text(const Tensor& tensor) {
  using torch::headeronly::DeviceType;
  switch (tensor.device().type()) {
    case DeviceType::CPU:
      return "cpu";
    case DeviceType::CUDA:
      return text("cuda:", tensor.get_device_index());
    case DeviceType::Meta:
      return "meta";
    default:
      return text("device type ", static_cast<int>(tensor.device().type()));
  }
}

std::string dtype_text(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(dtype);
  }
}

// An op's Tensor argument may still arrive as None.
void is_tensor(const char* name, const Tensor& tensor) {
  if (!tensor.defined()) value_error(name, " must be a tensor, found None");
}

void on_cpu(const char* name, const Tensor& tensor) {
  is_tensor(name, tensor);
  if (!tensor.is_cpu()) value_error(name, " must be on the cpu, found ", device_text(tensor));
}

void same_device(const char* name, const Tensor& tensor, const char* reference_name,
                 const Tensor& reference) {
  is_tensor(name, tensor);
  const std::string found = device_text(tensor), wanted = device_text(reference);
  if (found != wanted) {
    value_error(name, " must be on the device of ", reference_name, " (", wanted, "), found ",
                found);
  }
}

void has_dtype(const char* name, const Tensor& tensor, ScalarType dtype, const char* why) {
  if (tensor.scalar_type() != dtype) {
    value_error(name, " must have dtype ", dtype_text(dtype), why, ", found ",
                dtype_text(tensor.scalar_type()));
  }
}

void has_shape(const char* name, const Tensor& tensor, std::initializer_list<Dim> dims) {
  bool right = tensor.dim() == static_cast<int64_t>(dims.size());
  int64_t d = 0;
  for (const Dim& dim : dims) {
    right = right && (dim.size < 0 || tensor.size(d) == dim.size);
    ++d;
  }
  if (!right)
    value_error(name, " must have shape ", dims_text(dims), ", found ", shape_text(tensor));
}

void last_dim_contiguous(const char* name, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1 && tensor.numel() > 0) {
    value_error(name, " must be contiguous in its last dimension (stride 1), found stride ",
                tensor.stride(last));
  }
}

DType attention_dtype(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      value_error(name, " must have dtype float32, bfloat16 or float16, found ",
                  dtype_text(tensor.scalar_type()));
  }
}

RowsView rows_view(const char* name, const Tensor& tensor, std::initializer_list<Dim> dims) {
  has_shape(name, tensor, dims);
  last_dim_contiguous(name, tensor);
  RowsView view;
  view.data = tensor.data_ptr();
  view.rows = tensor.size(0), view.heads = tensor.size(1), view.dim = tensor.size(2);
  view.row_stride = tensor.stride(0), view.head_stride = tensor.stride(1);
  return view;
}

CacheView cache_view(const char* name, const Tensor& tensor, bool may_be_transposed) {
  has_shape(name, tensor, {{"num_pages"}, {"page_size"}, {"num_kv_heads"}, {"head_dim"}});
  const bool contiguous = tensor.size(3) <= 1 || tensor.stride(3) == 1 || tensor.numel() == 0;
  if (!contiguous && !(may_be_transposed && tensor.stride(1) == 1)) {
    value_error(name, " must have stride 1 in its last dimension",
                may_be_transposed ? " or in its slot dimension" : "", ", found strides ",
                strides_text(tensor));
  }
  if (tensor.size(1) < 1)
    value_error(name, " must have page_size of at least 1, found shape ", shape_text(tensor));
  CacheView view;
  view.data = tensor.data_ptr();
  view.num_pages = tensor.size(0), view.page_size = tensor.size(1), view.heads = tensor.size(2);
  view.dim = tensor.size(3);
  view.page_stride = tensor.stride(0), view.slot_stride = tensor.stride(1),
  view.head_stride = tensor.stride(2);
  view.dim_stride = contiguous ? 1 : tensor.stride(3);
  return view;
}

void cache_views(const Tensor& k_cache, const Tensor& v_cache, ScalarType dtype,
                 const char* dtype_of, CacheView* k, CacheView* v) {
  const std::string why = text(" (as ", dtype_of, ")");
  has_dtype("k_cache", k_cache, dtype, why.c_str());
  has_dtype("v_cache", v_cache, dtype, why.c_str());
  *k = cache_view("k_cache", k_cache, false);
  has_shape("v_cache", v_cache,
            {{"num_pages", k->num_pages},
             {"page_size", k->page_size},
             {"num_kv_heads", k->heads},
             {"v_head_dim"}});
  *v = cache_view("v_cache", v_cache, true);
}

const int32_t* int32_vector(const char* name, const Tensor& tensor, Dim dim) {
  on_cpu(name, tensor);
  has_dtype(name, tensor, ScalarType::Int);
  has_shape(name, tensor, {dim});
  last_dim_contiguous(name, tensor);
  return static_cast<const int32_t*>(tensor.data_ptr());
}

const int64_t* int64_vector(const char* name, const Tensor& tensor, Dim dim) {
  on_cpu(name, tensor);
  has_dtype(name, tensor, ScalarType::Long);
  has_shape(name, tensor, {dim});
  last_dim_contiguous(name, tensor);
  return static_cast<const int64_t*>(tensor.data_ptr());
}

// In the order of the strides, each dimension must step over all that the smaller ones span. This
// also refuses strides that mesh without touching, like [3, 2] for [2, 2]: no real layout has them.
void writable(const char* name, const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) steps.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(steps.begin(), steps.end());
  int64_t span = 1;
  for (const auto& [stride, size] : steps) {
    if (stride < span) {
      value_error(name, " is written and must not overlap itself, found shape ", shape_text(tensor),
                  " with strides ", strides_text(tensor));
    }
    span += (size - 1) * stride;
  }
}

void apart(const char* name, const Tensor& written, const char* read_name, const Tensor& read,
           bool may_be_same) {
  if (may_be_same && same_view(written, read)) return;
  if (may_overlap(written, read)) value_error(name, " must not overlap ", read_name, " in memory");
}

}  // namespace wim::checks
