// GCC 12's own AVX-512 header trips these warnings at every intrinsic.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "cpu/tile_kernel.h"

namespace wim::cpu {

const AttentionKernel amx_kernel = PairKernel<tile_scratch_bytes, run_tile_item>::table;

}  // namespace wim::cpu
