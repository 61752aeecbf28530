// Products by AMX tiles. An output element is one chain of tdpbf16ps along the inner index, the
// same for whatever rows share its tile.
#pragma once

#include <cstring>

#include "cpu/amx_tiles.h"
#include "cpu/shell_pairs.h"

namespace wim::cpu {

struct AmxShell : PairLayout<32> {
  static constexpr int64_t kTile = 2 * tiles::kRows;
  // Whole cells: their state is folded without a detour, and a row's softmax runs long.
  static constexpr int64_t kStrip = 512;

  // Queries that do not follow each other are brought together here.
  WIM_INLINE static int64_t product_bytes(int64_t depth, int64_t) {
    return kHeader + kTile * depth * static_cast<int64_t>(sizeof(BFloat16));
  }

  // Owns the thread's tiles for one work item.
  class Session {
   public:
    WIM_INLINE explicit Session(char* products) { std::memset(products, 0, kHeader); }
    WIM_INLINE ~Session() { tiles::release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  static void score(const BFloat16* const* query, int64_t count, const BFloat16* keys,
                    int64_t depth, int64_t begin, int64_t end, float* scores, char* products) {
    const Left left{gather(query, count, depth, products), depth};
    set_rows(count, products);
    for (int64_t b = begin; b < end; ++b) {
      product(left, count, {keys + b * kBlockKeys * depth, kBlockKeys}, depth, kBlockKeys,
              {scores + b * kBlockKeys, kStrip});
    }
  }

  static void output(const BFloat16* const* weights, int64_t count, const BFloat16* values,
                     int64_t v_dim, int64_t begin, int64_t end, float* sums, char* products) {
    set_rows(count, products);
    product({weights[0] + begin, 2 * kStrip}, count, {values + begin * v_dim, v_dim}, end - begin,
            v_dim, {sums, v_dim});
  }

 private:
  static constexpr int64_t kHeader = 64;  // holds the number of rows that the tiles are set to

  struct Left {  // [rows][inner]
    const BFloat16* data;
    int64_t stride;
  };
  struct Right {  // [inner / 2][columns] pairs
    const BFloat16* data;
    int64_t stride;
  };
  struct Result {
    float* data;
    int64_t stride;
  };

  static const BFloat16* gather(const BFloat16* const* rows, int64_t count, int64_t depth,
                                char* products) {
    bool consecutive = true;
    for (int64_t m = 1; m < count; ++m) consecutive &= rows[m] == rows[0] + m * depth;
    if (consecutive) return rows[0];
    const auto together = reinterpret_cast<BFloat16*>(products + kHeader);
    for (int64_t m = 0; m < count; ++m)
      std::memcpy(together + m * depth, rows[m], depth * sizeof(BFloat16));
    return together;
  }

  // Tiles: 0 to 3 results, 4 and 5 left operands, 6 and 7 right ones. The odd left one and its
  // results have the rows from 16 on.
  static void set_rows(int64_t count, char* products) {
    int64_t* const current = reinterpret_cast<int64_t*>(products);
    if (*current == count) return;
    *current = count;
    const int64_t second = count > tiles::kRows ? count - tiles::kRows : 0;
    const int64_t first = count - second;
    const int64_t rows[8] = {first, first, second, second, first, second, 16, 16};
    tiles::Config config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = static_cast<uint8_t>(rows[i]);
      config.row_bytes[i] = rows[i] == 0 ? 0 : 64;
    }
    tiles::configure(config);
  }

  // Two tiles of rows (or one) by two of columns (or one), over `inner` elements.
  template <bool kTwoRows, bool kTwoColumns>
  WIM_INLINE static void block(const Left& a, const Right& b, int64_t inner, const Result& c) {
    const int64_t a_bytes = a.stride * 2, b_bytes = b.stride * 4, c_bytes = c.stride * 4;
    tiles::zero<0>();
    if constexpr (kTwoColumns) tiles::zero<1>();
    if constexpr (kTwoRows) tiles::zero<2>();
    if constexpr (kTwoRows && kTwoColumns) tiles::zero<3>();
    for (int64_t k = 0; k < inner; k += 32) {
      const BFloat16* right = b.data + k * b.stride;
      tiles::load<6>(right, b_bytes);
      tiles::load<4>(a.data + k, a_bytes);
      tiles::multiply_add<0, 4, 6>();
      if constexpr (kTwoRows) {
        tiles::load<5>(a.data + tiles::kRows * a.stride + k, a_bytes);
        tiles::multiply_add<2, 5, 6>();
      }
      if constexpr (kTwoColumns) {
        tiles::load<7>(right + 2 * tiles::kLanes, b_bytes);
        tiles::multiply_add<1, 4, 7>();
        if constexpr (kTwoRows) tiles::multiply_add<3, 5, 7>();
      }
    }
    tiles::store<0>(c.data, c_bytes);
    if constexpr (kTwoColumns) tiles::store<1>(c.data + tiles::kLanes, c_bytes);
    float* const second = c.data + tiles::kRows * c.stride;
    if constexpr (kTwoRows) tiles::store<2>(second, c_bytes);
    if constexpr (kTwoRows && kTwoColumns) tiles::store<3>(second + tiles::kLanes, c_bytes);
  }

  template <bool kTwoRows>
  WIM_INLINE static void columns(const Left& a, const Right& b, int64_t inner, int64_t width,
                                 const Result& c) {
    int64_t n = 0;
    for (; n + 2 * tiles::kLanes <= width; n += 2 * tiles::kLanes) {
      block<kTwoRows, true>(a, {b.data + 2 * n, b.stride}, inner, {c.data + n, c.stride});
    }
    if (n < width)
      block<kTwoRows, false>(a, {b.data + 2 * n, b.stride}, inner, {c.data + n, c.stride});
  }

  static void product(const Left& a, int64_t count, const Right& b, int64_t inner, int64_t width,
                      const Result& c) {
    if (count > tiles::kRows) {
      columns<true>(a, b, inner, width, c);
    } else {
      columns<false>(a, b, inner, width, c);
    }
  }
};

}  // namespace wim::cpu
