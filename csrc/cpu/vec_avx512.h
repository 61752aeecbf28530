// Sixteen float lanes: AVX-512 F, BW, VL and DQ.
#pragma once

#include <immintrin.h>

#include "cpu/convert.h"
#include "cpu/inline.h"

namespace wim::cpu {

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  using F = __m512;
  using Mask = __mmask16;

  WIM_INLINE static F zero() { return _mm512_setzero_ps(); }
  WIM_INLINE static F set1(float x) { return _mm512_set1_ps(x); }
  WIM_INLINE static F iota() {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  WIM_INLINE static F load(const float* p) { return _mm512_loadu_ps(p); }
  WIM_INLINE static F load(const BFloat16* p) {
    const __m512i wide =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  WIM_INLINE static F load(const Float16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  WIM_INLINE static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  WIM_INLINE static void store(BFloat16* p, F v) {
    const __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i half =
        _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));  // ties go to the even neighbour
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i result = _mm512_mask_blend_epi32(nan, rounded, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
  }
  WIM_INLINE static void store(Float16* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  WIM_INLINE static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  WIM_INLINE static F add(F a, F b) { return _mm512_add_ps(a, b); }
  WIM_INLINE static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  WIM_INLINE static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  WIM_INLINE static F div(F a, F b) { return _mm512_div_ps(a, b); }
  WIM_INLINE static F max(F a, F b) { return _mm512_max_ps(a, b); }
  WIM_INLINE static F abs(F a) { return _mm512_abs_ps(a); }
  WIM_INLINE static F copysign(F magnitude, F sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(_mm512_set1_ps(-0.0f), sign));
  }
  WIM_INLINE static Mask less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  WIM_INLINE static Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  WIM_INLINE static F select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
  // 2^n for the integer n that `shifted` holds in its low mantissa bits.
  WIM_INLINE static F power_of_2(F shifted) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)));
  }

  WIM_INLINE static float reduce_add(F v) { return _mm512_reduce_add_ps(v); }
  WIM_INLINE static float reduce_max(F v) { return _mm512_reduce_max_ps(v); }
  WIM_INLINE static float first(F v) { return _mm512_cvtss_f32(v); }

  WIM_INLINE static void transpose(F (&r)[16]) {
    F t[16];
    for (int i = 0; i < 16; i += 4) {  // 4x4 blocks inside each 128-bit lane
      const F a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
      const F c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]),
              d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
      t[i] = _mm512_shuffle_ps(a, c, 0x44), t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
      t[i + 2] = _mm512_shuffle_ps(b, d, 0x44), t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    for (int i = 0; i < 4; ++i) {  // then the 4x4 grid of lanes
      const F a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88),
              b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
      const F c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
      const F d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
      r[i] = _mm512_shuffle_f32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
      r[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
  }
};

}  // namespace wim::cpu
