// Attention of one work item: some query rows of one KV head against a run of keys. The one
// algorithm of all vector instruction sets and dtypes (AMX tiles: tile_kernel.h); a Shell supplies
// the operands' layout and the two products (shell_vector.h, shell_pairs.h). See plan_layout.h for
// the order of the arithmetic.
//
// Keys are taken in strips of Shell::kStrip on the absolute grid. A strip is packed once and then
// read by every tile of Shell::kTile rows: scores of the whole strip, one softmax step, outputs.
#pragma once

#include "cpu/attention_output.h"
#include "cpu/attention_work.h"
#include "cpu/pack.h"
#include "cpu/scoring.h"
#include "cpu/scratch.h"
#include "cpu/softmax.h"

namespace wim::cpu {

template <class Shell>
class ItemKernel {
  using V = typename Shell::V;
  using T = typename Shell::Element;
  using Operand = typename Shell::Operand;
  static constexpr int64_t kStrip = Shell::kStrip;
  static_assert(kCellKeys % kStrip == 0 && kStrip % kBlockKeys == 0);
  // Then a strip's softmax state is the cell's, and folded at once.
  static constexpr bool kWholeCells = kStrip == kCellKeys;

 public:
  WIM_INLINE ItemKernel(const AttentionWork& work, int64_t item, int64_t kv_head, char* memory)
      : work_(work),
        params_(work.params),
        item_(work.items[item]),
        rows_(work.rows + item_.row_begin),
        pages_(params_.block_table + item_.sequence * params_.block_table_stride),
        kv_head_(kv_head),
        depth_(Shell::depth(params_.query.dim)),
        v_dim_(padded<V>(params_.out.dim)),
        count_((item_.row_end - item_.row_begin) * work.group),
        scoring_(params_, kv_head),
        s_(memory, work.max_item_rows * work.group, depth_, v_dim_) {}

  void run() {
    pack_rows();
    for (int64_t cell = item_.key_begin / kCellKeys; cell * kCellKeys < item_.key_end; ++cell) {
      const int64_t begin = cell * kCellKeys, end = begin + kCellKeys;
      if (!kWholeCells) begin_cell(select_rows(begin, end));
      for (int64_t strip = begin; strip < end; strip += kStrip) {
        if (strip < item_.key_end && strip + kStrip > item_.key_begin) run_strip(strip);
      }
      if (!kWholeCells) end_cell(select_rows(begin, end));
    }
    for (int64_t row = 0; row < count_; ++row) finish(row);
  }

 private:
  // A packed row is a token and one of the query heads that share this KV head.
  int64_t head_of(int64_t row) const { return kv_head_ * work_.group + row % work_.group; }
  const PlanRow& plan_row(int64_t row) const { return rows_[row / work_.group]; }
  State state(int which, int64_t row) const {
    return {s_.maximum[which] + row, s_.sum[which] + row, s_.out[which] + row * v_dim_};
  }

  void pack_rows() {
    for (int64_t row = 0; row < count_; ++row) {
      const PlanRow& source = plan_row(row);
      s_.low[row] = source.low, s_.high[row] = source.high, s_.started[row] = 0;
      const T* q = static_cast<const T*>(params_.query.data) +
                   source.token * params_.query.row_stride +
                   head_of(row) * params_.query.head_stride;
      Shell::pack_query(q, params_.query.dim, scoring_.query_sign, s_.query + row * depth_);
    }
  }

  // Lists the rows that see a key of [begin, end).
  int64_t select_rows(int64_t begin, int64_t end) {
    int64_t selected = 0;
    for (int64_t row = 0; row < count_; ++row) {
      s_.active[selected] = static_cast<int32_t>(row);
      selected += s_.low[row] < end && s_.high[row] > begin;
    }
    return selected;
  }

  void begin_cell(int64_t selected) {
    for (int64_t i = 0; i < selected; ++i) {
      const State cell = state(kCell, s_.active[i]);
      *cell.maximum = kMinusInfinity, *cell.sum = 0.0f;
      for (int64_t d = 0; d < v_dim_; d += V::kLanes) V::store(cell.out + d, V::zero());
    }
  }

  void end_cell(int64_t selected) {
    for (int64_t i = 0; i < selected; ++i) fold_cell(state(kCell, s_.active[i]), s_.active[i]);
  }

  void fold_cell(const State& cell, int64_t row) {
    if (s_.started[row]) {
      fold_state<V>(cell, v_dim_, state(kFold, row));
    } else {
      copy_state<V>(cell, v_dim_, state(kFold, row));
    }
    s_.started[row] = 1;
  }

  // The blocks of a strip of which some of `rows` see a key, as an interval counted from the
  // strip's first.
  struct Blocks {
    int64_t begin, end;
  };
  Blocks seen_blocks(int64_t strip, const int32_t* rows, int64_t count) const {
    int64_t low = strip + kStrip, high = strip;
    for (int64_t i = 0; i < count; ++i) {
      low = s_.low[rows[i]] < low ? s_.low[rows[i]] : low;
      high = s_.high[rows[i]] > high ? s_.high[rows[i]] : high;
    }
    low = low > strip ? low - strip : 0;
    high = high < strip + kStrip ? high - strip : kStrip;
    return {low / kBlockKeys, (high + kBlockKeys - 1) / kBlockKeys};
  }

  void run_strip(int64_t strip) {
    const int64_t selected = select_rows(strip, strip + kStrip);
    if (selected == 0) return;
    pack_strip(strip, seen_blocks(strip, s_.active, selected));
    for (int64_t i = 0; i < selected; i += Shell::kTile) {
      const int64_t left = selected - i;
      run_tile(strip, s_.active + i, left < Shell::kTile ? left : Shell::kTile);
    }
  }

  void pack_strip(int64_t strip, Blocks blocks) {
    const auto slot = reinterpret_cast<const T**>(s_.slot);
    values_are_finite_ = true;
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
      const int64_t block = strip + b * kBlockKeys;
      const int64_t begin = block > item_.key_begin ? block : item_.key_begin;
      const int64_t end = block + kBlockKeys < item_.key_end ? block + kBlockKeys : item_.key_end;
      find_slots<T>(params_.k_cache, pages_, kv_head_, block, begin, end, slot);
      Shell::pack_keys(slot, params_.query.dim, s_.keys + b * kBlockKeys * depth_);
      find_slots<T>(params_.v_cache, pages_, kv_head_, block, begin, end, slot);
      values_are_finite_ &=
          Shell::pack_values(params_.v_cache, slot, v_dim_, s_.values + b * kBlockKeys * v_dim_);
    }
  }

  void run_tile(int64_t strip, const int32_t* rows, int64_t count) {
    const Blocks blocks = seen_blocks(strip, rows, count);
    const int64_t begin = blocks.begin * kBlockKeys, end = blocks.end * kBlockKeys;
    const Operand *query[Shell::kTile], *weights[Shell::kTile];
    float maximum[Shell::kTile], sum[Shell::kTile], alpha[Shell::kTile];
    int64_t low[Shell::kTile], high[Shell::kTile];  // visible keys of each row within the strip
    for (int64_t m = 0; m < count; ++m) query[m] = s_.query + rows[m] * depth_;
    Shell::score(query, count, s_.keys, depth_, blocks.begin, blocks.end, s_.scores);
    for (int64_t m = 0; m < count; ++m) {
      const int64_t row = rows[m];
      float* scores = s_.scores + m * kStrip;
      if (scoring_.has_rule) {
        const PlanToken& token = work_.tokens[plan_row(row).token];
        apply_rule<V>(scoring_, alibi_slope(params_, token.sequence, head_of(row)),
                      static_cast<float>(token.position - strip), begin, end, scores);
      }
      low[m] = s_.low[row] > strip ? s_.low[row] - strip : 0;
      high[m] = s_.high[row] < strip + kStrip ? s_.high[row] - strip : kStrip;
      if (low[m] > begin || high[m] < end) mask_scores<V>(low[m], high[m], begin, end, scores);
      weights[m] = reinterpret_cast<const Operand*>(scores);  // take the place of the scores
      maximum[m] = kWholeCells ? kMinusInfinity : s_.maximum[kCell][row];
      sum[m] = kWholeCells ? 0.0f : s_.sum[kCell][row];
      alpha[m] = softmax_step<Shell>(scores, begin, end, scoring_.has_rule ? 1.0f : scoring_.scale,
                                     maximum + m, sum + m);
    }
    Shell::output(weights, count, s_.values, v_dim_, begin, end, s_.sums);
    for (int64_t m = 0; m < count; ++m) {
      float* sums = s_.sums + m * v_dim_;
      // A hidden key has weight 0, and 0 times a stale NaN is NaN: once more, without it.
      if (!values_are_finite_ && (low[m] > begin || high[m] < end)) {
        Shell::hide_values(s_.values, v_dim_, begin, end, low[m], high[m], s_.visible_values);
        Shell::output(weights + m, 1, s_.visible_values, v_dim_, begin, end, sums);
      }
      if (kWholeCells) {
        fold_cell({maximum + m, sum + m, sums}, rows[m]);
      } else {
        add_strip(maximum[m], sum[m], sums, alpha[m], rows[m]);
      }
    }
  }

  void add_strip(float maximum, float sum, const float* sums, float alpha, int64_t row) {
    const State cell = state(kCell, row);
    *cell.maximum = maximum, *cell.sum = sum;
    const typename V::F factor = V::set1(alpha);
    for (int64_t d = 0; d < v_dim_; d += V::kLanes)
      V::store(cell.out + d, V::fma(V::load(cell.out + d), factor, V::load(sums + d)));
  }

  void finish(int64_t row) {
    const PlanRow& target = plan_row(row);
    if (target.slot < 0) {
      write_output<V, T>(work_, target.token, head_of(row), state(kFold, row));
    } else {
      copy_state<V>(state(kFold, row), v_dim_, partial_state(work_, target.slot, head_of(row)));
    }
  }

  const AttentionWork& work_;
  const AttentionParams& params_;
  const PlanItem& item_;
  const PlanRow* rows_;
  const int32_t* pages_;
  const int64_t kv_head_, depth_, v_dim_, count_;
  const Scoring scoring_;
  const Scratch<Shell> s_;
  bool values_are_finite_ = true;  // of the current strip, hidden keys included
};

template <class Shell>
int64_t scratch_bytes(const AttentionWork& work) {
  int64_t bytes = 0;
  Scratch<Shell>(nullptr, work.max_item_rows * work.group, Shell::depth(work.params.query.dim),
                 padded<typename Shell::V>(work.params.out.dim), &bytes);
  return bytes;
}

template <class Shell>
void run_item(const AttentionWork& work, int64_t item, int64_t kv_head, char* scratch) {
  ItemKernel<Shell>(work, item, kv_head, scratch).run();
}

}  // namespace wim::cpu
