#include "plan.h"

#include <numeric>
#include <unordered_map>

namespace wim {
namespace {

constexpr int64_t kTileRows =
    128;  // packed rows (token x query head of the group) that one item aims at

struct Item {
  int32_t sequence, key_begin, key_end;
  std::vector<PlanRow> rows;
};

// Key positions fit in 32 bits: seqused_k is int32.
int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

void add_row(Item* item, int64_t token, int64_t low, int64_t high) {
  item->rows.push_back({narrow(token), narrow(low), narrow(high), -1});
  item->key_begin = std::min(item->key_begin, narrow(low));
  item->key_end = std::max(item->key_end, narrow(high));
}

Item empty_item(int64_t sequence) { return {narrow(sequence), INT32_MAX, 0, {}}; }

bool single_cell(const Item& item) {
  return item.key_begin / kCellKeys == (item.key_end - 1) / kCellKeys;
}

// In units of one key for one packed row; reading and packing a key costs about as much as 12 rows.
int64_t cost(const Item& item, int64_t group) {
  int64_t keys = 0;
  for (const PlanRow& row : item.rows) keys += row.high - row.low;
  return keys * group + 12 * int64_t{item.key_end - item.key_begin};
}

class Planner {
 public:
  Planner(const BatchShape& batch, int64_t num_threads)
      : batch_(batch),
        num_threads_(num_threads),
        tile_tokens_(std::max<int64_t>(1, kTileRows / batch.group())) {}

  std::vector<int32_t> run() {
    read_rows();
    for (int64_t b = 0; b < batch_.batch; ++b) {
      if (is_chunk(b)) tile_chunk(b);
    }
    const size_t tiles = items_.size();
    for (int64_t b = 0; b < batch_.batch; ++b) {
      if (!is_chunk(b) && !used_[b].empty()) place_branch(b, tiles);
    }
    for (std::vector<Piece>& pieces : cells_) share_cell(&pieces);
    split_for_threads();
    assign_slots();
    return serialise();
  }

 private:
  // The rows of a sequence with few of them, in one cell.
  struct Piece {
    int64_t sequence, low, high;
  };

  void read_rows();
  bool is_chunk(int64_t b) const {
    return 2 * (batch_.cu_seqlens_q[b + 1] - batch_.cu_seqlens_q[b]) * batch_.group() >= kTileRows;
  }
  void tile_chunk(int64_t b);
  void place_branch(int64_t b, size_t tiles);
  int64_t common_keys(int64_t a, int64_t b, int64_t low, int64_t high) const;
  void add_rows(Item* item, int64_t b, int64_t low, int64_t high) const;
  void share_cell(std::vector<Piece>* pieces);
  void split_for_threads();
  void assign_slots();
  int64_t pages_of(int64_t low, int64_t high) const {
    return (high - 1) / batch_.page_size - low / batch_.page_size + 1;
  }
  int64_t pages_without_sharing(const Item& item) const;
  int64_t imbalance(const std::vector<int64_t>& costs) const;
  std::vector<int32_t> serialise();

  const BatchShape& batch_;
  const int64_t num_threads_, tile_tokens_;
  std::vector<PlanToken> tokens_;
  std::vector<KeyRange> visible_;  // by token
  std::vector<KeyRange> used_;     // by sequence
  std::vector<Item> items_;
  std::vector<std::vector<Piece>> cells_;
  std::vector<PlanCombine> combines_;
  int64_t num_partials_ = 0;
};

void Planner::read_rows() {
  for (int64_t b = 0; b < batch_.batch; ++b) {
    const int64_t rows = batch_.cu_seqlens_q[b + 1] - batch_.cu_seqlens_q[b],
                  length = batch_.seqused_k[b];
    for (int64_t i = 0; i < rows; ++i) {
      tokens_.push_back({narrow(b), narrow(length - rows + i)});
      visible_.push_back(visible_keys(batch_, length, length - rows + i));
    }
    used_.push_back(used_keys(batch_, b));
  }
}

// Many rows: consecutive tokens share a tile that covers all their keys.
void Planner::tile_chunk(int64_t b) {
  Item item = empty_item(b);
  for (int64_t token = batch_.cu_seqlens_q[b]; token < batch_.cu_seqlens_q[b + 1]; ++token) {
    if (!visible_[token].empty()) add_row(&item, token, visible_[token].low, visible_[token].high);
    const bool last = token + 1 == batch_.cu_seqlens_q[b + 1];
    if (item.rows.empty() || (!last && static_cast<int64_t>(item.rows.size()) < tile_tokens_))
      continue;
    items_.push_back(std::move(item));
    item = empty_item(b);
  }
}

// End of the keys from `low` on that sequences a and b have on the same pages, at most `high`.
int64_t Planner::common_keys(int64_t a, int64_t b, int64_t low, int64_t high) const {
  const int32_t* pages_a = batch_.pages(a);
  const int32_t* pages_b = batch_.pages(b);
  int64_t page = low / batch_.page_size;
  while (page * batch_.page_size < high && pages_a[page] == pages_b[page]) ++page;
  return std::min(page * batch_.page_size, high);
}

// The parts of the sequence's rows that lie in [low, high).
void Planner::add_rows(Item* item, int64_t b, int64_t low, int64_t high) const {
  for (int64_t token = batch_.cu_seqlens_q[b]; token < batch_.cu_seqlens_q[b + 1]; ++token) {
    const int64_t from = std::max(low, visible_[token].low),
                  to = std::min(high, visible_[token].high);
    if (from < to) add_row(item, token, from, to);
  }
}

// Few rows: whole cells that a chunk's tile reads anyway ride along with that tile, the rest is cut
// into cells.
void Planner::place_branch(int64_t b, size_t tiles) {
  const KeyRange used = used_[b];
  const int64_t rows = batch_.cu_seqlens_q[b + 1] - batch_.cu_seqlens_q[b];
  Item* host = nullptr;
  int64_t rest = used.low, chunk = -1, common = 0;
  for (size_t i = 0; i < tiles; ++i) {
    Item& tile = items_[i];
    if (tile.sequence != chunk) {
      chunk = tile.sequence;
      common = common_keys(chunk, b, used.low, std::min(used.high, used_[chunk].high));
    }
    int64_t end = std::min<int64_t>(common, tile.key_end);
    if (end < used.high) end -= end % kCellKeys;
    const bool room =
        static_cast<int64_t>(tile.rows.size()) + rows <= tile_tokens_ + tile_tokens_ / 2;
    // Among tiles that carry equally much the last one: it has the most keys to read anyway.
    if (room && tile.key_begin <= used.low && end > used.low && end >= rest)
      host = &tile, rest = end;
  }
  if (host != nullptr) add_rows(host, b, used.low, rest);
  for (int64_t low = rest; low < used.high;) {
    const int64_t cell = low / kCellKeys, high = std::min(used.high, (cell + 1) * kCellKeys);
    if (static_cast<int64_t>(cells_.size()) <= cell) cells_.resize(cell + 1);
    cells_[cell].push_back({b, low, high});
    low = high;
  }
}

// Pieces of one cell that lie on the same pages become one item: each page is read once for all of
// them.
void Planner::share_cell(std::vector<Piece>* pieces) {
  std::stable_sort(pieces->begin(), pieces->end(), [&](const Piece& a, const Piece& b) {
    return pages_of(a.low, a.high) >
           pages_of(b.low, b.high);  // so that a leader covers its followers
  });
  struct Leader {
    size_t item;
    Piece piece;
  };
  std::unordered_map<int64_t, std::vector<Leader>> leaders;  // by page index and page id
  const auto key_of = [&](int64_t sequence, int64_t page) {
    return (page << 32) ^ int64_t { batch_.pages(sequence)[page] };
  };
  for (const Piece& piece : *pieces) {
    const int64_t rows =
        batch_.cu_seqlens_q[piece.sequence + 1] - batch_.cu_seqlens_q[piece.sequence];
    const int64_t first = piece.low / batch_.page_size, last = (piece.high - 1) / batch_.page_size;
    const auto fits = [&](const Leader& leader) {
      return (leader.piece.high - 1) / batch_.page_size >= last &&
             static_cast<int64_t>(items_[leader.item].rows.size()) + rows <= tile_tokens_ &&
             common_keys(leader.piece.sequence, piece.sequence, piece.low, piece.high) ==
                 piece.high;
    };
    const std::vector<Leader>& candidates = leaders[key_of(piece.sequence, first)];
    const auto found = std::find_if(candidates.begin(), candidates.end(), fits);
    if (found != candidates.end()) {
      add_rows(&items_[found->item], piece.sequence, piece.low, piece.high);
      continue;
    }
    items_.push_back(empty_item(piece.sequence));
    add_rows(&items_.back(), piece.sequence, piece.low, piece.high);
    for (int64_t page = first; page <= last; ++page) {
      leaders[key_of(piece.sequence, page)].push_back({items_.size() - 1, piece});
    }
  }
}

// Too few tasks to keep the threads busy: the longest tiles are cut into cells.
void Planner::split_for_threads() {
  const int64_t wanted = num_threads_ > 1 ? 4 * num_threads_ : 1;
  std::vector<Item> whole = std::move(items_);
  items_.clear();
  std::sort(whole.begin(), whole.end(), [](const Item& a, const Item& b) {
    return int64_t{a.key_end} - a.key_begin > int64_t{b.key_end} - b.key_begin;
  });
  for (size_t i = 0; i < whole.size(); ++i) {
    const int64_t tasks =
        static_cast<int64_t>(items_.size() + whole.size() - i) * batch_.num_kv_heads;
    if (tasks >= wanted || single_cell(whole[i])) {
      items_.push_back(std::move(whole[i]));
      continue;
    }
    for (int64_t cell = whole[i].key_begin / kCellKeys; cell * kCellKeys < whole[i].key_end;
         ++cell) {
      Item part = empty_item(whole[i].sequence);
      for (const PlanRow& row : whole[i].rows) {
        const int64_t low = std::max<int64_t>(row.low, cell * kCellKeys);
        const int64_t high = std::min<int64_t>(row.high, (cell + 1) * kCellKeys);
        if (low < high) add_row(&part, row.token, low, high);
      }
      if (!part.rows.empty()) items_.push_back(std::move(part));
    }
  }
}

// Tokens with several items get one partial slot each, consecutive in key order.
void Planner::assign_slots() {
  std::vector<std::vector<PlanRow*>> parts(tokens_.size());
  for (Item& item : items_) {
    for (PlanRow& row : item.rows) parts[row.token].push_back(&row);
  }
  for (size_t token = 0; token < parts.size(); ++token) {
    if (parts[token].size() == 1) continue;
    std::sort(parts[token].begin(), parts[token].end(),
              [](const PlanRow* a, const PlanRow* b) { return a->low < b->low; });
    const int64_t begin = num_partials_;
    for (PlanRow* row : parts[token]) row->slot = narrow(num_partials_++);
    combines_.push_back({narrow(token), narrow(begin), narrow(num_partials_)});
  }
}

// Pages that the item's sequences would read one by one.
int64_t Planner::pages_without_sharing(const Item& item) const {
  int64_t pages = 0;
  for (size_t i = 0; i < item.rows.size();) {  // rows of a sequence are neighbours
    const int32_t sequence = tokens_[item.rows[i].token].sequence;
    int64_t low = item.rows[i].low, high = item.rows[i].high;
    for (; i < item.rows.size() && tokens_[item.rows[i].token].sequence == sequence; ++i) {
      low = std::min<int64_t>(low, item.rows[i].low),
      high = std::max<int64_t>(high, item.rows[i].high);
    }
    pages += pages_of(low, high);
  }
  return pages;
}

// Largest load of a thread over the average load, in thousandths, when idle threads take the next
// item.
int64_t Planner::imbalance(const std::vector<int64_t>& costs) const {
  std::vector<int64_t> load(num_threads_, 0);
  for (int64_t item_cost : costs) {
    for (int64_t head = 0; head < batch_.num_kv_heads; ++head)
      *std::min_element(load.begin(), load.end()) += item_cost;
  }
  const int64_t total = std::accumulate(load.begin(), load.end(), int64_t{0});
  return total == 0 ? 1000
                    : *std::max_element(load.begin(), load.end()) * 1000 * num_threads_ / total;
}

std::vector<int32_t> Planner::serialise() {
  const int64_t group = batch_.group();
  std::stable_sort(items_.begin(), items_.end(),
                   [&](const Item& a, const Item& b) { return cost(a, group) > cost(b, group); });
  std::vector<int32_t> plan(kPlanHeaderInts, 0);
  const auto set = [&](PlanField field, int64_t value) {
    std::memcpy(plan.data() + 2 * static_cast<int>(field), &value, sizeof value);
  };
  const auto append = [&](PlanField offset, const auto* data, size_t count) {
    set(offset, static_cast<int64_t>(plan.size()));
    const auto* ints = reinterpret_cast<const int32_t*>(data);
    plan.insert(plan.end(), ints, ints + count * sizeof(*data) / sizeof(int32_t));
  };
  std::vector<PlanItem> items;
  std::vector<PlanRow> rows;
  std::vector<int64_t> costs;
  int64_t pages_read = 0, pages_alone = 0, max_rows = 0, scores = 0;
  for (const Item& item : items_) {
    const auto begin = narrow(static_cast<int64_t>(rows.size()));
    rows.insert(rows.end(), item.rows.begin(), item.rows.end());
    items.push_back({begin, narrow(static_cast<int64_t>(rows.size())), item.sequence,
                     item.key_begin, item.key_end});
    costs.push_back(cost(item, group));
    pages_read += pages_of(item.key_begin, item.key_end);
    pages_alone += pages_without_sharing(item);
    max_rows = std::max(max_rows, static_cast<int64_t>(item.rows.size()));
  }
  for (const KeyRange& range : visible_) scores += range.empty() ? 0 : range.high - range.low;
  append(PlanField::cu_seqlens_offset, batch_.cu_seqlens_q, batch_.batch + 1);
  append(PlanField::seqused_offset, batch_.seqused_k, batch_.batch);
  append(PlanField::token_offset, tokens_.data(), tokens_.size());
  append(PlanField::item_offset, items.data(), items.size());
  append(PlanField::row_offset, rows.data(), rows.size());
  append(PlanField::combine_offset, combines_.data(), combines_.size());
  set(PlanField::magic, kPlanMagic), set(PlanField::version, kPlanVersion);
  set(PlanField::total_ints, static_cast<int64_t>(plan.size()));
  set(PlanField::batch, batch_.batch), set(PlanField::total_q, batch_.total_q());
  set(PlanField::page_size, batch_.page_size), set(PlanField::num_heads, batch_.num_heads);
  set(PlanField::num_kv_heads, batch_.num_kv_heads), set(PlanField::causal, batch_.causal);
  set(PlanField::window_left, batch_.window_left),
      set(PlanField::window_right, batch_.window_right);
  set(PlanField::num_threads, num_threads_);
  set(PlanField::pages_hash, static_cast<int64_t>(hash_used_pages(batch_)));
  set(PlanField::num_items, static_cast<int64_t>(items.size()));
  set(PlanField::num_rows, static_cast<int64_t>(rows.size()));
  set(PlanField::num_combines, static_cast<int64_t>(combines_.size()));
  set(PlanField::num_partials, num_partials_), set(PlanField::max_item_rows, max_rows);
  set(PlanField::pages_read, pages_read), set(PlanField::pages_without_sharing, pages_alone);
  set(PlanField::scores, scores * batch_.num_heads),
      set(PlanField::imbalance_permille, imbalance(costs));
  set(PlanField::checksum, plan_checksum(plan.data(), static_cast<int64_t>(plan.size())));
  return plan;
}

}  // namespace

KeyRange used_keys(const BatchShape& batch, int64_t sequence) {
  const int64_t rows = batch.cu_seqlens_q[sequence + 1] - batch.cu_seqlens_q[sequence];
  const int64_t length = batch.seqused_k[sequence];
  // Both ends grow with the position, so the first row that sees a key has the lowest key, the last
  // row the highest.
  for (int64_t i = 0; i < rows; ++i) {
    const KeyRange first = visible_keys(batch, length, length - rows + i);
    if (!first.empty()) return {first.low, visible_keys(batch, length, length - 1).high};
  }
  return {0, 0};
}

uint64_t hash_used_pages(const BatchShape& batch) {
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (int64_t b = 0; b < batch.batch; ++b) {
    const KeyRange used = used_keys(batch, b);
    if (used.empty()) continue;
    const int32_t* pages = batch.pages(b);
    for (int64_t page = used.low / batch.page_size; page * batch.page_size < used.high; ++page) {
      hash = (hash ^ static_cast<uint32_t>(pages[page])) * 0x100000001b3;
      hash ^= hash >> 29;
    }
  }
  return hash;
}

int64_t plan_checksum(const int32_t* plan, int64_t ints) {
  constexpr int64_t kSkip = 2 * static_cast<int64_t>(PlanField::checksum);
  uint64_t sum = 0;
  for (int64_t i = 0; i < ints; ++i) {
    if (i != kSkip && i != kSkip + 1)
      sum += static_cast<uint32_t>(plan[i]) * static_cast<uint64_t>(2 * i + 1);
  }
  return static_cast<int64_t>(sum);
}

std::vector<int32_t> make_plan(const BatchShape& batch, int64_t num_threads) {
  return Planner(batch, std::max<int64_t>(1, num_threads)).run();
}

}  // namespace wim
