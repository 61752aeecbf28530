// Bringing pages of any stride and dtype into the two small float32 blocks that the products read.
#pragma once

#include "attention_params.h"
#include "cpu/convert.h"
#include "cpu/inline.h"
#include "plan_layout.h"

namespace wim::cpu {

// `count` floats (fewer than a vector) from memory of which nothing beyond may be read; zeros after
// them.
template <class V, class T>
WIM_INLINE typename V::F load_part(const T* from, int64_t count) {
  T padded[V::kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = from[i];
  return V::load(padded);
}

template <class V, class T>
WIM_INLINE void store_part(T* to, typename V::F value, int64_t count) {
  T padded[V::kLanes];
  V::store(padded, value);
  for (int64_t i = 0; i < count; ++i) to[i] = padded[i];
}

template <class V, class T>
WIM_INLINE typename V::F load_upto(const T* from, int64_t count) {
  return count >= V::kLanes ? V::load(from) : load_part<V>(from, count);
}

// Where the keys [begin, end) of one block lie: slot[i] is key begin_of_block + i, null outside the
// range.
template <class T>
WIM_INLINE void find_slots(const CacheView& cache, const int32_t* pages, int64_t head,
                           int64_t block, int64_t begin, int64_t end, const T** slot) {
  const T* base = static_cast<const T*>(cache.data) + head * cache.head_stride;
  for (int64_t i = 0; i < begin - block; ++i) slot[i] = nullptr;
  for (int64_t key = begin; key < end;) {
    const int64_t page = key / cache.page_size;
    int64_t offset = key - page * cache.page_size;
    const T* start = base + int64_t{pages[page]} * cache.page_stride;
    for (; key < end && offset < cache.page_size; ++key, ++offset)
      slot[key - block] = start + offset * cache.slot_stride;
  }
  for (int64_t i = end - block; i < kBlockKeys; ++i) slot[i] = nullptr;
}

// keys[d][i] = slot[i][d] as float32: [dim][kBlockKeys]; columns without a slot are zero.
template <class V, class T>
WIM_INLINE void pack_keys(const T* const* slot, int64_t dim, float* keys) {
  constexpr int L = V::kLanes;
  for (int i = 0; i < kBlockKeys; i += L) {
    for (int64_t d = 0; d < dim; d += L) {
      typename V::F rows[L];
      for (int j = 0; j < L; ++j)
        rows[j] = slot[i + j] ? load_upto<V>(slot[i + j] + d, dim - d) : V::zero();
      V::transpose(rows);
      const int64_t count = dim - d < L ? dim - d : L;
      for (int64_t j = 0; j < count; ++j) V::store(keys + (d + j) * kBlockKeys + i, rows[j]);
    }
  }
}

// values[i][d] = slot[i][d * dim_stride] as float32: [kBlockKeys][stride]; rows without a slot and
// columns from dim up to stride are zero. Tells whether all values are finite.
template <class V, class T>
WIM_INLINE bool pack_values(const CacheView& cache, const T* const* slot, int64_t stride,
                            float* values) {
  using F = typename V::F;
  constexpr int L = V::kLanes;
  const int64_t dim = cache.dim;
  F zeros = V::zero();  // of each value its product with 0
  const auto put = [&](int64_t i, int64_t d, F value) {
    zeros = V::fma(value, V::zero(), zeros);
    V::store(values + i * stride + d, value);
  };
  for (int i = 0; i < kBlockKeys;) {
    // L slots in a row: with pages of at least L slots equal ends mean that all between them lie in
    // a row too.
    const bool run = cache.dim_stride != 1 && cache.page_size >= L && i + L <= kBlockKeys &&
                     slot[i] != nullptr && slot[i + L - 1] == slot[i] + (L - 1);
    if (run) {
      for (int64_t d = 0; d < dim; d += L) {
        F columns[L];
        for (int j = 0; j < L; ++j)
          columns[j] = d + j < dim ? V::load(slot[i] + (d + j) * cache.dim_stride) : V::zero();
        V::transpose(columns);
        for (int j = 0; j < L; ++j) put(i + j, d, columns[j]);
      }
      i += L;
      continue;
    }
    for (int64_t d = 0; d < stride; d += L) {
      if (slot[i] == nullptr) {
        V::store(values + i * stride + d, V::zero());
      } else if (cache.dim_stride == 1) {
        put(i, d, load_upto<V>(slot[i] + d, dim - d));
      } else {
        T gathered[L] = {};
        for (int64_t j = 0; j < L && d + j < dim; ++j)
          gathered[j] = slot[i][(d + j) * cache.dim_stride];
        put(i, d, V::load(gathered));
      }
    }
    ++i;
  }
  return V::reduce_add(zeros) == 0.0f;
}

}  // namespace wim::cpu
