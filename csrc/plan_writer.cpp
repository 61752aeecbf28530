#include <cstring>
#include <numeric>

#include "plan_draft.h"

namespace wim {
namespace {

int64_t pages_of(int64_t low, int64_t high, int64_t page_size) {
  return (high - 1) / page_size - low / page_size + 1;
}

// Pages that the item's sequences would read one by one.
int64_t pages_without_sharing(const DraftItem& item, const PlanDraft& draft, int64_t page_size) {
  int64_t pages = 0;
  for (size_t i = 0; i < item.rows.size();) {
    const int32_t sequence = draft.tokens[item.rows[i].token].sequence;
    int64_t low = item.rows[i].low, high = item.rows[i].high;
    for (; i < item.rows.size() && draft.tokens[item.rows[i].token].sequence == sequence; ++i) {
      low = std::min<int64_t>(low, item.rows[i].low);
      high = std::max<int64_t>(high, item.rows[i].high);
    }
    pages += pages_of(low, high, page_size);
  }
  return pages;
}

class PlanWriter {
 public:
  PlanWriter() : ints_(kPlanHeaderInts, 0) {}

  void set(PlanField field, int64_t value) {
    std::memcpy(ints_.data() + 2 * static_cast<int>(field), &value, sizeof value);
  }
  template <class T>
  void append(PlanField offset, const T* data, int64_t count) {
    set(offset, size());
    const auto* ints = reinterpret_cast<const int32_t*>(data);
    ints_.insert(ints_.end(), ints, ints + count * sizeof(T) / sizeof(int32_t));
  }
  template <class T>
  void append(PlanField offset, PlanField count, const std::vector<T>& data) {
    append(offset, data.data(), static_cast<int64_t>(data.size()));
    set(count, static_cast<int64_t>(data.size()));
  }
  int64_t size() const { return static_cast<int64_t>(ints_.size()); }
  std::vector<int32_t> finish() {
    set(PlanField::magic, kPlanMagic);
    set(PlanField::version, kPlanVersion);
    set(PlanField::total_ints, size());
    set(PlanField::checksum, plan_checksum(ints_.data(), size()));
    return std::move(ints_);
  }

 private:
  std::vector<int32_t> ints_;
};

// What the plan is for: a call with anything else is refused.
void write_arguments(const BatchShape& batch, int64_t num_threads, PlanWriter* writer) {
  writer->set(PlanField::batch, batch.batch);
  writer->set(PlanField::total_q, batch.total_q());
  writer->set(PlanField::page_size, batch.page_size);
  writer->set(PlanField::num_heads, batch.num_heads);
  writer->set(PlanField::num_kv_heads, batch.num_kv_heads);
  writer->set(PlanField::causal, batch.causal);
  writer->set(PlanField::window_left, batch.window_left);
  writer->set(PlanField::window_right, batch.window_right);
  writer->set(PlanField::num_threads, num_threads);
  writer->set(PlanField::pages_hash, static_cast<int64_t>(hash_used_pages(batch)));
  writer->append(PlanField::cu_seqlens_offset, batch.cu_seqlens_q, batch.batch + 1);
  writer->append(PlanField::seqused_offset, batch.seqused_k, batch.batch);
}

void write_items(const PlanDraft& draft, PlanWriter* writer) {
  std::vector<PlanItem> items;
  std::vector<PlanRow> rows;
  int64_t max_rows = 0;
  for (const DraftItem& item : draft.items) {
    const auto begin = static_cast<int64_t>(rows.size());
    rows.insert(rows.end(), item.rows.begin(), item.rows.end());
    const int64_t end = begin + item.num_rows();
    items.push_back({narrow(begin), narrow(end), item.sequence, item.key_begin, item.key_end});
    max_rows = std::max(max_rows, item.num_rows());
  }
  writer->append(PlanField::item_offset, PlanField::num_items, items);
  writer->append(PlanField::row_offset, PlanField::num_rows, rows);
  writer->append(PlanField::combine_offset, PlanField::num_combines, draft.combines);
  writer->set(PlanField::num_partials, draft.num_partials);
  writer->set(PlanField::max_item_rows, max_rows);
}

void write_report(const BatchShape& batch, const PlanDraft& draft, PlanWriter* writer) {
  int64_t pages_read = 0, pages_alone = 0, keys = 0;
  for (const DraftItem& item : draft.items) {
    pages_read += pages_of(item.key_begin, item.key_end, batch.page_size);
    pages_alone += pages_without_sharing(item, draft, batch.page_size);
  }
  for (const KeyRange& range : draft.visible) keys += range.empty() ? 0 : range.high - range.low;
  writer->set(PlanField::pages_read, pages_read);
  writer->set(PlanField::pages_without_sharing, pages_alone);
  writer->set(PlanField::scores, keys * batch.num_heads);
  writer->set(PlanField::imbalance_permille, imbalance_permille(batch, draft));
}

}  // namespace

int64_t plan_checksum(const int32_t* plan, int64_t ints) {
  constexpr int64_t kSkip = 2 * static_cast<int64_t>(PlanField::checksum);
  uint64_t sum = 0;
  for (int64_t i = 0; i < ints; ++i) {
    if (i != kSkip && i != kSkip + 1)
      sum += static_cast<uint32_t>(plan[i]) * static_cast<uint64_t>(2 * i + 1);
  }
  return static_cast<int64_t>(sum);
}

int64_t imbalance_permille(const BatchShape& batch, const PlanDraft& draft) {
  std::vector<int64_t> load(draft.num_threads, 0);
  for (const DraftItem& item : draft.items) {
    const int64_t item_cost = item.cost(batch.group());
    for (int64_t head = 0; head < batch.num_kv_heads; ++head) {
      *std::min_element(load.begin(), load.end()) += item_cost;
    }
  }
  const int64_t total = std::accumulate(load.begin(), load.end(), int64_t{0});
  if (total == 0) return 1000;
  return *std::max_element(load.begin(), load.end()) * 1000 * draft.num_threads / total;
}

std::vector<int32_t> write_plan(const BatchShape& batch, const PlanDraft& draft) {
  PlanWriter writer;
  write_arguments(batch, draft.num_threads, &writer);
  writer.append(PlanField::token_offset, draft.tokens.data(), batch.total_q());
  write_items(draft, &writer);
  write_report(batch, draft, &writer);
  return writer.finish();
}

}  // namespace wim
