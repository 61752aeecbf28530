// The packed rows of a work item in columns of 16: a row is a lane of all its vectors.
#pragma once

#include <algorithm>

#include "cpu/attention_output.h"
#include "cpu/attention_work.h"
#include "cpu/scoring.h"
#include "cpu/scratch.h"
#include "cpu/tile_softmax.h"

namespace wim::cpu {

template <class T>
WIM_INLINE void fill(T* to, int64_t count, T value) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

class Columns {
  using V = Avx512;
  static constexpr int64_t kLanes = V::kLanes;

 public:
  // What the rows of a column see, from the narrowest to the widest.
  struct Span {
    int32_t min_low, max_low, min_high, max_high;
  };

  Columns(const AttentionWork& work, const PlanItem& item, int64_t kv_head, int64_t depth,
          int64_t v_dim, Arena* arena)
      : work_(work),
        rows_(work.rows + item.row_begin),
        kv_head_(kv_head),
        depth_(depth),
        v_dim_(v_dim),
        num_rows_((item.row_end - item.row_begin) * work.group) {
    const int64_t lanes = count() * kLanes;
    low_ = arena->take<int32_t>(lanes), high_ = arena->take<int32_t>(lanes);
    slope_ = arena->take<float>(lanes), position_ = arena->take<float>(lanes);
    span_ = arena->take<Span>(count()), visited_ = arena->take<bool>(count());
    query_ = arena->take<BFloat16>(lanes * depth);
    rows_memory_ = arena->take<float>(kLanes * std::max(depth, v_dim));
    for (Part* part : {&cell_, &fold_}) {
      part->maximum = arena->take<float>(lanes), part->sum = arena->take<float>(lanes);
      part->out = arena->take<float>(lanes * v_dim);
    }
  }

  int64_t count() const { return (num_rows_ + kLanes - 1) / kLanes; }
  const Span& span(int64_t column) const { return span_[column]; }
  // Every row sees every key of [all_from, all_to).
  int32_t all_from() const { return all_from_; }
  int32_t all_to() const { return all_to_; }
  // [depth / 2][16] pairs
  const BFloat16* query(int64_t column) const { return query_ + column * kLanes * depth_; }
  Lanes lanes(int64_t column) const {
    const int64_t at = column * kLanes;
    const bool alibi = work_.params.alibi_slopes != nullptr;
    return {low_ + at,          high_ + at,     alibi ? slope_ + at : nullptr, position_ + at,
            cell_.maximum + at, cell_.sum + at, cell_.out + at * v_dim_};
  }

  void pack(float query_sign) {
    for (int64_t column = 0; column < count(); ++column) pack_column(column, query_sign);
    fill(fold_.maximum, count() * kLanes, kMinusInfinity);
    fill(fold_.sum, count() * kLanes, 0.0f);
    fill(fold_.out, count() * kLanes * v_dim_, 0.0f);
  }

  void begin_cell() { fill(visited_, count(), false); }

  // Tells whether this is the column's first visit in the cell: its output is to be written, not
  // added to.
  bool visit(int64_t column) {
    if (visited_[column]) return false;
    visited_[column] = true;
    V::store(cell_.maximum + column * kLanes, V::set1(kMinusInfinity));
    V::store(cell_.sum + column * kLanes, V::zero());
    return true;
  }

  void end_cell() {
    for (int64_t column = 0; column < count(); ++column) {
      if (visited_[column]) fold(column);
    }
  }

  void finish() const {
    for (int64_t column = 0; column < count(); ++column) {
      for (int64_t d = 0; d < v_dim_; d += kLanes) {
        V::F tile[kLanes];
        for (int64_t i = 0; i < kLanes; ++i)
          tile[i] = V::load(fold_.out + (column * v_dim_ + d + i) * kLanes);
        V::transpose(tile);
        for (int64_t i = 0; i < kLanes; ++i) V::store(rows_memory_ + i * v_dim_ + d, tile[i]);
      }
      for (int64_t lane = 0; lane < kLanes && column * kLanes + lane < num_rows_; ++lane)
        finish_row(column * kLanes + lane, rows_memory_ + lane * v_dim_);
    }
  }

 private:
  struct Part {
    float *maximum, *sum;  // [columns][16]
    float* out;            // [columns][v_dim][16]
  };

  int64_t head_of(int64_t row) const { return kv_head_ * work_.group + row % work_.group; }
  const PlanRow& plan_row(int64_t row) const { return rows_[row / work_.group]; }

  void pack_column(int64_t column, float query_sign) {
    const AttentionParams& params = work_.params;
    Span span{INT32_MAX, 0, INT32_MAX, 0};
    const auto packed = reinterpret_cast<BFloat16*>(rows_memory_);  // [16][depth]
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t row = column * kLanes + lane;
      if (row >= num_rows_) {  // sees all and is never looked at
        low_[row] = 0, high_[row] = INT32_MAX, slope_[row] = position_[row] = 0.0f;
        fill(packed + lane * depth_, depth_, BFloat16{0});
        continue;
      }
      const PlanRow& source = plan_row(row);
      const PlanToken& token = work_.tokens[source.token];
      low_[row] = source.low, high_[row] = source.high;
      slope_[row] = alibi_slope(params, token.sequence, head_of(row));
      position_[row] = static_cast<float>(token.position);
      span.min_low = std::min(span.min_low, source.low);
      span.max_low = std::max(span.max_low, source.low);
      span.min_high = std::min(span.min_high, source.high);
      span.max_high = std::max(span.max_high, source.high);
      const BFloat16* q = static_cast<const BFloat16*>(params.query.data) +
                          source.token * params.query.row_stride +
                          head_of(row) * params.query.head_stride;
      TileLayout::pack_query(q, params.query.dim, query_sign, packed + lane * depth_);
    }
    span_[column] = span;
    all_from_ = std::max(all_from_, span.max_low), all_to_ = std::min(all_to_, span.min_high);
    BFloat16* const to = query_ + column * kLanes * depth_;
    for (int64_t d = 0; d < depth_; d += 2 * kLanes) {
      V::F pairs[kLanes];  // of a row, then of a dimension
      for (int64_t i = 0; i < kLanes; ++i) pairs[i] = _mm512_loadu_ps(packed + i * depth_ + d);
      V::transpose(pairs);
      for (int64_t i = 0; i < kLanes; ++i)
        _mm512_store_ps(to + d * kLanes + i * 2 * kLanes, pairs[i]);
    }
  }

  // fold_state of each lane. For one that sees no key of the cell it changes nothing.
  void fold(int64_t column) {
    const int64_t at = column * kLanes;
    const V::F old = V::load(fold_.maximum + at), next = V::load(cell_.maximum + at);
    const V::F now = V::max(next, old);
    const __mmask16 none = _mm512_cmp_ps_mask(now, V::set1(kMinusInfinity), _CMP_EQ_OQ);
    const V::F pivot = V::select(none, V::zero(), now);
    const V::F old_factor = exp2<V>(V::sub(old, pivot)), new_factor = exp2<V>(V::sub(next, pivot));
    const V::F added = V::mul(V::load(cell_.sum + at), new_factor);
    V::store(fold_.maximum + at, now);
    V::store(fold_.sum + at, V::add(V::mul(V::load(fold_.sum + at), old_factor), added));
    const float* from = cell_.out + at * v_dim_;
    float* to = fold_.out + at * v_dim_;
    for (int64_t d = 0; d < v_dim_; ++d, from += kLanes, to += kLanes)
      V::store(to, V::fma(V::load(to), old_factor, V::mul(V::load(from), new_factor)));
  }

  void finish_row(int64_t row, float* out) const {
    const State state{fold_.maximum + row, fold_.sum + row, out};
    const PlanRow& target = plan_row(row);
    if (target.slot < 0) {
      write_output<V, BFloat16>(work_, target.token, head_of(row), state);
    } else {
      copy_state<V>(state, v_dim_, partial_state(work_, target.slot, head_of(row)));
    }
  }

  const AttentionWork& work_;
  const PlanRow* rows_;
  const int64_t kv_head_, depth_, v_dim_, num_rows_;
  int32_t all_from_ = 0, all_to_ = INT32_MAX;
  int32_t *low_, *high_;
  float *slope_, *position_;
  Span* span_;
  bool* visited_;
  BFloat16* query_;
  float* rows_memory_;  // 16 rows of queries, then of outputs
  Part cell_, fold_;
};

}  // namespace wim::cpu
