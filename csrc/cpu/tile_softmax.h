// Softmax of 16 query rows at once, each in a lane of its own: no lane ever meets another one.
#pragma once

#include "cpu/scoring.h"
#include "cpu/shell_pairs.h"
#include "cpu/tile_operands.h"

namespace wim::cpu {

// One column of tiles: 16 packed rows and the state of their current cell.
struct Lanes {
  const int32_t *low, *high;      // [16] keys that each sees
  const float *slope, *position;  // [16] of ALiBi; slope null: none
  float *pivot, *sum;             // [16]
  float* out;                     // [v_dim][16]
};

// The following work on scores [64][16] of the block of keys that begins at `block`.
class BlockSoftmax {
  using V = Avx512;
  using F = V::F;

 public:
  static void apply_rule(const Lanes& lanes, const Scoring& scoring, int64_t block, float* scores) {
    for (int64_t key = block; key < block + kBlockKeys; ++key, scores += V::kLanes) {
      F s = scoring.capped<V>(V::load(scores));
      if (lanes.slope != nullptr) {
        const F distance = V::sub(V::load(lanes.position), V::set1(static_cast<float>(key)));
        s = V::fma(V::sub(V::zero(), V::load(lanes.slope)), V::abs(distance), s);
      }
      V::store(scores, s);
    }
  }

  // Scores that a row does not see become -inf; a NaN there must go too.
  static void mask(const Lanes& lanes, int64_t block, float* scores) {
    const __m512i low = _mm512_loadu_si512(lanes.low), high = _mm512_loadu_si512(lanes.high);
    for (int64_t key = block; key < block + kBlockKeys; ++key, scores += V::kLanes) {
      const __m512i at = _mm512_set1_epi32(static_cast<int32_t>(key));
      const __mmask16 seen = _mm512_cmple_epi32_mask(low, at) & _mm512_cmpgt_epi32_mask(high, at);
      V::store(scores, V::select(seen, V::load(scores), V::set1(kMinusInfinity)));
    }
  }

  // The pivot is the largest score so far: its weight, exactly 1, needs no rounding. Returns the
  // pivot, 0 where it is -inf.
  WIM_INLINE static F move_pivot(const Lanes& lanes, F factor, int64_t v_dim, const float* scores) {
    F largest[4];
    for (int i = 0; i < 4; ++i) largest[i] = V::load(scores + i * V::kLanes);
    for (int64_t j = 4; j < kBlockKeys; j += 4) {
      for (int i = 0; i < 4; ++i)
        largest[i] = V::max(V::load(scores + (j + i) * V::kLanes), largest[i]);
    }
    const F top =
        V::mul(V::max(V::max(largest[0], largest[1]), V::max(largest[2], largest[3])), factor);
    const F infinity = V::set1(kMinusInfinity);
    F pivot = V::load(lanes.pivot);
    const __mmask16 moves = V::less(pivot, top);
    if (moves != 0) {
      const F now = V::select(moves, top, pivot);
      const __mmask16 had_keys = V::less(infinity, pivot);
      if ((moves & had_keys) != 0)
        rescale(exp2<V>(V::select(had_keys, V::sub(pivot, now), V::zero())), lanes, v_dim);
      V::store(lanes.pivot, now);
      pivot = now;
    }
    return V::select(_mm512_cmp_ps_mask(pivot, infinity, _CMP_EQ_OQ), V::zero(), pivot);
  }

  // weights [32][16] pairs, rounded to nearest; adds them to the lanes' sums unrounded.
  WIM_INLINE static void weigh(const Lanes& lanes, F factor, F pivot, const float* scores,
                               BFloat16* weights) {
    const F minus_pivot = V::sub(V::zero(), pivot);
    const __m512i half = _mm512_set1_epi32(0x8000);
    F total[2] = {V::zero(), V::zero()};
    for (int64_t j = 0; j < kBlockKeys; j += 2, scores += 2 * V::kLanes, weights += 2 * V::kLanes) {
      const F even = TileLayout::exp2(V::fma(V::load(scores), factor, minus_pivot));
      const F odd = TileLayout::exp2(V::fma(V::load(scores + V::kLanes), factor, minus_pivot));
      const __m512i low = _mm512_add_epi32(_mm512_castps_si512(even), half);
      const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
      _mm512_store_si512(weights,
                         _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high));
      total[0] = V::add(total[0], even), total[1] = V::add(total[1], odd);
    }
    V::store(lanes.sum, V::add(V::load(lanes.sum), V::add(total[0], total[1])));
  }

 private:
  static void rescale(F alpha, const Lanes& lanes, int64_t v_dim) {
    V::store(lanes.sum, V::mul(V::load(lanes.sum), alpha));
    for (int64_t d = 0; d < v_dim; ++d) {
      float* const out = lanes.out + d * V::kLanes;
      V::store(out, V::mul(V::load(out), alpha));
    }
  }
};

// From raw scores to weights; the lanes' pivots, sums and outputs so far follow. With `sees_part`
// some row does not see all keys.
WIM_INLINE void softmax_block(const Lanes& lanes, const Scoring& scoring, int64_t block,
                              bool sees_part, int64_t v_dim, float* scores, BFloat16* weights) {
  if (scoring.has_rule) BlockSoftmax::apply_rule(lanes, scoring, block, scores);
  if (sees_part) BlockSoftmax::mask(lanes, block, scores);
  const Avx512::F factor = Avx512::set1(scoring.has_rule ? 1.0f : scoring.scale);
  const Avx512::F pivot = BlockSoftmax::move_pivot(lanes, factor, v_dim, scores);
  BlockSoftmax::weigh(lanes, factor, pivot, scores, weights);
}

}  // namespace wim::cpu
