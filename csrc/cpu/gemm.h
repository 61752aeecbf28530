// The two matrix products of attention on small tiles. Each output element is one chain of fused
// multiply-adds in the order of the inner index, whatever the tile's shape: a row has the same bits
// alone and among others.
#pragma once

#include <cstdint>

#include "cpu/inline.h"
#include "plan_layout.h"

namespace wim::cpu {

constexpr int kTile = 6;  // query rows that share the loads of one register tile

// Vectors per row of a register tile: enough independent chains to hide the latency, few enough to
// stay in registers.
template <class V>
constexpr int tile_columns(int rows) {
  if (V::kRegisters >= 32) return 4;
  return rows == 1 ? 8 : rows <= 3 ? 4 : 2;
}

// acc[m][n] += sum over k of a[m][k] * b[k][n]
template <class V, int M, int N>
WIM_INLINE void multiply_add(const float* const (&a)[M], const float* b, int64_t b_stride,
                             int64_t depth, typename V::F (&acc)[M][N]) {
  for (int64_t k = 0; k < depth; ++k) {
    typename V::F right[N];
    for (int n = 0; n < N; ++n) right[n] = V::load(b + n * V::kLanes);
    for (int m = 0; m < M; ++m) {
      const typename V::F left = V::set1(a[m][k]);
      for (int n = 0; n < N; ++n) acc[m][n] = V::fma(left, right[n], acc[m][n]);
    }
    b += b_stride;
  }
}

// scores[m][key] = q[m] . k[key] for one block; keys are the columns of `keys` [depth][kBlockKeys].
template <class V, int M>
WIM_INLINE void score_tile(const float* const (&q)[M], const float* keys, int64_t depth,
                           float* scores) {
  constexpr int N = tile_columns<V>(M);
  static_assert(kBlockKeys % (N * V::kLanes) == 0);
  for (int column = 0; column < kBlockKeys; column += N * V::kLanes) {
    typename V::F acc[M][N];
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; ++n) acc[m][n] = V::zero();
    }
    multiply_add<V, M, N>(q, keys + column, kBlockKeys, depth, acc);
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; ++n)
        V::store(scores + m * kBlockKeys + column + n * V::kLanes, acc[m][n]);
    }
  }
}

// out[m] = alpha[m] * out[m] + sum over keys of weights[m][key] * values[key], N vectors from
// `column` on.
template <class V, int M, int N>
WIM_INLINE void output_columns(const float* const (&weights)[M], const float* values,
                               int64_t value_stride, int64_t column, const float* alpha,
                               float* const (&out)[M]) {
  typename V::F acc[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) acc[m][n] = V::zero();
  }
  multiply_add<V, M, N>(weights, values + column, value_stride, kBlockKeys, acc);
  for (int m = 0; m < M; ++m) {
    const typename V::F scale = V::set1(alpha[m]);
    for (int n = 0; n < N; ++n) {
      float* target = out[m] + column + n * V::kLanes;
      V::store(target, V::fma(V::load(target), scale, acc[m][n]));
    }
  }
}

template <class V, int M>
WIM_INLINE void output_tile(const float* const (&weights)[M], const float* values,
                            int64_t value_stride, int64_t dim, const float* alpha,
                            float* const (&out)[M]) {
  constexpr int N = tile_columns<V>(M);
  int64_t column = 0;
  for (; column + N * V::kLanes <= dim; column += N * V::kLanes) {
    output_columns<V, M, N>(weights, values, value_stride, column, alpha, out);
  }
  for (; column < dim; column += V::kLanes) {
    output_columns<V, M, 1>(weights, values, value_stride, column, alpha, out);
  }
}

template <class V, int M, int N>
WIM_INLINE void add_columns(const float* const (&weights)[M], const float* values,
                            int64_t value_stride, int64_t column, int64_t keys,
                            float* const (&sums)[M]) {
  typename V::F acc[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) acc[m][n] = V::load(sums[m] + column + n * V::kLanes);
  }
  multiply_add<V, M, N>(weights, values + column, value_stride, keys, acc);
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) V::store(sums[m] + column + n * V::kLanes, acc[m][n]);
  }
}

// The same chain in pieces, for blocks of which a row sees only a part: sums[m] += weights . values
// over keys [begin, end). Values outside are not touched: they may be NaN.
template <class V, int M>
WIM_INLINE void add_keys(const float* const (&weights)[M], const float* values,
                         int64_t value_stride, int64_t dim, int64_t begin, int64_t end,
                         float* const (&sums)[M]) {
  constexpr int N = tile_columns<V>(M);
  const float* shifted[M];
  for (int m = 0; m < M; ++m) shifted[m] = weights[m] + begin;
  values += begin * value_stride;
  int64_t column = 0;
  for (; column + N * V::kLanes <= dim; column += N * V::kLanes) {
    add_columns<V, M, N>(shifted, values, value_stride, column, end - begin, sums);
  }
  for (; column < dim; column += V::kLanes) {
    add_columns<V, M, 1>(shifted, values, value_stride, column, end - begin, sums);
  }
}

}  // namespace wim::cpu
