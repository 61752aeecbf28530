// bfloat16 and float16 as bit patterns, converted one at a time. The vector code of the attention
// kernel has its own; both round to nearest, ties to even, and keep NaN a NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/inline.h"

namespace wim::cpu {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

WIM_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
WIM_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

WIM_INLINE float to_float(float value) { return value; }
WIM_INLINE float to_float(BFloat16 value) { return bits_to_float(uint32_t{value.bits} << 16); }
WIM_INLINE float to_float(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{value.bits & 0x7fffu} << 13;
  // Moving the half's exponent into place leaves it 112 too small: one exact multiplication mends
  // normals and subnormals.
  if (magnitude >= 0x0f800000u) return bits_to_float(sign | magnitude | 0x7f800000u);
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude) * 0x1p112f));
}

template <class T>
T from_float(float value);
template <>
WIM_INLINE float from_float<float>(float value) {
  return value;
}
template <>
WIM_INLINE BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = float_to_bits(value);
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
WIM_INLINE Float16 from_float<Float16>(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u)
    return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {
    // Subnormal half: adding 0.5 lets the float adder do the rounding at bit 2^-24.
    const uint32_t rounded = float_to_bits(bits_to_float(magnitude) + 0.5f);
    return {static_cast<uint16_t>(sign | (rounded - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
}

}  // namespace wim::cpu
