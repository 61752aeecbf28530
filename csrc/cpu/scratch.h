// Memory of one thread for one work item.
#pragma once

#include <cstdint>

#include "cpu/attention_work.h"
#include "cpu/inline.h"

namespace wim::cpu {

// Hands out aligned pieces of one block of memory; with a null base it only counts.
class Arena {
 public:
  WIM_INLINE explicit Arena(char* base) : base_(base) {}
  template <class T>
  WIM_INLINE T* take(int64_t count) {
    char* piece = base_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  WIM_INLINE int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Per packed row: its keys, its query, the state of the current cell and the fold of the cells
// before. Per strip: its keys and values as the products want them. Per tile: the rest.
template <class Shell>
struct Scratch {
  using Operand = typename Shell::Operand;

  WIM_INLINE Scratch(char* base, int64_t rows, int64_t depth, int64_t v_dim,
                     int64_t* bytes = nullptr) {
    Arena arena(base);
    low = arena.take<int32_t>(rows), high = arena.take<int32_t>(rows);
    active = arena.take<int32_t>(rows), started = arena.take<int32_t>(rows);
    slot = arena.take<const void*>(kBlockKeys);
    query = arena.take<Operand>(rows * depth);
    keys = arena.take<Operand>(depth * Shell::kStrip);
    values = arena.take<Operand>(Shell::kStrip * v_dim);
    visible_values = arena.take<Operand>(Shell::kStrip * v_dim);
    scores = arena.take<float>(Shell::kTile * Shell::kStrip);
    sums = arena.take<float>(Shell::kTile * v_dim);
    for (int which = 0; which < 2; ++which) {
      maximum[which] = arena.take<float>(rows), sum[which] = arena.take<float>(rows);
      out[which] = arena.take<float>(rows * v_dim);
    }
    if (bytes != nullptr) *bytes = arena.used();
  }
  int32_t *low, *high, *active, *started;
  const void** slot;
  Operand *query, *keys, *values, *visible_values;
  float *scores, *sums;
  float *maximum[2], *sum[2], *out[2];  // [kCell], [kFold]
};
enum { kCell = 0, kFold = 1 };

}  // namespace wim::cpu
