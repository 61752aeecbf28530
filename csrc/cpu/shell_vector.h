// The shell of float vectors V over a cache of dtype T: float32 operands, fused multiply-adds.
#pragma once

#include "cpu/attention_kernel.h"
#include "cpu/gemm.h"
#include "cpu/math.h"
#include "cpu/pack.h"

namespace wim::cpu {

template <class Vector, class T>
struct VectorShell {
  using V = Vector;
  using F = typename V::F;
  using Element = T;
  using Operand = float;
  static constexpr int64_t kTile = 6;
  // Packed float32 keys and values of head_dim 64 take half of a 256 KB cache.
  static constexpr int64_t kStrip = 256;

  WIM_INLINE static int64_t depth(int64_t dim) { return dim; }
  WIM_INLINE static int64_t product_bytes(int64_t, int64_t) { return 0; }
  WIM_INLINE static F exp2(F x) { return cpu::exp2<V>(x); }

  WIM_INLINE static void put_weights(F a, F b, float* weights, F (&total)[2]) {
    V::store(weights, a), V::store(weights + V::kLanes, b);
    total[0] = V::add(total[0], a), total[1] = V::add(total[1], b);
  }

  WIM_INLINE static void pack_query(const T* q, int64_t dim, float sign, float* to) {
    for (int64_t d = 0; d < dim; d += V::kLanes) {
      const F value = V::mul(load_upto<V>(q + d, dim - d), V::set1(sign));
      if (dim - d >= V::kLanes) {
        V::store(to + d, value);
      } else {
        store_part<V>(to + d, value, dim - d);
      }
    }
  }
  static void pack_keys(const T* const* slot, int64_t dim, float* keys) {
    cpu::pack_keys<V>(slot, dim, keys);
  }
  static bool pack_values(const CacheView& cache, const T* const* slot, int64_t v_dim,
                          float* values) {
    return cpu::pack_values<V>(cache, slot, v_dim, values);
  }

  // scores[m][j] = q[m] . k[j] for the keys j of blocks [begin, end)
  WIM_INLINE static void score(const float* const* query, int64_t count, const float* keys,
                               int64_t depth, int64_t begin, int64_t end, float* scores) {
    for (int64_t b = begin; b < end; ++b) {
      product(query, count, keys + b * kBlockKeys * depth, kBlockKeys, depth, kBlockKeys,
              scores + b * kBlockKeys, kStrip);
    }
  }

  // sums[m] = sum over keys j of [begin, end) of weights[m][j] * v[j]
  WIM_INLINE static void output(const float* const* weights, int64_t count, const float* values,
                                int64_t v_dim, int64_t begin, int64_t end, float* sums) {
    const float* shifted[kTile];
    for (int64_t m = 0; m < count; ++m) shifted[m] = weights[m] + begin;
    product(shifted, count, values + begin * v_dim, v_dim, end - begin, v_dim, sums, v_dim);
  }

  // Values of keys [begin, end), with zeros for those outside [low, high).
  WIM_INLINE static void hide_values(const float* values, int64_t v_dim, int64_t begin, int64_t end,
                                     int64_t low, int64_t high, float* visible) {
    for (int64_t j = begin; j < end; ++j) {
      for (int64_t d = 0; d < v_dim; ++d)
        visible[j * v_dim + d] = j >= low && j < high ? values[j * v_dim + d] : 0.0f;
    }
  }

 private:
  template <int M>
  static void rows_product(const float* const* a, const float* b, int64_t b_stride, int64_t depth,
                           int64_t width, float* c, int64_t c_stride) {
    const float* rows[M];
    for (int m = 0; m < M; ++m) rows[m] = a[m];
    multiply_wide<V, M>(rows, b, b_stride, depth, width, c, c_stride);
  }
  static void product(const float* const* a, int64_t count, const float* b, int64_t b_stride,
                      int64_t depth, int64_t width, float* c, int64_t c_stride) {
    switch (count) {
      case 1:
        return rows_product<1>(a, b, b_stride, depth, width, c, c_stride);
      case 2:
        return rows_product<2>(a, b, b_stride, depth, width, c, c_stride);
      case 3:
        return rows_product<3>(a, b, b_stride, depth, width, c, c_stride);
      case 4:
        return rows_product<4>(a, b, b_stride, depth, width, c, c_stride);
      case 5:
        return rows_product<5>(a, b, b_stride, depth, width, c, c_stride);
      case 6:
        return rows_product<6>(a, b, b_stride, depth, width, c, c_stride);
    }
  }
};

// The table of an instruction set that has no better shell for any dtype.
template <class V>
struct VectorKernel {
  static int64_t scratch_bytes(const AttentionWork& work) {
    return cpu::scratch_bytes<VectorShell<V, float>>(work);  // the same for every dtype
  }
  static void run_item(const AttentionWork& work, int64_t item, int64_t kv_head, char* scratch) {
    switch (work.params.dtype) {
      case DType::kFloat32:
        return cpu::run_item<VectorShell<V, float>>(work, item, kv_head, scratch);
      case DType::kBFloat16:
        return cpu::run_item<VectorShell<V, BFloat16>>(work, item, kv_head, scratch);
      case DType::kFloat16:
        return cpu::run_item<VectorShell<V, Float16>>(work, item, kv_head, scratch);
    }
  }
  static void run_combine(const AttentionWork& work, int64_t index, char* scratch) {
    switch (work.params.dtype) {
      case DType::kFloat32:
        return combine_token<V, float>(work, work.combines[index], scratch);
      case DType::kBFloat16:
        return combine_token<V, BFloat16>(work, work.combines[index], scratch);
      case DType::kFloat16:
        return combine_token<V, Float16>(work, work.combines[index], scratch);
    }
  }
  static constexpr AttentionKernel table{scratch_bytes, run_item, run_combine};
};

}  // namespace wim::cpu
