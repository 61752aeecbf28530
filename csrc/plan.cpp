#include "plan.h"

#include <unordered_map>
#include <utility>

#include "plan_draft.h"

namespace wim {
namespace {

// Packed rows (token x query head of the group) that one item aims at: each strip of keys is packed
// once an item. From kChunkRows on a sequence's rows make items of their own.
constexpr int64_t kTileRows = 1024, kChunkRows = 64;
// In thousandths, see imbalance_permille.
constexpr int64_t kGoodBalance = 1100;

class Planner {
 public:
  Planner(const BatchShape& batch, int64_t num_threads)
      : batch_(batch), tile_tokens_(std::max<int64_t>(1, kTileRows / batch.group())) {
    draft_.num_threads = num_threads;
  }

  PlanDraft run() {
    read_rows();
    for (int64_t b = 0; b < batch_.batch; ++b) {
      if (is_chunk(b)) tile_chunk(b);
    }
    const size_t tiles = draft_.items.size();
    for (int64_t b = 0; b < batch_.batch; ++b) {
      if (!is_chunk(b) && !used_[b].empty()) place_branch(b, tiles);
    }
    for (std::vector<Piece>& pieces : cells_) share_cell(&pieces);
    split_for_threads();
    assign_slots();
    return std::move(draft_);
  }

 private:
  // The rows of a sequence with few of them, in one cell.
  struct Piece {
    int64_t sequence, low, high;
  };

  void read_rows();
  bool is_chunk(int64_t b) const { return batch_.rows(b) * batch_.group() >= kChunkRows; }
  void tile_chunk(int64_t b);
  void place_branch(int64_t b, size_t tiles);
  int64_t common_keys(int64_t a, int64_t b, int64_t low, int64_t high) const;
  void add_rows(DraftItem* item, int64_t b, int64_t low, int64_t high) const;
  void share_cell(std::vector<Piece>* pieces);
  void sort_items();
  void split_for_threads();
  void assign_slots();
  int64_t pages_of(int64_t low, int64_t high) const {
    return (high - 1) / batch_.page_size - low / batch_.page_size + 1;
  }

  const BatchShape& batch_;
  const int64_t tile_tokens_;
  PlanDraft draft_;
  std::vector<KeyRange> used_;             // by sequence
  std::vector<std::vector<Piece>> cells_;  // by cell
};

void Planner::read_rows() {
  for (int64_t b = 0; b < batch_.batch; ++b) {
    const int64_t rows = batch_.rows(b), length = batch_.seqused_k[b];
    for (int64_t i = 0; i < rows; ++i) {
      draft_.tokens.push_back({narrow(b), narrow(length - rows + i)});
      draft_.visible.push_back(visible_keys(batch_, length, length - rows + i));
    }
    used_.push_back(used_keys(batch_, b));
  }
}

// Many rows: consecutive tokens share a tile that covers all their keys. Tiles are equally large,
// so that threads get equal shares.
void Planner::tile_chunk(int64_t b) {
  const int64_t begin = batch_.cu_seqlens_q[b], rows = batch_.rows(b);
  const int64_t tiles = (rows + tile_tokens_ - 1) / tile_tokens_;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    DraftItem item(b);
    for (int64_t i = tile * rows / tiles; i < (tile + 1) * rows / tiles; ++i) {
      const KeyRange keys = draft_.visible[begin + i];
      if (!keys.empty()) item.add_row(begin + i, keys.low, keys.high);
    }
    if (!item.rows.empty()) draft_.items.push_back(std::move(item));
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
void Planner::add_rows(DraftItem* item, int64_t b, int64_t low, int64_t high) const {
  for (int64_t token = batch_.cu_seqlens_q[b]; token < batch_.cu_seqlens_q[b + 1]; ++token) {
    const KeyRange keys = draft_.visible[token];
    const int64_t from = std::max(low, keys.low), to = std::min(high, keys.high);
    if (from < to) item->add_row(token, from, to);
  }
}

// Few rows: whole cells that a chunk's tile reads anyway ride along with that tile, the rest is cut
// into cells.
void Planner::place_branch(int64_t b, size_t tiles) {
  const KeyRange used = used_[b];
  const int64_t rows = batch_.rows(b);
  DraftItem* host = nullptr;
  int64_t rest = used.low, chunk = -1, common = 0;
  for (size_t i = 0; i < tiles; ++i) {
    DraftItem& tile = draft_.items[i];
    if (tile.sequence != chunk) {
      chunk = tile.sequence;
      common = common_keys(chunk, b, used.low, std::min(used.high, used_[chunk].high));
    }
    int64_t end = std::min<int64_t>(common, tile.key_end);
    if (end < used.high) end -= end % kCellKeys;
    const bool room = tile.num_rows() + rows <= tile_tokens_ + tile_tokens_ / 2;
    // Among tiles that carry equally much the last one: it has the most keys to read anyway.
    if (room && tile.key_begin <= used.low && end > used.low && end >= rest) {
      host = &tile;
      rest = end;
    }
  }
  if (host != nullptr) add_rows(host, b, used.low, rest);
  for (int64_t low = rest; low < used.high;) {
    const int64_t cell = low / kCellKeys, high = std::min(used.high, (cell + 1) * kCellKeys);
    if (static_cast<int64_t>(cells_.size()) <= cell) cells_.resize(cell + 1);
    cells_[cell].push_back({b, low, high});
    low = high;
  }
}

// Pieces of one cell that lie on the same pages become one item, which reads each page once. The
// longest pieces come first, so that a leader covers its followers.
void Planner::share_cell(std::vector<Piece>* pieces) {
  std::stable_sort(pieces->begin(), pieces->end(), [&](const Piece& a, const Piece& b) {
    return pages_of(a.low, a.high) > pages_of(b.low, b.high);
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
    const int64_t rows = batch_.rows(piece.sequence);
    const int64_t first = piece.low / batch_.page_size, last = (piece.high - 1) / batch_.page_size;
    const auto fits = [&](const Leader& leader) {
      return (leader.piece.high - 1) / batch_.page_size >= last &&
             draft_.items[leader.item].num_rows() + rows <= tile_tokens_ &&
             common_keys(leader.piece.sequence, piece.sequence, piece.low, piece.high) ==
                 piece.high;
    };
    const std::vector<Leader>& candidates = leaders[key_of(piece.sequence, first)];
    const auto found = std::find_if(candidates.begin(), candidates.end(), fits);
    if (found != candidates.end()) {
      add_rows(&draft_.items[found->item], piece.sequence, piece.low, piece.high);
      continue;
    }
    draft_.items.emplace_back(piece.sequence);
    add_rows(&draft_.items.back(), piece.sequence, piece.low, piece.high);
    for (int64_t page = first; page <= last; ++page) {
      leaders[key_of(piece.sequence, page)].push_back({draft_.items.size() - 1, piece});
    }
  }
}

void Planner::sort_items() {
  std::stable_sort(draft_.items.begin(), draft_.items.end(), [&](const auto& a, const auto& b) {
    return a.cost(batch_.group()) > b.cost(batch_.group());
  });
}

// While some threads would wait for others, the longest tile is cut into cells. An item reads and
// packs its keys by itself, so a few large ones are better than many.
void Planner::split_for_threads() {
  sort_items();
  while (imbalance_permille(batch_, draft_) > kGoodBalance) {
    const auto longest = std::find_if_not(draft_.items.begin(), draft_.items.end(),
                                          [](const DraftItem& item) { return item.single_cell(); });
    if (longest == draft_.items.end()) return;
    const DraftItem whole = std::move(*longest);
    draft_.items.erase(longest);
    for (int64_t cell = whole.key_begin / kCellKeys; cell * kCellKeys < whole.key_end; ++cell) {
      DraftItem part(whole.sequence);
      for (const PlanRow& row : whole.rows) {
        const int64_t low = std::max<int64_t>(row.low, cell * kCellKeys);
        const int64_t high = std::min<int64_t>(row.high, (cell + 1) * kCellKeys);
        if (low < high) part.add_row(row.token, low, high);
      }
      if (!part.rows.empty()) draft_.items.push_back(std::move(part));
    }
    sort_items();
  }
}

// Tokens with several items get one partial slot each, consecutive in key order.
void Planner::assign_slots() {
  std::vector<std::vector<PlanRow*>> parts(draft_.tokens.size());
  for (DraftItem& item : draft_.items) {
    for (PlanRow& row : item.rows) parts[row.token].push_back(&row);
  }
  for (size_t token = 0; token < parts.size(); ++token) {
    if (parts[token].size() == 1) continue;
    std::sort(parts[token].begin(), parts[token].end(),
              [](const PlanRow* a, const PlanRow* b) { return a->low < b->low; });
    const int64_t begin = draft_.num_partials;
    for (PlanRow* row : parts[token]) row->slot = narrow(draft_.num_partials++);
    draft_.combines.push_back({narrow(token), narrow(begin), narrow(draft_.num_partials)});
  }
}

}  // namespace

std::vector<int32_t> make_plan(const BatchShape& batch, int64_t num_threads) {
  return write_plan(batch, Planner(batch, std::max<int64_t>(1, num_threads)).run());
}

}  // namespace wim
