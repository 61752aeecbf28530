#include "plan.h"

namespace wim {

KeyRange used_keys(const BatchShape& batch, int64_t sequence) {
  const int64_t rows = batch.rows(sequence), length = batch.seqused_k[sequence];
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

}  // namespace wim
