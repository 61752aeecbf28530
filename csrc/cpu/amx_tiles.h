// The eight AMX tile registers: 16 rows of 64 bytes each. Inline assembly of our own, because gcc
// 12's tile intrinsics do not tell the compiler that they touch memory.
#pragma once

#include <cstdint>

#include "cpu/inline.h"

namespace wim::cpu::tiles {

constexpr int64_t kRows = 16;
constexpr int64_t kLanes = 16;  // 32-bit lanes of a row

// Operand of ldtilecfg.
struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

WIM_INLINE void configure(const Config& config) {
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
WIM_INLINE void release() { asm volatile("tilerelease" : : : "memory"); }

template <int kTile>
WIM_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile) : "memory");
}
template <int kTile>
WIM_INLINE void load(const void* from, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(from), "r"(stride_bytes), "i"(kTile)
               : "memory");
}
template <int kTile>
WIM_INLINE void store(void* to, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
               :
               : "r"(to), "r"(stride_bytes), "i"(kTile)
               : "memory");
}
// c[m][n] += sum over pairs k of a[m][k] . b[k][n], bfloat16 into float32
template <int kC, int kA, int kB>
WIM_INLINE void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB) : "memory");
}

}  // namespace wim::cpu::tiles
