// bfloat16 operands in pairs, as both vdpbf16ps and the AMX tiles want them: a 32-bit lane holds
// two neighbours along the inner index of a product. For scores these are two dimensions of a key,
// so a key's pairs are already in memory; for outputs two keys of the absolute grid.
#pragma once

#include <immintrin.h>

#include "cpu/attention_kernel.h"
#include "cpu/vec_avx512.h"

namespace wim::cpu {

// Layouts and the softmax's arithmetic. AMX tiles share exp2 and how queries and values are loaded.
template <int64_t DepthMultiple>
struct PairLayout {
  using V = Avx512;
  using F = V::F;
  using Element = BFloat16;
  using Operand = BFloat16;

  // Zeros fill a row up to here.
  WIM_INLINE static int64_t depth(int64_t dim) {
    return (dim + DepthMultiple - 1) / DepthMultiple * DepthMultiple;
  }

  // 2^x for x <= 127: relative error under 3e-6, a thousandth of what rounding to bfloat16 adds and
  // little enough for the lse. 0 below -150 and at -inf; NaN stays NaN.
  WIM_INLINE static F exp2(F x) {
    constexpr int kFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const F f = _mm512_reduce_ps(x, kFloor);  // x - floor(x); 0 at -inf
    // 2^f on [0, 1), minimax in the relative error.
    F p = V::fma(V::set1(1.3534163764e-2f), f, V::set1(5.2011468590e-2f));
    p = V::fma(p, f, V::set1(2.4144275218e-1f));
    p = V::fma(p, f, V::set1(6.9300383534e-1f));
    p = V::fma(p, f, V::set1(1.0000025933f));
    return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
  }

  WIM_INLINE static void put_weights(F a, F b, BFloat16* weights, F (&total)[2]) {
    _mm512_storeu_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    total[0] = V::add(total[0], a), total[1] = V::add(total[1], b);
  }

  WIM_INLINE static void pack_query(const BFloat16* q, int64_t dim, float sign, BFloat16* to) {
    const int64_t full = depth(dim);
    for (int64_t d = 0; d < full; d += V::kLanes) {
      const F value = d < dim ? V::mul(load_upto<V>(q + d, dim - d), V::set1(sign)) : V::zero();
      if (full - d >= V::kLanes) {
        V::store(to + d, value);
      } else {
        store_part<V>(to + d, value, full - d);
      }
    }
  }

  // keys [depth / 2][kBlockKeys] pairs. Shuffles move 32-bit lanes whatever they hold.
  static void pack_keys(const BFloat16* const* slot, int64_t dim, BFloat16* keys) {
    const int64_t pairs = depth(dim) / 2;
    for (int64_t i = 0; i < kBlockKeys; i += V::kLanes) {
      for (int64_t pair = 0; pair < pairs; pair += V::kLanes) {
        F rows[V::kLanes];
        for (int j = 0; j < V::kLanes; ++j)
          rows[j] = slot[i + j] ? load_pairs(slot[i + j], 2 * pair, dim) : V::zero();
        V::transpose(rows);
        const int64_t count = pairs - pair < V::kLanes ? pairs - pair : V::kLanes;
        for (int64_t j = 0; j < count; ++j)
          _mm512_store_ps(keys + ((pair + j) * kBlockKeys + i) * 2, rows[j]);
      }
    }
  }

  // values [kBlockKeys / 2][stride] pairs; zeros for keys without a slot and from dim up to stride.
  // Tells whether all values are finite.
  static bool pack_values(const CacheView& cache, const BFloat16* const* slot, int64_t stride,
                          BFloat16* values) {
    __mmask32 infinite = 0;
    const auto put = [&](BFloat16* to, __m512i pairs) {
      const __m512i exponent = _mm512_set1_epi16(0x7f80);
      infinite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(pairs, exponent), exponent);
      _mm512_store_si512(to, pairs);
    };
    constexpr int64_t kRun = 2 * V::kLanes;  // keys of one vector of pairs
    for (int64_t i = 0; i < kBlockKeys; i += kRun) {
      // With pages of at least kRun slots equal ends mean that all between them lie in a row too.
      if (cache.dim_stride != 1 && cache.page_size >= kRun && slot[i] != nullptr &&
          slot[i + kRun - 1] == slot[i] + (kRun - 1)) {
        for (int64_t d = 0; d < stride; d += V::kLanes) {
          F columns[V::kLanes];
          for (int64_t j = 0; j < V::kLanes; ++j) {
            columns[j] = d + j < cache.dim ? _mm512_loadu_ps(slot[i] + (d + j) * cache.dim_stride)
                                           : V::zero();
          }
          V::transpose(columns);
          for (int64_t j = 0; j < V::kLanes; ++j)
            put(values + ((i / 2 + j) * stride + d) * 2, _mm512_castps_si512(columns[j]));
        }
        continue;
      }
      for (int64_t key = i; key < i + kRun; key += 2) {
        for (int64_t d = 0; d < stride; d += V::kLanes) {
          const __m512i even = _mm512_cvtepu16_epi32(load_values(cache, slot[key], d));
          const __m512i odd = _mm512_cvtepu16_epi32(load_values(cache, slot[key + 1], d));
          put(values + key * stride + 2 * d, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
      }
    }
    return infinite == 0;
  }

  static void hide_values(const BFloat16* values, int64_t v_dim, int64_t begin, int64_t end,
                          int64_t low, int64_t high, BFloat16* visible) {
    for (int64_t j = begin; j < end; ++j) {
      for (int64_t d = 0; d < v_dim; ++d) {
        const int64_t at = (j / 2 * v_dim + d) * 2 + j % 2;
        visible[at] = j >= low && j < high ? values[at] : BFloat16{0};
      }
    }
  }

  // 16 values of a key from dimension d on.
  WIM_INLINE static __m256i load_values(const CacheView& cache, const BFloat16* slot, int64_t d) {
    const int64_t left = cache.dim - d;
    if (slot == nullptr || left <= 0) return _mm256_setzero_si256();
    if (cache.dim_stride == 1) {
      const __mmask16 mask =
          left >= 16 ? static_cast<__mmask16>(-1) : static_cast<__mmask16>((1 << left) - 1);
      return _mm256_maskz_loadu_epi16(mask, slot + d);
    }
    alignas(32) BFloat16 gathered[16] = {};
    for (int64_t j = 0; j < 16 && j < left; ++j) gathered[j] = slot[(d + j) * cache.dim_stride];
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(gathered));
  }

 private:
  // 16 pairs of a key from dimension d on, zeros from dim on.
  WIM_INLINE static F load_pairs(const BFloat16* key, int64_t d, int64_t dim) {
    const int64_t left = dim - d;
    const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, key + d));
  }
};

// Products by vdpbf16ps: each output element is one chain of it in the order of the pairs.
struct PairShell : PairLayout<2> {
  static constexpr int64_t kTile = 6;
  static constexpr int64_t kStrip = 512;

  WIM_INLINE static void score(const BFloat16* const* query, int64_t count, const BFloat16* keys,
                               int64_t depth, int64_t begin, int64_t end, float* scores) {
    for (int64_t b = begin; b < end; ++b) {
      product(query, count, keys + b * kBlockKeys * depth, kBlockKeys, depth / 2, kBlockKeys,
              scores + b * kBlockKeys, kStrip);
    }
  }

  WIM_INLINE static void output(const BFloat16* const* weights, int64_t count,
                                const BFloat16* values, int64_t v_dim, int64_t begin, int64_t end,
                                float* sums) {
    const BFloat16* shifted[kTile];
    for (int64_t m = 0; m < count; ++m) shifted[m] = weights[m] + begin;
    product(shifted, count, values + begin * v_dim, v_dim, (end - begin) / 2, v_dim, sums, v_dim);
  }

 private:
  // c[m][n] = sum over pairs k of a[m][k] . b[k][n] for N vectors
  template <int M, int N>
  WIM_INLINE static void multiply(const BFloat16* const (&a)[M], const BFloat16* b,
                                  int64_t b_stride, int64_t pairs, float* c, int64_t c_stride) {
    F acc[M][N];
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; ++n) acc[m][n] = V::zero();
    }
    for (int64_t k = 0; k < pairs; ++k) {
      __m512bh right[N];
      for (int n = 0; n < N; ++n)
        right[n] = (__m512bh)_mm512_load_si512(b + (k * b_stride + n * V::kLanes) * 2);
      for (int m = 0; m < M; ++m) {
        int32_t pair;
        std::memcpy(&pair, a[m] + 2 * k, sizeof pair);
        const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
        for (int n = 0; n < N; ++n) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], left, right[n]);
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; ++n) V::store(c + m * c_stride + n * V::kLanes, acc[m][n]);
    }
  }

  template <int M>
  static void rows_product(const BFloat16* const* a, const BFloat16* b, int64_t b_stride,
                           int64_t pairs, int64_t width, float* c, int64_t c_stride) {
    const BFloat16* rows[M];
    for (int m = 0; m < M; ++m) rows[m] = a[m];
    int64_t column = 0;
    for (; column + 4 * V::kLanes <= width; column += 4 * V::kLanes)
      multiply<M, 4>(rows, b + 2 * column, b_stride, pairs, c + column, c_stride);
    for (; column < width; column += V::kLanes)
      multiply<M, 1>(rows, b + 2 * column, b_stride, pairs, c + column, c_stride);
  }
  static void product(const BFloat16* const* a, int64_t count, const BFloat16* b, int64_t b_stride,
                      int64_t pairs, int64_t width, float* c, int64_t c_stride) {
    switch (count) {
      case 1:
        return rows_product<1>(a, b, b_stride, pairs, width, c, c_stride);
      case 2:
        return rows_product<2>(a, b, b_stride, pairs, width, c, c_stride);
      case 3:
        return rows_product<3>(a, b, b_stride, pairs, width, c, c_stride);
      case 4:
        return rows_product<4>(a, b, b_stride, pairs, width, c, c_stride);
      case 5:
        return rows_product<5>(a, b, b_stride, pairs, width, c, c_stride);
      case 6:
        return rows_product<6>(a, b, b_stride, pairs, width, c, c_stride);
    }
  }
};

// What an instruction set with pairs leaves to plain AVX-512: other dtypes, and all that is not
// worth a second copy.
template <auto kScratchBytes, auto kRunItem>
struct PairKernel {
  static int64_t scratch_bytes(const AttentionWork& work) {
    return work.params.dtype == DType::kBFloat16 ? kScratchBytes(work)
                                                 : avx512_kernel.scratch_bytes(work);
  }
  static void run_item(const AttentionWork& work, int64_t item, int64_t kv_head, char* scratch) {
    const auto run = work.params.dtype == DType::kBFloat16 ? kRunItem : avx512_kernel.run_item;
    run(work, item, kv_head, scratch);
  }
  static void run_combine(const AttentionWork& work, int64_t index, char* scratch) {
    avx512_kernel.run_combine(work, index, scratch);
  }
  static constexpr AttentionKernel table{scratch_bytes, run_item, run_combine};
};

}  // namespace wim::cpu
