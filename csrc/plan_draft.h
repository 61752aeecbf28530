// A plan while it is made: what plan.cpp decides and plan_writer.cpp writes down.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan.h"

namespace wim {

// Key positions and counts of rows fit in 32 bits: the batch's tables are int32.
inline int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

struct DraftItem {
  int32_t sequence, key_begin = INT32_MAX, key_end = 0;
  int64_t scores = 0;         // of one query head
  std::vector<PlanRow> rows;  // those of one sequence are neighbours

  explicit DraftItem(int64_t of_sequence) : sequence(narrow(of_sequence)) {}
  int64_t num_rows() const { return static_cast<int64_t>(rows.size()); }
  // In units of one key for one packed row; reading and packing a key costs about as much as 12
  // rows.
  int64_t cost(int64_t group) const { return scores * group + 12 * (int64_t{key_end} - key_begin); }
  bool single_cell() const { return key_begin / kCellKeys == (key_end - 1) / kCellKeys; }
  void add_row(int64_t token, int64_t low, int64_t high) {
    rows.push_back({narrow(token), narrow(low), narrow(high), -1});
    key_begin = std::min(key_begin, narrow(low));
    key_end = std::max(key_end, narrow(high));
    scores += high - low;
  }
};

struct PlanDraft {
  int64_t num_threads = 1, num_partials = 0;
  std::vector<PlanToken> tokens;
  std::vector<KeyRange> visible;  // by token
  std::vector<DraftItem> items;   // longest first
  std::vector<PlanCombine> combines;
};

// Largest load of a thread over the average load, in thousandths, when idle threads take the next
// task; an item is one task per KV head.
int64_t imbalance_permille(const BatchShape& batch, const PlanDraft& draft);

// Adds the header with its report.
std::vector<int32_t> write_plan(const BatchShape& batch, const PlanDraft& draft);

}  // namespace wim
