#include "cpu/cache_ops.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/convert.h"

namespace wim::cpu {
namespace {

// Recursion over the dimensions; the innermost one is a memcpy where it is contiguous.
void copy_block(const PageShape& shape, int dim, const char* from, char* to) {
  if (dim == shape.dims) {
    std::memcpy(to, from, shape.element_bytes);
    return;
  }
  if (dim == shape.dims - 1 && shape.strides[dim] == 1) {
    std::memcpy(to, from, shape.sizes[dim] * shape.element_bytes);
    return;
  }
  const int64_t step = shape.strides[dim] * shape.element_bytes;
  for (int64_t i = 0; i < shape.sizes[dim]; ++i)
    copy_block(shape, dim + 1, from + i * step, to + i * step);
}

template <class T>
void merge_row(const T* a, float lse_a, const T* b, float lse_b, T* out, float* lse, int64_t dim) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  // Also when both are empty: an empty state's values are 0 by definition, whatever its memory
  // holds.
  if (lse_a == kEmpty || lse_b == kEmpty) {
    const T* kept = lse_b == kEmpty ? a : b;
    *lse = lse_b == kEmpty ? lse_a : lse_b;
    for (int64_t d = 0; d < dim; ++d) out[d] = *lse == kEmpty ? from_float<T>(0.0f) : kept[d];
    return;
  }
  const float largest = lse_a > lse_b ? lse_a : lse_b;
  const float weight_a = std::exp(lse_a - largest), weight_b = std::exp(lse_b - largest);
  const float sum = weight_a + weight_b;
  const float share_a = weight_a / sum, share_b = weight_b / sum;
  *lse = largest + std::log(sum);
  for (int64_t d = 0; d < dim; ++d)
    out[d] = from_float<T>(share_a * to_float(a[d]) + share_b * to_float(b[d]));
}

template <class T>
void merge_all(const MergeStatesParams& params, const Context& context) {
  const int64_t tokens = params.out.rows, heads = params.out.heads, dim = params.out.dim;
  const auto row = [](const RowsView& view, int64_t token, int64_t head) {
    return static_cast<T*>(view.data) + token * view.row_stride + head * view.head_stride;
  };
  for_ranges(context, tokens, 1 + (1 << 15) / (heads * dim + 1), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < heads; ++head) {
        merge_row<T>(
            row(params.out_a, token, head), params.lse_a[head * params.lse_a_stride + token],
            row(params.out_b, token, head), params.lse_b[head * params.lse_b_stride + token],
            row(params.out, token, head), params.lse + head * params.lse_stride + token, dim);
      }
    }
  });
}

}  // namespace

void copy_pages(const std::vector<PageShape>& caches, const int64_t* src, const int64_t* dst,
                int64_t count, const Context& context) {
  const int64_t copies = static_cast<int64_t>(caches.size()) * count;
  for_ranges(context, copies, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const PageShape& cache = caches[i / count];
      char* base = static_cast<char*>(cache.data);
      const int64_t page_bytes = cache.page_stride * cache.element_bytes;
      copy_block(cache, 0, base + src[i % count] * page_bytes, base + dst[i % count] * page_bytes);
    }
  });
}

void merge_states(const MergeStatesParams& params, const Context& context) {
  switch (params.dtype) {
    case DType::kFloat32:
      return merge_all<float>(params, context);
    case DType::kBFloat16:
      return merge_all<BFloat16>(params, context);
    case DType::kFloat16:
      return merge_all<Float16>(params, context);
  }
}

}  // namespace wim::cpu
