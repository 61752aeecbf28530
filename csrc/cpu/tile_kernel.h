// Attention of one work item by AMX tiles, in bfloat16, transposed: scores are K Q^T and outputs
// V^T P^T. So K needs no packing, nor does V where a page holds it transposed, and a query row is a
// lane of every vector from its scores to its output.
//
// A unit of keys (one or two blocks of the absolute grid) stays in the L1 cache while column after
// column of 16 rows meets it. The softmax of one column is made while the tiles work on the scores
// of the next one and on the output of the one before.
#pragma once

#include "cpu/tile_columns.h"
#include "cpu/tile_products.h"

namespace wim::cpu {

class TileKernel {
  using V = Avx512;
  static constexpr int64_t kMaxBlocks = 2;  // of a unit
  static constexpr int64_t kBlockTiles = kBlockKeys / kTileKeys,
                           kBlockGroups = kBlockKeys / kGroupKeys;

 public:
  // With `bytes` nothing is run: it gets the size that memory must have.
  TileKernel(const AttentionWork& work, const PlanItem& item, int64_t kv_head, char* memory,
             int64_t* bytes = nullptr)
      : work_(work),
        params_(work.params),
        item_(item),
        pages_(params_.block_table + item_.sequence * params_.block_table_stride),
        kv_head_(kv_head),
        depth_(TileLayout::depth(params_.query.dim)),
        v_dim_(padded<V>(params_.out.dim)),
        unit_blocks_(depth_ + v_dim_ <= 160 ? 2 : 1),
        scoring_(params_, kv_head),
        arena_(memory),
        columns_(work, item_, kv_head, depth_, v_dim_, &arena_) {
    const int64_t keys = kMaxBlocks * kBlockKeys;
    active_ = arena_.take<int32_t>(columns_.count());
    slot_ = arena_.take<const BFloat16*>(kBlockKeys);
    key_copies_ = arena_.take<BFloat16>(keys * depth_);
    value_copies_ = arena_.take<BFloat16>(keys * v_dim_);
    visible_values_ = arena_.take<BFloat16>(keys * v_dim_);
    lane_out_ = arena_.take<float>(v_dim_ * V::kLanes);
    for (int i = 0; i < 2; ++i) {
      scores_[i] = arena_.take<float>(keys * V::kLanes);
      weights_[i] = arena_.take<BFloat16>(keys * V::kLanes);
    }
    if (bytes != nullptr) *bytes = arena_.used();
  }

  void run() {
    tiles::Config config;
    for (int i = 0; i < 8; ++i) config.rows[i] = 16, config.row_bytes[i] = 64;
    tiles::configure(config);
    columns_.pack(scoring_.query_sign);
    const int64_t unit_keys = unit_blocks_ * kBlockKeys;
    for (int64_t cell = item_.key_begin / kCellKeys; cell * kCellKeys < item_.key_end; ++cell) {
      const int64_t begin = cell * kCellKeys, end = begin + kCellKeys;
      columns_.begin_cell();
      for (int64_t unit = begin; unit < end; unit += unit_keys) {
        if (unit >= item_.key_end || unit + unit_keys <= item_.key_begin) continue;
        if (unit_blocks_ == 2) {
          run_unit<2>(unit);
        } else {
          run_unit<1>(unit);
        }
      }
      columns_.end_cell(begin, end);
    }
    columns_.finish();
    tiles::release();
  }

 private:
  // Blocks [begin, end) of a unit.
  struct Blocks {
    int64_t begin, end;
    int64_t key_begin() const { return begin * kBlockKeys; }
    int64_t key_end() const { return end * kBlockKeys; }
  };
  Blocks blocks_between(int64_t unit, int64_t low, int64_t high) const {
    const int64_t end = unit_blocks_ * kBlockKeys;
    low = std::max<int64_t>(low - unit, 0), high = std::min(high - unit, end);
    return {low / kBlockKeys, (high + kBlockKeys - 1) / kBlockKeys};
  }
  Blocks seen_by(int64_t column, int64_t unit) const {
    const Columns::Span& span = columns_.span(column);
    return blocks_between(unit, span.min_low, span.max_high);
  }
  bool sees_part(int64_t column, int64_t unit, Blocks blocks) const {
    const Columns::Span& span = columns_.span(column);
    return span.max_low > unit + blocks.key_begin() || span.min_high < unit + blocks.key_end();
  }

  template <int kPairs>
  void run_unit(int64_t unit) {
    const int64_t num_active = find_active(unit);
    if (num_active == 0) return;
    find_operands(unit);
    score(active_[0], unit, scores_[0], [] {});
    for (int64_t i = 0; i < num_active; ++i) {
      const int64_t column = active_[i];
      const Blocks blocks = seen_by(column, unit);
      fresh_[i % 2] = columns_.visit(column);
      TileSoftmax softmax(columns_.lanes(column), scoring_, unit + blocks.key_begin(),
                          unit + blocks.key_end(), sees_part(column, unit, blocks), v_dim_,
                          scores_[i % 2] + blocks.key_begin() * V::kLanes,
                          weights_[i % 2] + blocks.key_begin() * V::kLanes);
      const auto between = [&] { softmax.template advance<kPairs>(); };
      if (i + 1 < num_active) score(active_[i + 1], unit, scores_[(i + 1) % 2], between);
      if (i > 0) output(active_[i - 1], unit, (i - 1) % 2, between);
      softmax.finish();
    }
    output(active_[num_active - 1], unit, (num_active - 1) % 2, [] {});
  }

  // Lists the columns that see a key of the unit.
  int64_t find_active(int64_t unit) {
    int64_t count = 0;
    for (int64_t column = 0; column < columns_.count(); ++column) {
      const Blocks blocks = seen_by(column, unit);
      active_[count] = static_cast<int32_t>(column);
      count += blocks.begin < blocks.end;
    }
    return count;
  }

  template <class Between>
  WIM_INLINE void score(int64_t column, int64_t unit, float* scores, const Between& between) {
    const Blocks blocks = seen_by(column, unit);
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
      score_block(keys_ + b * kBlockTiles, columns_.query(column), depth_,
                  scores + b * kBlockKeys * V::kLanes, between);
    }
  }

  template <class Between>
  WIM_INLINE void output(int64_t column, int64_t unit, int which, const Between& between) {
    const Blocks blocks = seen_by(column, unit);
    // A hidden key has weight 0, and 0 times a stale NaN is NaN.
    if (!values_are_finite_ && sees_part(column, unit, blocks))
      return output_lane_by_lane(column, unit, which);
    output_column(values_ + blocks.begin * kBlockGroups, (blocks.end - blocks.begin) * kBlockGroups,
                  weights_[which] + blocks.key_begin() * V::kLanes, v_dim_, fresh_[which],
                  columns_.lanes(column).out, between);
  }

  // Each lane with the values that it may see.
  void output_lane_by_lane(int64_t column, int64_t unit, int which) {
    const Blocks blocks = seen_by(column, unit);
    const int64_t first = blocks.begin * kBlockGroups, last = blocks.end * kBlockGroups;
    const Lanes lanes = columns_.lanes(column);
    for (int64_t lane = 0; lane < V::kLanes; ++lane) {
      TileSource visible[kMaxBlocks * kBlockGroups];
      for (int64_t g = first; g < last; ++g) {
        visible[g] = values_[g];
        if (values_[g].data != value_copy(g)) continue;  // all rows see these
        const int64_t begin = unit + g * kGroupKeys;
        hide_values(value_copy(g), v_dim_, lanes.low[lane] - begin, lanes.high[lane] - begin,
                    visible_values_ + g * kGroupKeys * v_dim_);
        visible[g].data = visible_values_ + g * kGroupKeys * v_dim_;
      }
      std::copy_n(lanes.out, v_dim_ * V::kLanes, lane_out_);
      output_column(visible + first, last - first, weights_[which] + blocks.key_begin() * V::kLanes,
                    v_dim_, fresh_[which], lane_out_, [] {});
      for (int64_t d = 0; d < v_dim_; ++d)
        lanes.out[d * V::kLanes + lane] = lane_out_[d * V::kLanes + lane];
    }
  }

  BFloat16* value_copy(int64_t group) const { return value_copies_ + group * kGroupKeys * v_dim_; }

  void find_operands(int64_t unit) {
    const Blocks blocks = blocks_between(unit, item_.key_begin, item_.key_end);
    values_are_finite_ = true;
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
      const int64_t block = unit + b * kBlockKeys;
      const int64_t begin = std::max<int64_t>(block, item_.key_begin),
                    end = std::min<int64_t>(block + kBlockKeys, item_.key_end);
      find_keys(block, begin, end, b * kBlockTiles);
      find_values(block, begin, end, b * kBlockGroups);
    }
  }

  void find_keys(int64_t block, int64_t begin, int64_t end, int64_t first) {
    const bool ready = keys_lie_ready(params_.k_cache, depth_);
    find_slots<BFloat16>(params_.k_cache, pages_, kv_head_, block, begin, end, slot_);
    for (int64_t i = 0; i < kBlockTiles; ++i) {
      const BFloat16* const* const slot = slot_ + i * kTileKeys;
      if (ready && slot[0] != nullptr) {
        keys_[first + i] = {slot[0], params_.k_cache.slot_stride};
      } else {
        BFloat16* const copy = key_copies_ + (first + i) * kTileKeys * depth_;
        copy_keys(slot, params_.k_cache.dim, depth_, copy);
        keys_[first + i] = {copy, depth_};
      }
    }
  }

  void find_values(int64_t block, int64_t begin, int64_t end, int64_t first) {
    const bool ready = values_lie_ready(params_.v_cache, v_dim_);
    find_slots<BFloat16>(params_.v_cache, pages_, kv_head_, block, begin, end, slot_);
    for (int64_t i = 0; i < kBlockGroups; ++i) {
      const BFloat16* const* const slot = slot_ + i * kGroupKeys;
      const int64_t key = block + i * kGroupKeys;
      if (ready && key >= columns_.all_from() && key + kGroupKeys <= columns_.all_to()) {
        values_[first + i] = {slot[0], params_.v_cache.dim_stride};
      } else {
        values_are_finite_ &= copy_values(params_.v_cache, slot, v_dim_, value_copy(first + i));
        values_[first + i] = {value_copy(first + i), kGroupKeys};
      }
    }
  }

  const AttentionWork& work_;
  const AttentionParams& params_;
  const PlanItem& item_;
  const int32_t* pages_;
  const int64_t kv_head_, depth_, v_dim_, unit_blocks_;
  const Scoring scoring_;
  Arena arena_;
  Columns columns_;
  int32_t* active_;  // columns that see a key of the unit
  const BFloat16** slot_;
  BFloat16 *key_copies_, *value_copies_, *visible_values_;
  float* lane_out_;
  // Of a unit: K in tiles, V in groups.
  TileSource keys_[kMaxBlocks * kBlockTiles], values_[kMaxBlocks * kBlockGroups];
  bool values_are_finite_ = true;  // those copied
  // Of two columns in turn.
  float* scores_[2];      // [unit keys][16]
  BFloat16* weights_[2];  // [unit keys / 2][16] pairs
  bool fresh_[2] = {};    // no output in this cell so far
};

inline int64_t tile_scratch_bytes(const AttentionWork& work) {
  int64_t bytes = 0;
  const PlanItem largest{0, static_cast<int32_t>(work.max_item_rows), 0, 0, 0};
  TileKernel(work, largest, 0, nullptr, &bytes);
  return bytes;
}

inline void run_tile_item(const AttentionWork& work, int64_t item, int64_t kv_head, char* scratch) {
  TileKernel(work, work.items[item], kv_head, scratch).run();
}

}  // namespace wim::cpu
