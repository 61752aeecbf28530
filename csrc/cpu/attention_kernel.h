// Attention of one work item: some query rows of one KV head against a run of keys. The one
// algorithm of all instruction sets V and cache dtypes T; see plan_layout.h for the order of the
// arithmetic.
#pragma once

#include "cpu/attention_output.h"
#include "cpu/attention_work.h"
#include "cpu/convert.h"
#include "cpu/gemm.h"
#include "cpu/inline.h"
#include "cpu/pack.h"
#include "cpu/softmax.h"

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
// before.
struct Scratch {
  WIM_INLINE Scratch(char* base, int64_t rows, int64_t dim, int64_t v_dim,
                     int64_t* bytes = nullptr) {
    Arena arena(base);
    low = arena.take<int32_t>(rows), high = arena.take<int32_t>(rows);
    active = arena.take<int32_t>(rows), started = arena.take<int32_t>(rows);
    slot = arena.take<const void*>(kBlockKeys);
    query = arena.take<float>(rows * dim);
    keys = arena.take<float>(dim * kBlockKeys), values = arena.take<float>(kBlockKeys * v_dim);
    scores = arena.take<float>(kTile * kBlockKeys), sums = arena.take<float>(kTile * v_dim);
    for (int which = 0; which < 2; ++which) {
      maximum[which] = arena.take<float>(rows), sum[which] = arena.take<float>(rows);
      out[which] = arena.take<float>(rows * v_dim);
    }
    if (bytes != nullptr) *bytes = arena.used();
  }
  int32_t *low, *high, *active, *started;
  const void** slot;
  float *query, *keys, *values, *scores, *sums;
  float *maximum[2], *sum[2], *out[2];  // [kCell], [kFold]
};
enum { kCell = 0, kFold = 1 };

template <class V, class T>
class ItemKernel {
 public:
  WIM_INLINE ItemKernel(const AttentionWork& work, int64_t item, int64_t kv_head, char* memory)
      : work_(work),
        params_(work.params),
        item_(work.items[item]),
        rows_(work.rows + item_.row_begin),
        pages_(params_.block_table + item_.sequence * params_.block_table_stride),
        kv_head_(kv_head),
        dim_(params_.query.dim),
        v_dim_(padded<V>(params_.out.dim)),
        count_((item_.row_end - item_.row_begin) * work.group),
        s_(memory, work.max_item_rows * work.group, dim_, v_dim_) {}

  void run() {
    pack_rows();
    for (int64_t cell = item_.key_begin / kCellKeys; cell * kCellKeys < item_.key_end; ++cell) {
      const int64_t begin = cell * kCellKeys, end = begin + kCellKeys;
      begin_cell(select_rows(begin, end));
      for (int64_t block = begin; block < end; block += kBlockKeys) {
        if (block < item_.key_end && block + kBlockKeys > item_.key_begin) run_block(block);
      }
      end_cell(select_rows(begin, end));
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
    // Everything that multiplies q . k goes into q; softcap needs the score over the cap, the rest
    // base 2.
    float scale = params_.softmax_scale;
    if (params_.k_scale.data != nullptr)
      scale *= params_.k_scale.data[kv_head_ * params_.k_scale.stride];
    scale = params_.softcap != 0.0f ? scale / params_.softcap : scale * kLog2E;
    for (int64_t row = 0; row < count_; ++row) {
      const PlanRow& source = plan_row(row);
      s_.low[row] = source.low, s_.high[row] = source.high, s_.started[row] = 0;
      const T* q = static_cast<const T*>(params_.query.data) +
                   source.token * params_.query.row_stride +
                   head_of(row) * params_.query.head_stride;
      int64_t d = 0;
      for (; d + V::kLanes <= dim_; d += V::kLanes) {
        V::store(s_.query + row * dim_ + d, V::mul(V::load(q + d), V::set1(scale)));
      }
      if (d < dim_) {
        store_part<V>(s_.query + row * dim_ + d,
                      V::mul(load_part<V>(q + d, dim_ - d), V::set1(scale)), dim_ - d);
      }
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
    for (int64_t i = 0; i < selected; ++i) {
      const int64_t row = s_.active[i];
      if (s_.started[row]) {
        fold_state<V>(state(kCell, row), v_dim_, state(kFold, row));
      } else {
        copy_state<V>(state(kCell, row), v_dim_, state(kFold, row));
      }
      s_.started[row] = 1;
    }
  }

  void run_block(int64_t block) {
    const int64_t selected = select_rows(block, block + kBlockKeys);
    if (selected == 0) return;
    const int64_t begin = block > item_.key_begin ? block : item_.key_begin;
    const int64_t end = block + kBlockKeys < item_.key_end ? block + kBlockKeys : item_.key_end;
    const auto slot = reinterpret_cast<const T**>(s_.slot);
    find_slots<T>(params_.k_cache, pages_, kv_head_, block, begin, end, slot);
    pack_keys<V>(slot, dim_, s_.keys);
    find_slots<T>(params_.v_cache, pages_, kv_head_, block, begin, end, slot);
    pack_values<V>(params_.v_cache, slot, v_dim_, s_.values);
    static_assert(kTile == 6);  // else rows that fill no tile would find no case below
    int64_t i = 0;
    for (; i + kTile <= selected; i += kTile) run_tile<kTile>(block, s_.active + i);
    switch (selected - i) {
      case 1:
        return run_tile<1>(block, s_.active + i);
      case 2:
        return run_tile<2>(block, s_.active + i);
      case 3:
        return run_tile<3>(block, s_.active + i);
      case 4:
        return run_tile<4>(block, s_.active + i);
      case 5:
        return run_tile<5>(block, s_.active + i);
    }
  }

  template <int M>
  void run_tile(int64_t block, const int32_t* rows) {
    const float* query[M];
    const float* weights[M];
    float* out[M];
    float alpha[M];
    for (int m = 0; m < M; ++m) {
      query[m] = s_.query + rows[m] * dim_;
      weights[m] = s_.scores + m * kBlockKeys;
      out[m] = s_.out[kCell] + rows[m] * v_dim_;
    }
    score_tile<V, M>(query, s_.keys, dim_, s_.scores);
    int64_t low[M], high[M];  // visible keys of each row within the block
    bool whole = true;
    for (int m = 0; m < M; ++m) {
      const int64_t row = rows[m];
      float* scores = s_.scores + m * kBlockKeys;
      if (params_.softcap != 0.0f || params_.alibi_slopes != nullptr)
        apply_rule<V>(rule(row, block), scores);
      low[m] = s_.low[row] > block ? s_.low[row] - block : 0;
      high[m] = s_.high[row] < block + kBlockKeys ? s_.high[row] - block : kBlockKeys;
      if (high[m] - low[m] < kBlockKeys) {
        whole = false;
        mask_scores<V>(static_cast<float>(low[m]), static_cast<float>(high[m]), scores);
      }
      alpha[m] = softmax_step<V>(scores, s_.maximum[kCell] + row, s_.sum[kCell] + row);
    }
    if (whole) {
      output_tile<V, M>(weights, s_.values, v_dim_, v_dim_, alpha, out);
    } else {
      output_partial<M>(weights, low, high, alpha, out);
    }
  }

  // Adds visible keys only: 0 times a stale NaN is NaN. The keys that all rows see go together, the
  // others row by row.
  template <int M>
  void output_partial(const float* const (&weights)[M], const int64_t* low, const int64_t* high,
                      const float* alpha, float* const (&out)[M]) {
    int64_t common_low = low[0], common_high = high[0];
    for (int m = 1; m < M; ++m) {
      common_low = common_low > low[m] ? common_low : low[m];
      common_high = common_high < high[m] ? common_high : high[m];
    }
    if (common_high < common_low) common_high = common_low = kBlockKeys;
    float* sums[M];
    for (int m = 0; m < M; ++m) {
      sums[m] = s_.sums + m * v_dim_;
      for (int64_t d = 0; d < v_dim_; d += V::kLanes) V::store(sums[m] + d, V::zero());
      add_own_keys(weights[m], low[m], high[m] < common_low ? high[m] : common_low, sums[m]);
    }
    add_keys<V, M>(weights, s_.values, v_dim_, v_dim_, common_low, common_high, sums);
    for (int m = 0; m < M; ++m) {
      add_own_keys(weights[m], common_high, high[m], sums[m]);
      const typename V::F scale = V::set1(alpha[m]);
      for (int64_t d = 0; d < v_dim_; d += V::kLanes) {
        V::store(out[m] + d, V::fma(V::load(out[m] + d), scale, V::load(sums[m] + d)));
      }
    }
  }

  void add_own_keys(const float* weights, int64_t begin, int64_t end, float* sums) {
    const float* const one[1] = {weights};
    float* const target[1] = {sums};
    if (begin < end) add_keys<V, 1>(one, s_.values, v_dim_, v_dim_, begin, end, target);
  }

  ScoreRule rule(int64_t row, int64_t block) const {
    ScoreRule result;
    result.softcap = params_.softcap;
    if (params_.alibi_slopes != nullptr) {
      const PlanToken& token = work_.tokens[plan_row(row).token];
      result.alibi_slope =
          kLog2E * params_.alibi_slopes[token.sequence * params_.alibi_batch_stride + head_of(row)];
      result.distance = static_cast<float>(token.position - block);
    }
    return result;
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
  const int64_t kv_head_, dim_, v_dim_, count_;
  const Scratch s_;
};

// The table of one instruction set.
template <class V>
struct KernelTable {
  static int64_t scratch_bytes(const AttentionWork& work) {
    int64_t bytes = 0;
    Scratch(nullptr, work.max_item_rows * work.group, work.params.query.dim,
            padded<V>(work.params.out.dim), &bytes);
    return bytes;
  }
  static void run_item(const AttentionWork& work, int64_t item, int64_t kv_head, char* scratch) {
    switch (work.params.dtype) {
      case DType::kFloat32:
        return ItemKernel<V, float>(work, item, kv_head, scratch).run();
      case DType::kBFloat16:
        return ItemKernel<V, BFloat16>(work, item, kv_head, scratch).run();
      case DType::kFloat16:
        return ItemKernel<V, Float16>(work, item, kv_head, scratch).run();
    }
  }
  static void run_combine(const AttentionWork& work, int64_t index, char* scratch) {
    switch (work.params.dtype) {
      case DType::kFloat32:
        return combine_token<V, float>(work, work.combines[index], scratch);
      case DType::kBFloat16:
        return combine_token<V, BFloat16>(work, work.combines[index], scratch);
      case DType::kFloat16:
        return combine_token<V, Float16>(work, work.combines[index], scratch);
    }
  }
};

}  // namespace wim::cpu
