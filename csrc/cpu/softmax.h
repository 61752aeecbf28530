// Online softmax (Milakov and Gimelshein 2018) in base 2, and the states that it leaves: maximum m,
// sum l of 2^(s - m), output o = sum of 2^(s - m) v. A state without keys has m = -inf, l = 0, o =
// 0.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/inline.h"
#include "cpu/math.h"
#include "cpu/scoring.h"

namespace wim::cpu {

constexpr float kMinusInfinity = -__builtin_inff();

// A maximum of -inf (only -inf scores so far) would turn s - m into NaN; against 0 their weights
// are 0.
WIM_INLINE float finite_pivot(float maximum) { return maximum == kMinusInfinity ? 0.0f : maximum; }
WIM_INLINE float larger(float a, float b) { return b > a ? b : a; }

// The following work on keys [begin, end) of a strip, whole vectors.

// Scores with softcap or ALiBi; `slope` in base 2, `distance` from the strip's first key to the
// row's position.
template <class V>
WIM_INLINE void apply_rule(const Scoring& scoring, float slope, float distance, int64_t begin,
                           int64_t end, float* scores) {
  using F = typename V::F;
  for (int64_t j = begin; j < end; j += V::kLanes) {
    F s = scoring.capped<V>(V::load(scores + j));
    if (slope != 0.0f) {
      const F key = V::add(V::iota(), V::set1(static_cast<float>(j)));
      s = V::fma(V::set1(-slope), V::abs(V::sub(V::set1(distance), key)), s);
    }
    V::store(scores + j, s);
  }
}

// Scores of keys outside [low, high) become -inf; a NaN there must go too.
template <class V>
WIM_INLINE void mask_scores(int64_t low, int64_t high, int64_t begin, int64_t end, float* scores) {
  const typename V::F before = V::set1(static_cast<float>(low - 1)),
                      after = V::set1(static_cast<float>(high));
  for (int64_t j = begin; j < end; j += V::kLanes) {
    if (j >= low && j + V::kLanes <= high) continue;
    const typename V::F key = V::add(V::iota(), V::set1(static_cast<float>(j)));
    const auto visible = V::both(V::less(before, key), V::less(key, after));
    V::store(scores + j, V::select(visible, V::load(scores + j), V::set1(kMinusInfinity)));
  }
}

// Turns scores, still to be multiplied by `scale` > 0, into weights in place and updates the row's
// state; returns the factor for the old output.
template <class Shell>
WIM_INLINE float softmax_step(float* scores, int64_t begin, int64_t end, float scale,
                              float* maximum, float* sum) {
  using V = typename Shell::V;
  using F = typename V::F;
  constexpr int kStep = 2 * V::kLanes;
  F largest[2] = {V::load(scores + begin), V::load(scores + begin + V::kLanes)};
  for (int64_t j = begin + kStep; j < end; j += kStep) {
    largest[0] = V::max(V::load(scores + j), largest[0]);
    largest[1] = V::max(V::load(scores + j + V::kLanes), largest[1]);
  }
  const float before = *maximum;
  const float now = larger(before, V::reduce_max(V::max(largest[0], largest[1])) * scale);
  const F factor = V::set1(scale), pivot = V::set1(-finite_pivot(now));
  const auto weights = reinterpret_cast<typename Shell::Operand*>(scores);
  F total[2] = {V::zero(), V::zero()};
  for (int64_t j = begin; j < end; j += kStep) {
    const F a = Shell::exp2(V::fma(V::load(scores + j), factor, pivot));
    const F b = Shell::exp2(V::fma(V::load(scores + j + V::kLanes), factor, pivot));
    Shell::put_weights(a, b, weights + j, total);
  }
  const float alpha = now == before ? 1.0f : exp2_scalar<V>(before - finite_pivot(now));
  *maximum = now;
  *sum = *sum * alpha + V::reduce_add(V::add(total[0], total[1]));
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
