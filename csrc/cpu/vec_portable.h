// Four float lanes in plain C++ (GCC vector extensions): what every CPU runs when nothing better
// fits.
#pragma once

#include "cpu/convert.h"
#include "cpu/inline.h"

namespace wim::cpu {

struct Portable {
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 16;
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  using Mask = I;  // all bits of a lane set or clear

  WIM_INLINE static F zero() { return F{}; }
  WIM_INLINE static F set1(float x) { return F{x, x, x, x}; }
  WIM_INLINE static F iota() { return F{0, 1, 2, 3}; }
  WIM_INLINE static F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  template <class Half>
  WIM_INLINE static F load(const Half* p) {
    return F{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
  }
  WIM_INLINE static void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
  template <class Half>
  WIM_INLINE static void store(Half* p, F v) {
    for (int i = 0; i < 4; ++i) p[i] = from_float<Half>(v[i]);
  }

  // Two roundings: the same everywhere in this instruction set, which is all that reproducibility
  // needs.
  WIM_INLINE static F fma(F a, F b, F c) { return a * b + c; }
  WIM_INLINE static F add(F a, F b) { return a + b; }
  WIM_INLINE static F sub(F a, F b) { return a - b; }
  WIM_INLINE static F mul(F a, F b) { return a * b; }
  WIM_INLINE static F div(F a, F b) { return a / b; }
  WIM_INLINE static F max(F a, F b) { return a > b ? a : b; }
  WIM_INLINE static F abs(F a) { return bits_to(to_bits(a) & 0x7fffffff); }
  WIM_INLINE static F copysign(F magnitude, F sign) {
    return bits_to(to_bits(magnitude) | (to_bits(sign) & int32_t(0x80000000)));
  }
  WIM_INLINE static Mask less(F a, F b) { return a < b; }
  WIM_INLINE static Mask both(Mask a, Mask b) { return a & b; }
  WIM_INLINE static F select(Mask m, F yes, F no) { return m ? yes : no; }
  // 2^n for the integer n that `shifted` holds in its low mantissa bits.
  WIM_INLINE static F power_of_2(F shifted) {
    return bits_to((to_bits(shifted) << 23) + 0x3f800000);
  }

  WIM_INLINE static float reduce_add(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  WIM_INLINE static float reduce_max(F v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
  }
  WIM_INLINE static float first(F v) { return v[0]; }

  WIM_INLINE static void transpose(F (&r)[4]) {
    const F a = __builtin_shuffle(r[0], r[1], I{0, 4, 1, 5}),
            b = __builtin_shuffle(r[0], r[1], I{2, 6, 3, 7});
    const F c = __builtin_shuffle(r[2], r[3], I{0, 4, 1, 5}),
            d = __builtin_shuffle(r[2], r[3], I{2, 6, 3, 7});
    r[0] = __builtin_shuffle(a, c, I{0, 1, 4, 5});
    r[1] = __builtin_shuffle(a, c, I{2, 3, 6, 7});
    r[2] = __builtin_shuffle(b, d, I{0, 1, 4, 5});
    r[3] = __builtin_shuffle(b, d, I{2, 3, 6, 7});
  }

 private:
  WIM_INLINE static I to_bits(F v) { return (I)v; }
  WIM_INLINE static F bits_to(I v) { return (F)v; }
};

}  // namespace wim::cpu
