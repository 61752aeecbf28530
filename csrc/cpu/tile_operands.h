// K and V as left operands of tile products: from where they lie in the pages, or from a copy.
#pragma once

#include <cstring>

#include "cpu/pack.h"
#include "cpu/shell_pairs.h"

namespace wim::cpu {

// Rows of 32 elements, `stride` elements apart.
struct TileSource {
  const BFloat16* data;
  int64_t stride;
};

constexpr int64_t kTileKeys = 16;   // keys of one tile of K
constexpr int64_t kGroupKeys = 32;  // keys of one tile of V
constexpr int64_t kBlockTiles = kBlockKeys / kTileKeys, kBlockGroups = kBlockKeys / kGroupKeys;
using TileLayout = PairLayout<32>;

// [16 keys][depth]. A tile needs whole rows of the product's inner length, and one page.
WIM_INLINE bool keys_lie_ready(const CacheView& cache, int64_t depth) {
  return cache.dim == depth && cache.page_size % kTileKeys == 0;
}
// Whether a group of keys follow each other in memory, for each dimension: [dim][32 keys].
WIM_INLINE bool groups_lie_in_rows(const CacheView& cache) {
  return cache.dim_stride != 1 && cache.page_size % kGroupKeys == 0;
}

// to [16 keys][depth]; zeros for keys without a slot and from dim up to depth.
inline void copy_keys(const BFloat16* const* slot, int64_t dim, int64_t depth, BFloat16* to) {
  for (int64_t i = 0; i < kTileKeys; ++i) {
    const int64_t given = slot[i] != nullptr ? dim : 0;
    if (given > 0) std::memcpy(to + i * depth, slot[i], given * sizeof(BFloat16));
    std::memset(to + i * depth + given, 0, (depth - given) * sizeof(BFloat16));
  }
}

// to [v_dim][32 keys]; zeros for keys without a slot and from dim up to v_dim. Tells whether all
// values are finite.
inline bool copy_values(const CacheView& cache, const BFloat16* const* slot, int64_t v_dim,
                        BFloat16* to) {
  using V = TileLayout::V;
  __mmask32 infinite = 0;
  const auto put = [&](int64_t d, __m512i keys) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    infinite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(keys, exponent), exponent);
    _mm512_store_si512(to + d * kGroupKeys, keys);
  };
  if (groups_lie_in_rows(cache) && slot[0] != nullptr && slot[kGroupKeys - 1] != nullptr) {
    for (int64_t d = 0; d < v_dim; ++d)
      put(d, d < cache.dim ? _mm512_loadu_si512(slot[0] + d * cache.dim_stride)
                           : _mm512_setzero_si512());
    return infinite == 0;
  }
  for (int64_t d = 0; d < v_dim; d += V::kLanes) {
    V::F pairs[V::kLanes];  // of neighbouring keys, then of one dimension each
    for (int64_t i = 0; i < V::kLanes; ++i) {
      const __m512i even = _mm512_cvtepu16_epi32(TileLayout::load_values(cache, slot[2 * i], d));
      const __m512i odd = _mm512_cvtepu16_epi32(TileLayout::load_values(cache, slot[2 * i + 1], d));
      pairs[i] = _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
    V::transpose(pairs);
    for (int64_t i = 0; i < V::kLanes; ++i) put(d + i, _mm512_castps_si512(pairs[i]));
  }
  return infinite == 0;
}

// from and to [v_dim][32 keys]: what lies outside keys [low, high) becomes 0.
inline void hide_values(const BFloat16* from, int64_t v_dim, int64_t low, int64_t high,
                        BFloat16* to) {
  for (int64_t i = 0; i < v_dim * kGroupKeys; ++i) {
    const int64_t key = i % kGroupKeys;
    to[i] = key >= low && key < high ? from[i] : BFloat16{0};
  }
}

}  // namespace wim::cpu
