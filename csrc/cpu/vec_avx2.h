// Eight float lanes: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "cpu/convert.h"
#include "cpu/inline.h"

namespace wim::cpu {

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;
  using F = __m256;
  using Mask = __m256;

  WIM_INLINE static F zero() { return _mm256_setzero_ps(); }
  WIM_INLINE static F set1(float x) { return _mm256_set1_ps(x); }
  WIM_INLINE static F iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
  WIM_INLINE static F load(const float* p) { return _mm256_loadu_ps(p); }
  WIM_INLINE static F load(const BFloat16* p) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  WIM_INLINE static F load(const Float16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  WIM_INLINE static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  WIM_INLINE static void store(BFloat16* p, F v) {
    const __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i half =
        _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));  // ties go to the even neighbour
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    store_low_halves(p, _mm256_blendv_epi8(rounded, quiet, nan));
  }
  WIM_INLINE static void store(Float16* p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  WIM_INLINE static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  WIM_INLINE static F add(F a, F b) { return _mm256_add_ps(a, b); }
  WIM_INLINE static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  WIM_INLINE static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  WIM_INLINE static F div(F a, F b) { return _mm256_div_ps(a, b); }
  WIM_INLINE static F max(F a, F b) { return _mm256_max_ps(a, b); }
  WIM_INLINE static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  WIM_INLINE static F copysign(F magnitude, F sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
  }
  WIM_INLINE static Mask less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  WIM_INLINE static Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
  WIM_INLINE static F select(Mask m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
  // 2^n for the integer n that `shifted` holds in its low mantissa bits.
  WIM_INLINE static F power_of_2(F shifted) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
  }

  WIM_INLINE static float reduce_add(F v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  WIM_INLINE static float reduce_max(F v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  WIM_INLINE static float first(F v) { return _mm256_cvtss_f32(v); }

  WIM_INLINE static void transpose(F (&r)[8]) {
    F t[8];
    for (int i = 0; i < 8; i += 4) {
      const F a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
      const F c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]),
              d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
      t[i] = _mm256_shuffle_ps(a, c, 0x44), t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      t[i + 2] = _mm256_shuffle_ps(b, d, 0x44), t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
      r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
  }

 private:
  // The low 16 bits of every 32-bit lane.
  WIM_INLINE static void store_low_halves(BFloat16* p, __m256i lanes) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lanes, lanes), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
};

}  // namespace wim::cpu
