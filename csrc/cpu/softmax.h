// Online softmax (Milakov and Gimelshein 2018) in base 2, and the states that it leaves: maximum m,
// sum l of 2^(s - m), output o = sum of 2^(s - m) v. A state without keys has m = -inf, l = 0, o =
// 0.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/inline.h"
#include "cpu/math.h"
#include "plan_layout.h"

namespace wim::cpu {

constexpr float kMinusInfinity = -__builtin_inff();

// A maximum of -inf (only -inf scores so far) would turn s - m into NaN; against 0 their weights
// are 0.
WIM_INLINE float finite_pivot(float maximum) { return maximum == kMinusInfinity ? 0.0f : maximum; }
WIM_INLINE float larger(float a, float b) { return b > a ? b : a; }

// What becomes of a raw product q . k before the softmax.
struct ScoreRule {
  float softcap = 0.0f;      // 0: none; else scores arrive divided by it
  float alibi_slope = 0.0f;  // in base 2
  float distance = 0.0f;     // from the block's first key to the row's position
};

template <class V>
WIM_INLINE void apply_rule(const ScoreRule& rule, float* scores) {
  using F = typename V::F;
  for (int j = 0; j < kBlockKeys; j += V::kLanes) {
    F s = V::load(scores + j);
    if (rule.softcap != 0.0f) s = V::mul(tanh<V>(s), V::set1(rule.softcap * kLog2E));
    if (rule.alibi_slope != 0.0f) {
      const F key = V::add(V::iota(), V::set1(static_cast<float>(j)));
      s = V::fma(V::set1(-rule.alibi_slope), V::abs(V::sub(V::set1(rule.distance), key)), s);
    }
    V::store(scores + j, s);
  }
}

// Scores of keys outside [low, high) of the block become -inf; a NaN there must go too.
template <class V>
WIM_INLINE void mask_scores(float low, float high, float* scores) {
  for (int j = 0; j < kBlockKeys; j += V::kLanes) {
    const typename V::F key = V::add(V::iota(), V::set1(static_cast<float>(j)));
    const auto visible = V::both(V::less(V::set1(low - 1.0f), key), V::less(key, V::set1(high)));
    V::store(scores + j, V::select(visible, V::load(scores + j), V::set1(kMinusInfinity)));
  }
}

// Turns a block's scores into weights in place and updates the row's state; returns the factor for
// the old output.
template <class V>
WIM_INLINE float softmax_step(float* scores, float* maximum, float* sum) {
  using F = typename V::F;
  F largest = V::load(scores);
  for (int j = V::kLanes; j < kBlockKeys; j += V::kLanes)
    largest = V::max(V::load(scores + j), largest);
  const float before = *maximum, now = larger(before, V::reduce_max(largest));
  const F pivot = V::set1(finite_pivot(now));
  F total = V::zero();
  for (int j = 0; j < kBlockKeys; j += V::kLanes) {
    const F weight = exp2<V>(V::sub(V::load(scores + j), pivot));
    V::store(scores + j, weight);
    total = V::add(total, weight);
  }
  const float alpha = now == before ? 1.0f : exp2_scalar<V>(before - finite_pivot(now));
  *maximum = now;
  *sum = *sum * alpha + V::reduce_add(total);
  return alpha;
}

struct State {
  float* maximum;
  float* sum;
  float* out;  // [dim], dim a multiple of the vector length
};

template <class V>
WIM_INLINE void copy_state(const State& from, int64_t dim, const State& to) {
  *to.maximum = *from.maximum, *to.sum = *from.sum;
  for (int64_t d = 0; d < dim; d += V::kLanes) V::store(to.out + d, V::load(from.out + d));
}

// `state` := the softmax state of its keys and then those of `next`. Not associative in rounding:
// the order of the folds is part of a result's definition.
template <class V>
WIM_INLINE void fold_state(const State& next, int64_t dim, const State& state) {
  const float now = larger(*state.maximum, *next.maximum), pivot = finite_pivot(now);
  const float old_factor = exp2_scalar<V>(*state.maximum - pivot),
              new_factor = exp2_scalar<V>(*next.maximum - pivot);
  *state.maximum = now;
  *state.sum = *state.sum * old_factor + *next.sum * new_factor;
  for (int64_t d = 0; d < dim; d += V::kLanes) {
    const typename V::F added = V::mul(V::load(next.out + d), V::set1(new_factor));
    V::store(state.out + d, V::fma(V::load(state.out + d), V::set1(old_factor), added));
  }
}

}  // namespace wim::cpu
