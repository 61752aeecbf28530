// Elementary functions on vectors. Every lane's result depends on that lane alone.
#pragma once

#include "cpu/inline.h"

namespace wim::cpu {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// 2^x for x <= 127: relative error under 2e-7. Exactly 1 at 0; 0 below -126 and at -inf; NaN stays
// NaN.
template <class V>
WIM_INLINE typename V::F exp2(typename V::F x) {
  using F = typename V::F;
  // Adding 1.5 * 2^23 rounds x to an integer and leaves it in the low mantissa bits.
  const F magic = V::set1(12582912.0f), shifted = V::add(x, magic);
  const F f = V::sub(x, V::sub(shifted, magic));
  // 2^f = 1 + f q(f) on [-1/2, 1/2]; minimax in the relative error, 2e-9 before rounding.
  F q = V::fma(V::set1(1.5353360504e-4f), f, V::set1(1.3398875017e-3f));
  q = V::fma(q, f, V::set1(9.6184369177e-3f));
  q = V::fma(q, f, V::set1(5.5503323674e-2f));
  q = V::fma(q, f, V::set1(2.4022647738e-1f));
  q = V::fma(q, f, V::set1(6.9314718246e-1f));
  const F value = V::mul(V::fma(q, f, V::set1(1.0f)), V::power_of_2(shifted));
  return V::select(V::less(x, V::set1(-126.0f)), V::zero(), value);
}

template <class V>
WIM_INLINE float exp2_scalar(float x) {
  return V::first(exp2<V>(V::set1(x)));
}

// tanh with a relative error under 5e-7.
template <class V>
WIM_INLINE typename V::F tanh(typename V::F x) {
  using F = typename V::F;
  const F magnitude = V::abs(x), square = V::mul(x, x);
  // Near 0, where 1 - e^(-2x) would cancel: x + x^3 p(x^2), minimax on |x| <= 0.55.
  F p = V::fma(V::set1(-6.2824632041e-3f), square, V::set1(2.1077750251e-2f));
  p = V::fma(p, square, V::set1(-5.3853854537e-2f));
  p = V::fma(p, square, V::set1(1.3332602382e-1f));
  p = V::fma(p, square, V::set1(-3.3333319426e-1f));
  const F small = V::fma(V::mul(p, square), x, x);
  const F decay = exp2<V>(V::mul(magnitude, V::set1(-2.0f * kLog2E)));
  const F one = V::set1(1.0f);
  const F large = V::copysign(V::div(V::sub(one, decay), V::add(one, decay)), x);
  return V::select(V::less(magnitude, V::set1(0.55f)), small, large);
}

}  // namespace wim::cpu
