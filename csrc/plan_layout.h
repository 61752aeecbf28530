// How an attention plan lies in its int32 tensor: a header of 64-bit numbers, then arrays. A plan
// is a plain value: no pointers, no tensors, the same for every layer of a model.
//
// The arithmetic that a plan describes, and that makes a row's result bitwise independent of the
// plan: keys are cut at multiples of kCellKeys (absolute positions). A row's result is the left
// fold, in key order, of one softmax state (maximum, sum, output) per cell. An item that covers
// several cells of a row folds them itself and must be the row's first; each later item of that row
// is a single cell; the combine goes on folding where the first item stopped.
#pragma once

#include <cstdint>
#include <cstring>

namespace wim {

constexpr int32_t kCellKeys = 512;
constexpr int32_t kBlockKeys = 64;  // what kernels pack and skip as a whole, on the same grid
constexpr int64_t kPlanMagic = 0x6e616c706d6977;  // "wimplan"
constexpr int64_t kPlanVersion = 1;

// X(name): the header's fields in order. Python learns them from the op plan_fields(). The last
// ones are the report.
// clang-format off
#define WIM_PLAN_FIELDS(X)                                                                  \
  X(magic) X(version) X(checksum) X(total_ints)                                             \
  X(batch) X(total_q) X(page_size) X(num_heads) X(num_kv_heads)                             \
  X(causal) X(window_left) X(window_right) X(num_threads) X(pages_hash)                     \
  X(cu_seqlens_offset) X(seqused_offset) X(token_offset)                                    \
  X(item_offset) X(row_offset) X(combine_offset)                                            \
  X(num_items) X(num_rows) X(num_combines) X(num_partials) X(max_item_rows)                 \
  X(pages_read) X(pages_without_sharing) X(scores) X(imbalance_permille)
// clang-format on

#define WIM_ENUM(name) name,
enum class PlanField : int { WIM_PLAN_FIELDS(WIM_ENUM) count };
#undef WIM_ENUM
constexpr int64_t kPlanHeaderInts = 2 * static_cast<int64_t>(PlanField::count);

struct PlanToken {
  int32_t sequence,
      position;  // position = kv_length - rows + row; negative for rows before the first key
};
// These rows against these keys; the pages are those of block_table[sequence]. One task per KV
// head.
struct PlanItem {
  int32_t row_begin, row_end, sequence, key_begin, key_end;
};
// A token's keys [low, high) within its item, never empty. slot -1: this is all the token sees,
// write the output; otherwise the index of the partial state to write.
struct PlanRow {
  int32_t token, low, high, slot;
};
// A token whose output is folded from the partials slot_begin .. slot_end, in key order; none: it
// sees no key.
struct PlanCombine {
  int32_t token, slot_begin, slot_end;
};

class PlanView {
 public:
  explicit PlanView(const int32_t* data) : data_(data) {}
  int64_t get(PlanField field) const {
    int64_t value;
    std::memcpy(&value, data_ + 2 * static_cast<int>(field), sizeof value);
    return value;
  }
  const int32_t* cu_seqlens_q() const { return data_ + get(PlanField::cu_seqlens_offset); }
  const int32_t* seqused_k() const { return data_ + get(PlanField::seqused_offset); }
  const PlanToken* tokens() const { return array<PlanToken>(PlanField::token_offset); }
  const PlanItem* items() const { return array<PlanItem>(PlanField::item_offset); }
  const PlanRow* rows() const { return array<PlanRow>(PlanField::row_offset); }
  const PlanCombine* combines() const { return array<PlanCombine>(PlanField::combine_offset); }

 private:
  template <class T>
  const T* array(PlanField offset) const {
    return reinterpret_cast<const T*>(data_ + get(offset));
  }
  const int32_t* data_;
};

}  // namespace wim
