// Transposing blocks of 2- and 4-byte elements in vectors of 16 bytes, which every CPU has.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/inline.h"

namespace wim::cpu {

// The two interleaves of a and b: the first halves, a0 b0 a1 b1 ..., and the second halves.
// Compilers know a list of elements as one instruction, but not a loop over them.
typedef uint16_t Words __attribute__((vector_size(16)));
WIM_INLINE Words interleave_low(Words a, Words b) {
  return Words{a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]};
}
WIM_INLINE Words interleave_high(Words a, Words b) {
  return Words{a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]};
}

typedef uint32_t Longs __attribute__((vector_size(16)));
WIM_INLINE Longs interleave_low(Longs a, Longs b) { return Longs{a[0], b[0], a[1], b[1]}; }
WIM_INLINE Longs interleave_high(Longs a, Longs b) { return Longs{a[2], b[2], a[3], b[3]}; }

template <class Vector, class Element>
WIM_INLINE void transpose_tile(const Element* from, int64_t from_stride, Element* to,
                               int64_t to_stride) {
  constexpr int kSide = sizeof(Vector) / sizeof(Element);
  Vector rows[kSide], next[kSide];
  for (int i = 0; i < kSide; ++i) std::memcpy(&rows[i], from + i * from_stride, sizeof(Vector));
  // An element's place in the tile is (row, column), a number of 2 log2(kSide) bits. Interleaving
  // the upper with the lower half rotates it by one bit; after log2(kSide) rounds it is (column,
  // row).
  for (int rounds = kSide; rounds > 1; rounds /= 2) {
    for (int i = 0; i < kSide / 2; ++i) {
      next[2 * i] = interleave_low(rows[i], rows[i + kSide / 2]);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + kSide / 2]);
    }
    for (int i = 0; i < kSide; ++i) rows[i] = next[i];
  }
  for (int i = 0; i < kSide; ++i) std::memcpy(to + i * to_stride, &rows[i], sizeof(Vector));
}

// to[column][row] = from[row][column]
template <class Vector, class Element>
void transpose(const Element* from, int64_t from_stride, int64_t rows, int64_t columns, Element* to,
               int64_t to_stride) {
  constexpr int kSide = sizeof(Vector) / sizeof(Element);
  constexpr int64_t kLine = 64 / sizeof(Element);  // a cache line is written at one go
  for (int64_t strip = 0; strip < rows; strip += kLine) {
    const int64_t end = strip + kLine < rows ? strip + kLine : rows;
    for (int64_t column = 0; column < columns; column += kSide) {
      for (int64_t row = strip; row < end; row += kSide) {
        const Element* source = from + row * from_stride + column;
        Element* target = to + column * to_stride + row;
        if (row + kSide <= end && column + kSide <= columns) {
          transpose_tile<Vector>(source, from_stride, target, to_stride);
          continue;
        }
        for (int64_t i = 0; i < kSide && row + i < end; ++i)
          for (int64_t j = 0; j < kSide && column + j < columns; ++j)
            target[j * to_stride + i] = source[i * from_stride + j];
      }
    }
  }
}

}  // namespace wim::cpu
