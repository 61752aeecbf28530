// The two matrix products of attention on small tiles of float vectors. Each output element is one
// chain of fused multiply-adds in the order of the inner index, whatever the tile's shape: a row
// has the same bits alone and among others.
#pragma once

#include <cstdint>

#include "cpu/inline.h"
#include "plan_layout.h"

namespace wim::cpu {

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

// c[m * c_stride + n] = sum over k of a[m][k] * b[k][n], N vectors wide
template <class V, int M, int N>
WIM_INLINE void multiply(const float* const (&a)[M], const float* b, int64_t b_stride,
                         int64_t depth, float* c, int64_t c_stride) {
  typename V::F acc[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) acc[m][n] = V::zero();
  }
  multiply_add<V, M, N>(a, b, b_stride, depth, acc);
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) V::store(c + m * c_stride + n * V::kLanes, acc[m][n]);
  }
}

// As multiply, for any width that is a multiple of the vector's.
template <class V, int M>
WIM_INLINE void multiply_wide(const float* const (&a)[M], const float* b, int64_t b_stride,
                              int64_t depth, int64_t width, float* c, int64_t c_stride) {
  constexpr int N = tile_columns<V>(M);
  int64_t column = 0;
  for (; column + N * V::kLanes <= width; column += N * V::kLanes)
    multiply<V, M, N>(a, b + column, b_stride, depth, c + column, c_stride);
  for (; column < width; column += V::kLanes)
    multiply<V, M, 1>(a, b + column, b_stride, depth, c + column, c_stride);
}

}  // namespace wim::cpu
