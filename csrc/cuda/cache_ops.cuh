// Kernels of the small ops; one thread an element.
#pragma once

#include <cmath>

#include "cuda/element.cuh"
#include "cuda/launch.cuh"

namespace wim::cuda {

template <class Element>
__device__ void append_element(const RowsView& rows, const CacheView& cache, int64_t slot,
                               int64_t token, int64_t head, int64_t d) {
  const int64_t page = slot / cache.page_size, offset = slot % cache.page_size;
  static_cast<Element*>(cache.data)[page * cache.page_stride + offset * cache.slot_stride +
                                    head * cache.head_stride + d * cache.dim_stride] =
      static_cast<const Element*>(rows.data)[token * rows.row_stride + head * rows.head_stride + d];
}

// Index: token, head, dimension of K and then of V. Element is an unsigned integer of the right
// width. `params.slots` is on the device.
template <class Element>
__global__ void append_kv_kernel(AppendKvParams params) {
  const int64_t heads = params.key.heads, dims = params.key.dim + params.value.dim;
  const int64_t count = params.key.rows * heads * dims;
  for (int64_t i = first_index(); i < count; i += index_stride()) {
    const int64_t d = i % dims, head = i / dims % heads, token = i / dims / heads;
    const int64_t slot = params.slots[token];
    if (slot < 0) continue;
    if (d < params.key.dim) {
      append_element<Element>(params.key, params.k_cache, slot, token, head, d);
    } else {
      append_element<Element>(params.value, params.v_cache, slot, token, head, d - params.key.dim);
    }
  }
}

// A 16-byte element is what a thread can move at once.
struct alignas(16) Bytes16 {
  uint64_t halves[2];
};

// Offset of an element of a page, its number counted along the shape.
__device__ inline int64_t page_offset(const PageShape& shape, int64_t number) {
  int64_t offset = 0;
  for (int d = shape.dims - 1; d >= 0; --d) {
    offset += number % shape.sizes[d] * shape.strides[d];
    number /= shape.sizes[d];
  }
  return offset;
}

template <class Element>
__device__ void copy_element(const PageShape& shape, int64_t src, int64_t dst, int64_t offset) {
  Element* data = static_cast<Element*>(shape.data);
  data[dst * shape.page_stride + offset] = data[src * shape.page_stride + offset];
}

// Index: cache, copy, element; `elements` is that of the largest page.
static __global__ void copy_pages_kernel(const PageShape* caches, int64_t num_caches,
                                         const int64_t* src, const int64_t* dst, int64_t copies,
                                         int64_t elements) {
  const int64_t count = num_caches * copies * elements;
  for (int64_t i = first_index(); i < count; i += index_stride()) {
    const int64_t number = i % elements, copy = i / elements % copies;
    const PageShape& shape = caches[i / elements / copies];
    int64_t own = 1;
    for (int d = 0; d < shape.dims; ++d) own *= shape.sizes[d];
    if (number >= own) continue;
    const int64_t offset = page_offset(shape, number);
    switch (shape.element_bytes) {
      case 1:
        copy_element<uint8_t>(shape, src[copy], dst[copy], offset);
        break;
      case 2:
        copy_element<uint16_t>(shape, src[copy], dst[copy], offset);
        break;
      case 4:
        copy_element<uint32_t>(shape, src[copy], dst[copy], offset);
        break;
      case 8:
        copy_element<uint64_t>(shape, src[copy], dst[copy], offset);
        break;
      case 16:
        copy_element<Bytes16>(shape, src[copy], dst[copy], offset);
        break;
    }
  }
}

// The part of the union's softmax sum that one state holds, given its lse and that of the other.
__device__ inline float share(float own, float other) {
  const float largest = own > other ? own : other;
  const float weight = expf(own - largest);
  return weight / (weight + expf(other - largest));
}

// Index: token, head, dimension.
template <class T>
__global__ void merge_out_kernel(MergeStatesParams params) {
  const int64_t heads = params.out.heads, dim = params.out.dim;
  const int64_t count = params.out.rows * heads * dim;
  for (int64_t i = first_index(); i < count; i += index_stride()) {
    const int64_t d = i % dim, head = i / dim % heads, token = i / dim / heads;
    const auto at = [&](const RowsView& view) -> T& {
      return static_cast<T*>(view.data)[token * view.row_stride + head * view.head_stride + d];
    };
    const float a = params.lse_a[head * params.lse_a_stride + token];
    const float b = params.lse_b[head * params.lse_b_stride + token];
    if (a == -INFINITY && b == -INFINITY) {
      at(params.out) = from_float<T>(0.0f);
    } else if (a == -INFINITY || b == -INFINITY) {
      at(params.out) = b == -INFINITY ? at(params.out_a) : at(params.out_b);
    } else {
      at(params.out) = from_float<T>(share(a, b) * to_float(at(params.out_a)) +
                                     share(b, a) * to_float(at(params.out_b)));
    }
  }
}

// After merge_out_kernel, which reads what this may overwrite.
static __global__ void merge_lse_kernel(MergeStatesParams params) {
  const int64_t tokens = params.out.rows, count = params.out.heads * tokens;
  for (int64_t i = first_index(); i < count; i += index_stride()) {
    const int64_t token = i % tokens, head = i / tokens;
    const float a = params.lse_a[head * params.lse_a_stride + token];
    const float b = params.lse_b[head * params.lse_b_stride + token];
    const float largest = a > b ? a : b;
    const bool alone = a == -INFINITY || b == -INFINITY;
    params.lse[head * params.lse_stride + token] =
        alone ? (b == -INFINITY ? a : b) : largest + logf(expf(a - largest) + expf(b - largest));
  }
}

}  // namespace wim::cuda
