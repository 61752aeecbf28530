// Attention of one work item by AMX tiles, in bfloat16, transposed: scores are K Q^T and outputs
// V^T P^T. So K needs no packing, nor does V where a page holds it transposed, and a query row is a
// lane of every vector from its scores to its output.
//
// A block of keys stays in the L1 cache while column after column of 16 rows meets it.
#pragma once

#include "cpu/tile_columns.h"
#include "cpu/tile_products.h"

namespace wim::cpu {

class TileKernel {
  using V = Avx512;

 public:
  // With `bytes` nothing is to be run: it gets the size that memory must have.
  TileKernel(const AttentionWork& work, const PlanItem& item, int64_t kv_head, char* memory,
             int64_t* bytes = nullptr)
      : params_(work.params),
        item_(item),
        pages_(params_.block_table + item_.sequence * params_.block_table_stride),
        kv_head_(kv_head),
        depth_(TileLayout::depth(params_.query.dim)),
        v_dim_(padded<V>(params_.out.dim)),
        scoring_(params_, kv_head),
        arena_(memory),
        columns_(work, item_, kv_head, depth_, v_dim_, &arena_) {
    slot_ = arena_.take<const BFloat16*>(kBlockKeys);
    key_copies_ = arena_.take<BFloat16>(kBlockKeys * depth_);
    value_copies_ = arena_.take<BFloat16>(kBlockKeys * v_dim_);
    visible_values_ = arena_.take<BFloat16>(kBlockKeys * v_dim_);
    lane_out_ = arena_.take<float>(v_dim_ * V::kLanes);
    scores_ = arena_.take<float>(kBlockKeys * V::kLanes);
    weights_ = arena_.take<BFloat16>(kBlockKeys * V::kLanes);
    if (bytes != nullptr) *bytes = arena_.used();
  }

  void run() {
    tiles::Config config;
    for (int i = 0; i < 8; ++i) config.rows[i] = 16, config.row_bytes[i] = 64;
    tiles::configure(config);
    columns_.pack(scoring_.query_sign);
    for (int64_t cell = item_.key_begin / kCellKeys; cell * kCellKeys < item_.key_end; ++cell) {
      const int64_t begin = cell * kCellKeys, end = begin + kCellKeys;
      columns_.begin_cell();
      for (int64_t block = begin; block < end; block += kBlockKeys) {
        if (block < item_.key_end && block + kBlockKeys > item_.key_begin) run_block(block);
      }
      columns_.end_cell();
    }
    columns_.finish();
    tiles::release();
  }

 private:
  void run_block(int64_t block) {
    const int64_t end = block + kBlockKeys;
    bool found = false;
    for (int64_t column = 0; column < columns_.count(); ++column) {
      const Columns::Span& span = columns_.span(column);
      if (span.min_low >= end || span.max_high <= block) continue;
      if (!found) find_operands(block);
      found = true;
      run_column(column, block, span.max_low > block || span.min_high < end);
    }
  }

  void run_column(int64_t column, int64_t block, bool sees_part) {
    const bool fresh = columns_.visit(column);
    const Lanes lanes = columns_.lanes(column);
    score_block(keys_, columns_.query(column), depth_, scores_);
    softmax_block(lanes, scoring_, block, sees_part, v_dim_, scores_, weights_);
    // A hidden key has weight 0, and 0 times a stale NaN is NaN.
    if (!values_are_finite_ && sees_part) {
      output_lane_by_lane(lanes, block, fresh);
    } else {
      output_block(values_, weights_, v_dim_, fresh, lanes.out);
    }
  }

  // Each lane with the values that it may see.
  void output_lane_by_lane(const Lanes& lanes, int64_t block, bool fresh) {
    for (int64_t lane = 0; lane < V::kLanes; ++lane) {
      TileSource visible[kBlockGroups];
      for (int64_t g = 0; g < kBlockGroups; ++g) {
        visible[g] = values_[g];
        if (values_[g].data != value_copy(g)) continue;  // all rows see these
        const int64_t begin = block + g * kGroupKeys;
        BFloat16* const to = visible_values_ + g * kGroupKeys * v_dim_;
        hide_values(value_copy(g), v_dim_, lanes.low[lane] - begin, lanes.high[lane] - begin, to);
        visible[g].data = to;
      }
      std::memcpy(lane_out_, lanes.out, v_dim_ * V::kLanes * sizeof(float));
      output_block(visible, weights_, v_dim_, fresh, lane_out_);
      for (int64_t d = 0; d < v_dim_; ++d)
        lanes.out[d * V::kLanes + lane] = lane_out_[d * V::kLanes + lane];
    }
  }

  BFloat16* value_copy(int64_t group) const { return value_copies_ + group * kGroupKeys * v_dim_; }

  void find_operands(int64_t block) {
    const int64_t begin = std::max<int64_t>(block, item_.key_begin);
    const int64_t end = std::min<int64_t>(block + kBlockKeys, item_.key_end);
    find_slots<BFloat16>(params_.k_cache, pages_, kv_head_, block, begin, end, slot_);
    find_keys();
    find_slots<BFloat16>(params_.v_cache, pages_, kv_head_, block, begin, end, slot_);
    find_values(block);
  }

  void find_keys() {
    const bool ready = keys_lie_ready(params_.k_cache, depth_);
    for (int64_t i = 0; i < kBlockTiles; ++i) {
      const BFloat16* const* const slot = slot_ + i * kTileKeys;
      if (ready && slot[0] != nullptr) {
        keys_[i] = {slot[0], params_.k_cache.slot_stride};
      } else {
        BFloat16* const copy = key_copies_ + i * kTileKeys * depth_;
        copy_keys(slot, params_.k_cache.dim, depth_, copy);
        keys_[i] = {copy, depth_};
      }
    }
  }

  void find_values(int64_t block) {
    const bool ready = groups_lie_in_rows(params_.v_cache) && params_.v_cache.dim == v_dim_;
    values_are_finite_ = true;
    for (int64_t g = 0; g < kBlockGroups; ++g) {
      const int64_t key = block + g * kGroupKeys;
      const BFloat16* const* const slot = slot_ + g * kGroupKeys;
      if (ready && key >= columns_.all_from() && key + kGroupKeys <= columns_.all_to()) {
        values_[g] = {slot[0], params_.v_cache.dim_stride};
      } else {
        values_are_finite_ &= copy_values(params_.v_cache, slot, v_dim_, value_copy(g));
        values_[g] = {value_copy(g), kGroupKeys};
      }
    }
  }

  const AttentionParams& params_;
  const PlanItem& item_;
  const int32_t* pages_;
  const int64_t kv_head_, depth_, v_dim_;
  const Scoring scoring_;
  Arena arena_;
  Columns columns_;
  const BFloat16** slot_;
  BFloat16 *key_copies_, *value_copies_, *visible_values_;
  float* lane_out_;
  float* scores_;      // [64 keys][16]
  BFloat16* weights_;  // [32][16] pairs
  // Of the current block.
  TileSource keys_[kBlockTiles], values_[kBlockGroups];
  bool values_are_finite_ = true;  // those that not all rows see
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
