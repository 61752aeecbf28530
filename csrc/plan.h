// From the lengths and page lists of a batch to work items for the attention kernels. Integers
// only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan_layout.h"

namespace wim {

struct BatchShape {
  const int32_t* block_table = nullptr;  // [batch, max_pages]
  int64_t block_table_stride = 0, max_pages = 0;
  const int32_t* cu_seqlens_q = nullptr;  // [batch + 1]
  const int32_t* seqused_k = nullptr;     // [batch]
  int64_t batch = 0, page_size = 0, num_heads = 0, num_kv_heads = 0;
  bool causal = true;
  int64_t window_left = -1, window_right = -1;

  int64_t total_q() const { return cu_seqlens_q[batch]; }
  int64_t rows(int64_t sequence) const {
    return cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence];
  }
  int64_t group() const { return num_heads / num_kv_heads; }
  const int32_t* pages(int64_t sequence) const {
    return block_table + sequence * block_table_stride;
  }
};

struct KeyRange {
  int64_t low, high;
  bool empty() const { return high <= low; }
};

// Keys that the row at `position` of a sequence with `length` keys sees.
inline KeyRange visible_keys(const BatchShape& batch, int64_t length, int64_t position) {
  KeyRange range{0, length};
  if (batch.causal) range.high = std::min(range.high, position + 1);
  if (batch.window_right >= 0) range.high = std::min(range.high, position + batch.window_right + 1);
  if (batch.window_left >= 0) range.low = std::max(range.low, position - batch.window_left);
  return range;
}

// Keys that at least one row of the sequence sees: entries of its block table outside are never
// read.
KeyRange used_keys(const BatchShape& batch, int64_t sequence);

// Identifies the page ids that a plan was made for.
uint64_t hash_used_pages(const BatchShape& batch);

// Cuts the batch into items (plan.cpp) and writes them down (plan_writer.cpp).
std::vector<int32_t> make_plan(const BatchShape& batch, int64_t num_threads);

// Detects a damaged or sliced plan; the checksum field itself does not count.
int64_t plan_checksum(const int32_t* plan, int64_t ints);

}  // namespace wim
