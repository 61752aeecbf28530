// Which page of the pool holds which tokens of which sequence. Integers only: no tensors here.
//
// A sequence of `length` tokens holds exactly ceil(length / page_size) pages. Forks share pages; a
// page stands at the same index in every sequence that holds it. A writer may go on in a shared
// page as long as no other holder's length reaches beyond the write position; otherwise it gets a
// copy of that one page. So a fork costs no copy, and a branch copies at most one page.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace wim {

// Table entry in the low bits, that entry's generation above them: never 0, and a released handle
// never comes back to life when its entry is reused.
using SequenceHandle = std::int64_t;

class StaleSequence : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class CacheFull : public std::runtime_error {
 public:
  CacheFull(std::int64_t needed, std::int64_t free, std::int64_t total, bool can_ever_fit);

  const std::int64_t needed, free, total;  // pages
  const bool can_ever_fit;                 // if every sequence outside the request were released
};

// One line of a request: room for `count` more tokens at the end of `sequence`.
struct Append {
  SequenceHandle sequence;
  std::int64_t count;
};

// What a step needs to know, made by PageTable::prepare and made true by PageTable::apply.
struct Reservation {
  std::vector<Append> work;
  std::vector<std::int64_t> copy_src,
      copy_dst;                            // [copies] pages to copy before anything is written
  std::vector<std::int64_t> slot_mapping;  // [tokens] page * page_size + offset
  std::vector<std::int64_t> position_ids;  // [tokens] index of the token in its sequence
  std::vector<std::int32_t> block_table;   // [batch, max_pages], -1 behind the last page
  std::vector<std::int32_t> cu_seqlens_q;  // [batch + 1]
  std::vector<std::int32_t> seqused_k;     // [batch] length after the step
  std::int64_t max_pages = 0;

  enum class State { kPrepared, kApplied, kCancelled };
  State state = State::kPrepared;

 private:
  friend class PageTable;
  const void* owner = nullptr;
  std::uint64_t epoch = 0;          // of the table when prepared; once applied, after that
  std::vector<std::int32_t> taken;  // new page ids in the order of the work
  std::vector<bool> moved;          // [batch] whether the first taken page replaces the last one
};

struct PageTableStats {
  std::int64_t num_pages, free_pages, used_pages;
  std::int64_t shared_pages;      // pages with more than one holder
  std::int64_t high_water_pages;  // most pages ever used at once
  std::int64_t page_copies;       // copies asked for so far
  std::int64_t sequences;
};

// Not thread-safe: the owner holds a lock. Every operation that can fail checks and allocates
// first, so an exception of any kind leaves the table as it was.
class PageTable {
 public:
  PageTable(std::int64_t num_pages, std::int64_t page_size);

  SequenceHandle create();
  // The new sequence shares the first `length` tokens (default: all of them).
  SequenceHandle fork(SequenceHandle sequence, std::optional<std::int64_t> length);
  void rollback(SequenceHandle sequence, std::int64_t length);
  void release(SequenceHandle sequence);
  // `trunk` takes over the tokens of `branch`, whose handle dies.
  void commit(SequenceHandle trunk, SequenceHandle branch);

  // Pages that prepare(work) would take from the free ones, copies included.
  std::int64_t pages_needed(const std::vector<Append>& work);
  // Throws CacheFull. Changes nothing that a caller can see.
  Reservation prepare(const std::vector<Append>& work);
  // Cannot fail for a reservation that is the table's latest word.
  void apply(Reservation& reservation);
  // Takes an applied reservation back; sequences released since are skipped. Refused if one of the
  // others was changed since, even if it is as long again: its tokens are no longer the same ones.
  void cancel(Reservation& reservation);

  bool alive(SequenceHandle sequence) const;
  std::int64_t length(SequenceHandle sequence) const;
  const std::vector<std::int32_t>& pages(SequenceHandle sequence) const;
  // Number of sequences that hold the page.
  std::int64_t holders(std::int64_t page) const;
  // The handle made last, so that a caller interrupted while making it can find it.
  SequenceHandle newest() const { return newest_; }
  std::int64_t page_size() const { return page_size_; }
  PageTableStats stats() const;
  // Throws std::runtime_error that says what is wrong.
  void check_integrity() const;

 private:
  enum class Severed { kNo, kTrunk, kBranch };

  struct Sequence {
    bool live = false;
    std::int64_t generation = 1;
    std::int64_t length = 0;
    std::vector<std::int32_t> pages;
    std::uint64_t changed = 0;  // the table's epoch when tokens were last added or dropped

    SequenceHandle parent = 0;  // 0: not a fork
    std::int64_t fork_length = 0;
    Severed severed = Severed::kNo;  // who was rolled back below fork_length since the fork
    std::int64_t children = 0;       // live forks of this sequence

    // Scratch of prepare, valid while `draft` equals the table's draft_.
    std::uint64_t draft = 0;
    std::int64_t draft_length = 0;
    bool draft_moved = false;
  };

  struct Demand {
    std::int64_t tokens = 0, pages = 0, copies = 0;
  };

  std::int64_t pages_for(std::int64_t tokens) const {
    return (tokens + page_size_ - 1) / page_size_;
  }
  const Sequence& at(SequenceHandle handle) const;
  Sequence& at(SequenceHandle handle);
  SequenceHandle handle_of(const Sequence& sequence) const;
  Sequence& make_entry();
  void drop_pages(Sequence& sequence, std::int64_t keep) noexcept;
  void shorten(Sequence& sequence, std::int64_t length) noexcept;
  void retire(Sequence& sequence) noexcept;

  void enlist(const std::vector<Append>& work);
  Demand draft(const std::vector<Append>& work, bool members_only);
  bool must_copy(const Sequence& writer, bool members_only) const;
  bool can_ever_fit(const std::vector<Append>& work);
  void fill(Reservation& reservation, const Demand& demand);

  std::int64_t page_size_;
  std::vector<std::int32_t> refcounts_;     // [num_pages]
  std::vector<std::int32_t> free_pages_;    // a stack; never grows beyond its first capacity
  std::vector<Sequence> sequences_;         // entries, live and dead
  std::vector<std::int32_t> free_entries_;  // capacity always covers sequences_
  std::int64_t shared_pages_ = 0, high_water_pages_ = 0, page_copies_ = 0, num_live_ = 0;
  SequenceHandle newest_ = 0;
  std::uint64_t epoch_ = 0, draft_ = 0;
};

}  // namespace wim
