// The two products of a column of 16 query rows with a block of 64 keys. An output element is one
// chain of tdpbf16ps in the order of the inner index.
#pragma once

#include "cpu/amx_tiles.h"
#include "cpu/tile_operands.h"

namespace wim::cpu {

constexpr int64_t kTileBytes = 64;          // of a row: 16 pairs or 16 floats
constexpr int64_t kTileElements = 16 * 32;  // bfloat16

// scores [64 keys][16] = K Q^T; keys: 4 tiles [16 keys][depth]; query [depth / 2][16] pairs.
WIM_INLINE void score_block(const TileSource* keys, const BFloat16* query, int64_t depth,
                            float* scores) {
  tiles::zero<0>(), tiles::zero<1>(), tiles::zero<2>(), tiles::zero<3>();
  for (int64_t k = 0; k < depth; k += 32) {
    tiles::load<4>(query + k * 16, kTileBytes);
    tiles::load<5>(keys[0].data + k, keys[0].stride * 2);
    tiles::multiply_add<0, 5, 4>();
    tiles::load<6>(keys[1].data + k, keys[1].stride * 2);
    tiles::multiply_add<1, 6, 4>();
    tiles::load<7>(keys[2].data + k, keys[2].stride * 2);
    tiles::multiply_add<2, 7, 4>();
    tiles::load<5>(keys[3].data + k, keys[3].stride * 2);
    tiles::multiply_add<3, 5, 4>();
  }
  tiles::store<0>(scores, kTileBytes);
  tiles::store<1>(scores + 256, kTileBytes);
  tiles::store<2>(scores + 512, kTileBytes);
  tiles::store<3>(scores + 768, kTileBytes);
}

template <int kTile>
WIM_INLINE void output_tile(const TileSource& values, int64_t d) {
  constexpr int kLeft = 5 + kTile % 3;
  tiles::load<kLeft>(values.data + (d + 16 * kTile) * values.stride, values.stride * 2);
  tiles::multiply_add<kTile, kLeft, 4>();
}

// Dimensions [d, d + 16 * kTiles) of output_block.
template <int kTiles>
WIM_INLINE void output_tiles(const TileSource* values, const BFloat16* weights, int64_t d,
                             bool fresh, float* out) {
  out += d * 16;
  if (fresh) {
    tiles::zero<0>();
    if constexpr (kTiles > 1) tiles::zero<1>();
    if constexpr (kTiles > 2) tiles::zero<2>();
    if constexpr (kTiles > 3) tiles::zero<3>();
  } else {
    tiles::load<0>(out, kTileBytes);
    if constexpr (kTiles > 1) tiles::load<1>(out + 256, kTileBytes);
    if constexpr (kTiles > 2) tiles::load<2>(out + 512, kTileBytes);
    if constexpr (kTiles > 3) tiles::load<3>(out + 768, kTileBytes);
  }
  for (int64_t g = 0; g < kBlockGroups; ++g) {
    tiles::load<4>(weights + g * kTileElements, kTileBytes);
    output_tile<0>(values[g], d);
    if constexpr (kTiles > 1) output_tile<1>(values[g], d);
    if constexpr (kTiles > 2) output_tile<2>(values[g], d);
    if constexpr (kTiles > 3) output_tile<3>(values[g], d);
  }
  tiles::store<0>(out, kTileBytes);
  if constexpr (kTiles > 1) tiles::store<1>(out + 256, kTileBytes);
  if constexpr (kTiles > 2) tiles::store<2>(out + 512, kTileBytes);
  if constexpr (kTiles > 3) tiles::store<3>(out + 768, kTileBytes);
}

// out [v_dim][16] += V^T P^T, or = if it is `fresh`; values: 2 groups [v_dim][32 keys]; weights
// [32][16] pairs.
WIM_INLINE void output_block(const TileSource* values, const BFloat16* weights, int64_t v_dim,
                             bool fresh, float* out) {
  int64_t d = 0;
  for (; d + 64 <= v_dim; d += 64) output_tiles<4>(values, weights, d, fresh, out);
  if (v_dim - d == 48) output_tiles<3>(values, weights, d, fresh, out);
  if (v_dim - d == 32) output_tiles<2>(values, weights, d, fresh, out);
  if (v_dim - d == 16) output_tiles<1>(values, weights, d, fresh, out);
}

}  // namespace wim::cpu
