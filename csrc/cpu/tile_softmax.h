// Softmax of 16 query rows at once, each in a lane of its own: no lane ever meets another one.
#pragma once

#include "cpu/scoring.h"
#include "cpu/shell_pairs.h"

namespace wim::cpu {

// One column of tiles: 16 packed rows and the state of their current cell.
struct Lanes {
  const int32_t *low, *high;      // [16] keys that each sees
  const float *slope, *position;  // [16] of ALiBi, or null
  float *pivot, *sum;             // [16]
  float* out;                     // [v_dim][16]
};

// The weights of one column for the keys [begin, end) of the sequence. Made, it has the scores
// finished, pivot and state fit for them; `advance` then writes weights, a few at a time, so that
// tile products run meanwhile.
//
// A pivot is a score near which the weights lie, not always the largest: it moves only if a score
// exceeds it by more than 2^kSlack, so that outputs are rescaled once a cell, seldom more.
class TileSoftmax {
  using V = Avx512;
  using F = V::F;
  static constexpr float kSlack = 8.0f;

 public:
  // scores [end - begin][16], raw; weights [(end - begin) / 2][16] pairs of bfloat16.
  WIM_INLINE TileSoftmax(const Lanes& lanes, const Scoring& scoring, int64_t begin, int64_t end,
                         bool masked, int64_t v_dim, float* scores, BFloat16* weights)
      : scores_(scores), weights_(weights), pairs_((end - begin) / 2), sum_(lanes.sum) {
    if (scoring.has_rule) apply(scoring, lanes, begin);
    if (masked) mask(lanes, begin);
    factor_ = V::set1(scoring.has_rule ? 1.0f : scoring.scale);
    move_pivot(lanes, v_dim);
  }

  template <int kPairs>
  WIM_INLINE void advance() {
    for (int i = 0; i < kPairs && next_ < pairs_; ++i, ++next_) {
      const F even = weight(2 * next_), odd = weight(2 * next_ + 1);
      // [even, odd] to pairs of the two keys, lane by lane
      const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
      _mm512_store_si512(weights_ + next_ * 2 * V::kLanes,
                         _mm512_permutexvar_epi16(interleave(), halves));
      total_[0] = V::add(total_[0], even), total_[1] = V::add(total_[1], odd);
    }
  }

  WIM_INLINE void finish() {
    while (next_ < pairs_) advance<2>();
    V::store(sum_, V::add(V::load(sum_), V::add(total_[0], total_[1])));
  }

 private:
  WIM_INLINE static __m512i interleave() {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i odd = _mm512_add_epi32(lane, _mm512_set1_epi32(16));
    return _mm512_or_si512(lane, _mm512_slli_epi32(odd, 16));
  }

  WIM_INLINE F weight(int64_t key) const {
    return PairLayout<32>::exp2(V::fma(V::load(scores_ + key * V::kLanes), factor_, minus_pivot_));
  }

  void apply(const Scoring& scoring, const Lanes& lanes, int64_t begin) {
    for (int64_t j = 0; j < 2 * pairs_; ++j) {
      F s = scoring.capped<V>(V::load(scores_ + j * V::kLanes));
      if (lanes.slope != nullptr) {
        const F distance = V::sub(V::load(lanes.position), V::set1(static_cast<float>(begin + j)));
        s = V::fma(V::sub(V::zero(), V::load(lanes.slope)), V::abs(distance), s);
      }
      V::store(scores_ + j * V::kLanes, s);
    }
  }

  void mask(const Lanes& lanes, int64_t begin) {
    const __m512i low = _mm512_loadu_si512(lanes.low), high = _mm512_loadu_si512(lanes.high);
    for (int64_t j = 0; j < 2 * pairs_; ++j) {
      const __m512i key = _mm512_set1_epi32(static_cast<int32_t>(begin + j));
      const __mmask16 seen = _mm512_cmple_epi32_mask(low, key) & _mm512_cmpgt_epi32_mask(high, key);
      float* const s = scores_ + j * V::kLanes;
      V::store(s, V::select(seen, V::load(s), V::set1(kMinusInfinity)));
    }
  }

  WIM_INLINE void move_pivot(const Lanes& lanes, int64_t v_dim) {
    F largest[4];
    for (int i = 0; i < 4; ++i) largest[i] = V::load(scores_ + i * V::kLanes);
    for (int64_t j = 4; j < 2 * pairs_; j += 4) {
      for (int i = 0; i < 4; ++i)
        largest[i] = V::max(V::load(scores_ + (j + i) * V::kLanes), largest[i]);
    }
    const F top =
        V::mul(V::max(V::max(largest[0], largest[1]), V::max(largest[2], largest[3])), factor_);
    F pivot = V::load(lanes.pivot);
    const __mmask16 moves = V::less(V::add(pivot, V::set1(kSlack)), top);
    if (moves != 0) {
      const F now = V::select(moves, top, pivot);
      const __mmask16 had_one = V::less(V::set1(kMinusInfinity), pivot) & moves;
      if (had_one != 0)
        rescale(exp2<V>(V::select(had_one, V::sub(pivot, now), V::zero())), lanes, v_dim);
      V::store(lanes.pivot, now);
      pivot = now;
    }
    const __mmask16 none = _mm512_cmp_ps_mask(pivot, V::set1(kMinusInfinity), _CMP_EQ_OQ);
    minus_pivot_ = V::sub(V::zero(), V::select(none, V::zero(), pivot));
  }

  static void rescale(F alpha, const Lanes& lanes, int64_t v_dim) {
    V::store(lanes.sum, V::mul(V::load(lanes.sum), alpha));
    for (int64_t d = 0; d < v_dim; ++d) {
      float* const out = lanes.out + d * V::kLanes;
      V::store(out, V::mul(V::load(out), alpha));
    }
  }

  float* const scores_;
  BFloat16* const weights_;
  const int64_t pairs_;
  float* const sum_;
  F factor_, minus_pivot_;
  F total_[2] = {V::zero(), V::zero()};
  int64_t next_ = 0;
};

}  // namespace wim::cpu
