#include "page_table.h"

#include <algorithm>
#include <limits>

namespace wim {
namespace {

constexpr int kEntryBits = 24;
constexpr std::int64_t kMaxEntries = std::int64_t{1} << kEntryBits;
constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

std::string str(std::int64_t value) { return std::to_string(value); }

[[noreturn]] void reject(const std::string& text) { throw std::invalid_argument(text); }

[[noreturn]] void reject_stale(SequenceHandle handle, const std::string& name) {
  throw StaleSequence(name + "sequence " + str(handle) +
                      " is not alive here: it was released, consumed by a commit, or belongs to "
                      "another cache");
}

// Room for `size` elements without giving up amortised growth.
template <typename T>
void make_room(std::vector<T>& vector, std::int64_t size) {
  const auto wanted = static_cast<std::size_t>(size);
  if (wanted > vector.capacity()) vector.reserve(std::max(wanted, 2 * vector.capacity()));
}

}  // namespace

CacheFull::CacheFull(std::int64_t needed, std::int64_t free, std::int64_t total, bool can_ever_fit)
    : std::runtime_error("the cache is full: " + str(needed) + " pages needed, " + str(free) +
                         " of " + str(total) + " free"),
      needed(needed),
      free(free),
      total(total),
      can_ever_fit(can_ever_fit) {}

PageTable::PageTable(std::int64_t num_pages, std::int64_t page_size) : page_size_(page_size) {
  if (num_pages < 1 || num_pages > kMaxInt32)
    reject("num_pages = " + str(num_pages) + ": must be 1.." + str(kMaxInt32));
  if (page_size < 1 || page_size > kMaxInt32)
    reject("page_size = " + str(page_size) + ": must be 1.." + str(kMaxInt32));
  refcounts_.assign(num_pages, 0);
  free_pages_.reserve(num_pages);
  // Page 0 on top of the stack: a fresh cache hands out pages in ascending order.
  for (std::int64_t page = num_pages; page-- > 0;) free_pages_.push_back(page);
}

bool PageTable::alive(SequenceHandle handle) const {
  const std::int64_t entry = handle & (kMaxEntries - 1);
  if (handle < 0 || entry >= static_cast<std::int64_t>(sequences_.size())) return false;
  const Sequence& sequence = sequences_[entry];
  return sequence.live && sequence.generation == handle >> kEntryBits;
}

const PageTable::Sequence& PageTable::at(SequenceHandle handle) const {
  if (!alive(handle)) reject_stale(handle, "");
  return sequences_[handle & (kMaxEntries - 1)];
}

PageTable::Sequence& PageTable::at(SequenceHandle handle) {
  return const_cast<Sequence&>(static_cast<const PageTable*>(this)->at(handle));
}

SequenceHandle PageTable::handle_of(const Sequence& sequence) const {
  return sequence.generation << kEntryBits | (&sequence - sequences_.data());
}

std::int64_t PageTable::length(SequenceHandle handle) const { return at(handle).length; }

const std::vector<std::int32_t>& PageTable::pages(SequenceHandle handle) const {
  return at(handle).pages;
}

std::int64_t PageTable::holders(std::int64_t page) const {
  if (page < 0 || page >= static_cast<std::int64_t>(refcounts_.size()))
    throw std::out_of_range("page = " + str(page) + ": must be 0.." + str(refcounts_.size() - 1));
  return refcounts_[page];
}

// A dead entry, ready to be filled. The last step that can fail in making a sequence.
PageTable::Sequence& PageTable::make_entry() {
  if (free_entries_.empty()) {
    if (static_cast<std::int64_t>(sequences_.size()) == kMaxEntries)
      reject("more than " + str(kMaxEntries) + " sequences at once");
    make_room(free_entries_, sequences_.size() + 1);
    sequences_.emplace_back();
    free_entries_.push_back(sequences_.size() - 1);
  }
  return sequences_[free_entries_.back()];
}

SequenceHandle PageTable::create() {
  Sequence& sequence = make_entry();
  free_entries_.pop_back();
  sequence.live = true;
  ++num_live_;
  ++epoch_;
  return newest_ = handle_of(sequence);
}

SequenceHandle PageTable::fork(SequenceHandle handle, std::optional<std::int64_t> length) {
  const Sequence& source = at(handle);
  const std::int64_t shared = length.value_or(source.length);
  if (shared < 0 || shared > source.length)
    reject("length = " + str(shared) + ": must be 0.." + str(source.length) +
           ", the length of the sequence");
  std::vector<std::int32_t> pages(source.pages.begin(), source.pages.begin() + pages_for(shared));

  Sequence& branch = make_entry();  // may move `source`
  Sequence& parent = at(handle);
  free_entries_.pop_back();
  for (const std::int32_t page : pages) shared_pages_ += ++refcounts_[page] == 2;
  branch.pages = std::move(pages);
  branch.length = branch.fork_length = shared;
  branch.parent = handle;
  branch.live = true;
  ++parent.children;
  ++num_live_;
  ++epoch_;
  return newest_ = handle_of(branch);
}

void PageTable::drop_pages(Sequence& sequence, std::int64_t keep) noexcept {
  while (static_cast<std::int64_t>(sequence.pages.size()) > keep) {
    const std::int32_t page = sequence.pages.back();
    sequence.pages.pop_back();
    const std::int32_t left = --refcounts_[page];
    if (left == 1) --shared_pages_;
    if (left == 0) free_pages_.push_back(page);
  }
}

void PageTable::shorten(Sequence& sequence, std::int64_t length) noexcept {
  ++epoch_;
  if (length < sequence.length) sequence.changed = epoch_;
  drop_pages(sequence, pages_for(length));
  sequence.length = length;
  if (length < sequence.fork_length && sequence.severed == Severed::kNo)
    sequence.severed = Severed::kBranch;
  if (sequence.children > 0) {
    const SequenceHandle handle = handle_of(sequence);
    for (Sequence& child : sequences_)
      if (child.live && child.parent == handle && child.fork_length > length)
        child.severed = Severed::kTrunk;
  }
}

void PageTable::rollback(SequenceHandle handle, std::int64_t length) {
  Sequence& sequence = at(handle);
  if (length < 0 || length > sequence.length)
    reject("length = " + str(length) + ": must be 0.." + str(sequence.length) +
           ", the length of the sequence");
  shorten(sequence, length);
}

void PageTable::retire(Sequence& sequence) noexcept {
  drop_pages(sequence, 0);
  if (alive(sequence.parent)) --at(sequence.parent).children;
  const std::int64_t generation = sequence.generation + 1;
  sequence = Sequence{};
  sequence.generation = generation;
  free_entries_.push_back(&sequence - sequences_.data());
  --num_live_;
  ++epoch_;
}

void PageTable::release(SequenceHandle handle) { retire(at(handle)); }

void PageTable::commit(SequenceHandle trunk_handle, SequenceHandle branch_handle) {
  Sequence& trunk = at(trunk_handle);
  if (!alive(branch_handle)) reject_stale(branch_handle, "branch: ");
  Sequence& branch = at(branch_handle);
  if (branch.parent != trunk_handle) reject("branch: it was not forked from this sequence");
  const std::string point = "token " + str(branch.fork_length) + ", where the branch was forked";
  if (branch.severed == Severed::kTrunk)
    reject("branch: this sequence was rolled back below " + point + ", since the fork");
  if (branch.severed == Severed::kBranch)
    reject("branch: it was itself rolled back below " + point);
  if (trunk.length != branch.fork_length)
    reject("branch: this sequence stands at " + str(trunk.length) + " tokens, not at " + point +
           ": roll it back first");
  ++epoch_;
  if (branch.length > trunk.length) trunk.changed = epoch_;
  trunk.pages.swap(branch.pages);
  trunk.length = branch.length;
  retire(branch);  // drops the pages that were the trunk's
}

// Checks every line of the request and marks its sequences as members of a new draft.
void PageTable::enlist(const std::vector<Append>& work) {
  ++draft_;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < work.size(); ++i) {
    const auto name = [i] { return "work[" + str(i) + "]: "; };
    if (!alive(work[i].sequence)) reject_stale(work[i].sequence, name());
    Sequence& sequence = at(work[i].sequence);
    if (sequence.draft == draft_) reject(name() + "the sequence is named twice in one request");
    // Lengths and row offsets are int32 for the kernels.
    const std::int64_t most = kMaxInt32 - std::max(sequence.length, total);
    if (work[i].count < 0 || work[i].count > most)
      reject(name() + "count = " + str(work[i].count) + ": must be 0.." + str(most));
    sequence.draft = draft_;
    total += work[i].count;
  }
}

// Whether another holder of the writer's last page can see a slot at or after the write position.
// `members_only` leaves out holders that are not part of the request.
bool PageTable::must_copy(const Sequence& writer, bool members_only) const {
  if (writer.length % page_size_ == 0) return false;
  const std::size_t index = writer.pages.size() - 1;
  const std::int32_t page = writer.pages[index];
  for (std::int32_t unseen = refcounts_[page] - 1, i = 0; unseen > 0; ++i) {
    const Sequence& other = sequences_[i];
    if (&other == &writer || other.pages.size() <= index || other.pages[index] != page) continue;
    --unseen;
    const bool member = other.draft == draft_;
    if (member ? other.draft_moved : members_only) continue;
    if ((member ? other.draft_length : other.length) > writer.length) return true;
  }
  return false;
}

// Goes through the request line by line, each line seeing the ones before it as done: of several
// writers into one page exactly one may stay in it, the others copy. Their number does not depend
// on the order of the lines.
PageTable::Demand PageTable::draft(const std::vector<Append>& work, bool members_only) {
  for (const Append& line : work) {
    Sequence& sequence = at(line.sequence);
    sequence.draft_length = sequence.length;
    sequence.draft_moved = false;
  }
  Demand demand;
  for (const Append& line : work) {
    if (line.count == 0) continue;
    Sequence& sequence = at(line.sequence);
    sequence.draft_moved = must_copy(sequence, members_only);
    sequence.draft_length = sequence.length + line.count;
    demand.tokens += line.count;
    demand.copies += sequence.draft_moved;
    demand.pages += pages_for(sequence.draft_length) - pages_for(sequence.length);
  }
  demand.pages += demand.copies;
  return demand;
}

std::int64_t PageTable::pages_needed(const std::vector<Append>& work) {
  enlist(work);
  return draft(work, false).pages;
}

// Whether the request would fit if every sequence that is not part of it were released.
bool PageTable::can_ever_fit(const std::vector<Append>& work) {
  std::int64_t pages = draft(work, true).pages;
  std::vector<bool> counted(refcounts_.size());
  for (const Append& line : work)
    for (const std::int32_t page : at(line.sequence).pages) {
      pages += !counted[page];
      counted[page] = true;
    }
  return pages <= static_cast<std::int64_t>(refcounts_.size());
}

Reservation PageTable::prepare(const std::vector<Append>& work) {
  enlist(work);
  const Demand demand = draft(work, false);
  const auto free = static_cast<std::int64_t>(free_pages_.size());
  if (demand.pages > free) {
    const bool later = can_ever_fit(work);
    throw CacheFull(demand.pages, free, refcounts_.size(), later);
  }
  Reservation reservation;
  reservation.work = work;
  fill(reservation, demand);
  reservation.owner = this;
  reservation.epoch = epoch_;
  return reservation;
}

// Writes the arrays of the reservation and makes room for what apply will add.
void PageTable::fill(Reservation& out, const Demand& demand) {
  out.taken.assign(free_pages_.rbegin(), free_pages_.rbegin() + demand.pages);
  out.copy_src.reserve(demand.copies);
  out.copy_dst.reserve(demand.copies);
  out.moved.reserve(out.work.size());
  for (const Append& line : out.work)
    out.max_pages = std::max(out.max_pages, pages_for(at(line.sequence).draft_length));
  out.block_table.assign(out.work.size() * out.max_pages, -1);
  out.cu_seqlens_q.assign(1, 0);
  out.slot_mapping.resize(demand.tokens);
  out.position_ids.resize(demand.tokens);

  std::int64_t token = 0;
  auto taken = out.taken.begin();
  std::int32_t* row = out.block_table.data();
  for (const Append& line : out.work) {
    Sequence& sequence = at(line.sequence);
    const std::int64_t held = sequence.pages.size(), wanted = pages_for(sequence.draft_length);
    make_room(sequence.pages, wanted);
    std::copy(sequence.pages.begin(), sequence.pages.end(), row);
    if (sequence.draft_moved) {
      out.copy_src.push_back(row[held - 1]);
      out.copy_dst.push_back(row[held - 1] = *taken++);
    }
    for (std::int64_t page = held; page < wanted; ++page) row[page] = *taken++;
    for (std::int64_t position = sequence.length; position < sequence.draft_length; ++token) {
      out.slot_mapping[token] = row[position / page_size_] * page_size_ + position % page_size_;
      out.position_ids[token] = position++;
    }
    out.moved.push_back(sequence.draft_moved);
    out.cu_seqlens_q.push_back(token);
    out.seqused_k.push_back(sequence.draft_length);
    row += out.max_pages;
  }
}

void PageTable::apply(Reservation& reservation) {
  if (reservation.owner != this || reservation.epoch != epoch_ ||
      reservation.state != Reservation::State::kPrepared)
    reject("reservation: the page table has changed since it was prepared");
  reservation.epoch = ++epoch_;
  auto taken = reservation.taken.begin();
  for (std::size_t i = 0; i < reservation.work.size(); ++i) {
    Sequence& sequence = at(reservation.work[i].sequence);
    if (reservation.work[i].count > 0) sequence.changed = epoch_;
    if (reservation.moved[i]) {
      std::int32_t& last = sequence.pages.back();
      if (--refcounts_[last] == 1) --shared_pages_;
      last = *taken++;
    }
    sequence.length = reservation.seqused_k[i];
    while (static_cast<std::int64_t>(sequence.pages.size()) < pages_for(sequence.length))
      sequence.pages.push_back(*taken++);
  }
  for (const std::int32_t page : reservation.taken) refcounts_[page] = 1;
  free_pages_.resize(free_pages_.size() - reservation.taken.size());
  high_water_pages_ = std::max(high_water_pages_, stats().used_pages);
  page_copies_ += reservation.copy_src.size();
  reservation.state = Reservation::State::kApplied;
}

void PageTable::cancel(Reservation& reservation) {
  if (reservation.owner != this || reservation.state == Reservation::State::kPrepared)
    reject("reservation: it was not applied to this page table");
  if (reservation.state == Reservation::State::kCancelled) return;
  for (std::size_t i = 0; i < reservation.work.size(); ++i) {
    const Append& line = reservation.work[i];
    if (line.count == 0 || !alive(line.sequence)) continue;
    if (at(line.sequence).changed != reservation.epoch)
      reject("work[" + str(i) + "]: the sequence was changed since this reservation left it at " +
             str(reservation.seqused_k[i]) + " tokens; it now has " + str(length(line.sequence)));
  }
  for (const Append& line : reservation.work)
    if (line.count > 0 && alive(line.sequence)) {
      Sequence& sequence = at(line.sequence);
      shorten(sequence, sequence.length - line.count);
    }
  reservation.state = Reservation::State::kCancelled;
}

PageTableStats PageTable::stats() const {
  const auto total = static_cast<std::int64_t>(refcounts_.size());
  const auto free = static_cast<std::int64_t>(free_pages_.size());
  return {total, free, total - free, shared_pages_, high_water_pages_, page_copies_, num_live_};
}

void PageTable::check_integrity() const {
  const auto require = [](bool holds, const std::string& text) {
    if (!holds) throw std::runtime_error("page table: " + text);
  };
  std::vector<std::int32_t> seen(refcounts_.size()), index_of(refcounts_.size(), -1);
  std::int64_t live = 0, held = 0, shared = 0;
  for (const Sequence& sequence : sequences_) {
    const std::string name = "sequence " + str(handle_of(sequence));
    live += sequence.live;
    require(static_cast<std::int64_t>(sequence.pages.size()) == pages_for(sequence.length),
            name + " of " + str(sequence.length) + " tokens holds " + str(sequence.pages.size()) +
                " pages");
    for (std::size_t i = 0; i < sequence.pages.size(); ++i) {
      const std::int32_t page = sequence.pages[i];
      require(seen[page]++ == 0 || index_of[page] == static_cast<std::int32_t>(i),
              "page " + str(page) + " stands at two indices");
      index_of[page] = i;
    }
  }
  for (std::size_t page = 0; page < seen.size(); ++page) {
    require(seen[page] == refcounts_[page], "page " + str(page) + " has " + str(seen[page]) +
                                                " holders but a count of " + str(refcounts_[page]));
    held += seen[page] > 0;
    shared += seen[page] > 1;
  }
  for (const std::int32_t page : free_pages_)
    require(seen[page]++ == 0, "free page " + str(page) + " is held or free twice");
  require(held + free_pages_.size() == refcounts_.size(),
          str(held) + " held and " + str(free_pages_.size()) + " free pages are not " +
              str(refcounts_.size()));
  require(shared == shared_pages_, str(shared) + " pages are shared, not " + str(shared_pages_));
  require(live == num_live_, str(live) + " sequences live, not " + str(num_live_));
}

}  // namespace wim
