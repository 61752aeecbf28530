// GCC 12's own AVX-512 header trips these warnings at every intrinsic.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "cpu/shell_pairs.h"

namespace wim::cpu {

const AttentionKernel avx512_bf16_kernel =
    PairKernel<scratch_bytes<PairShell>, run_item<PairShell>>::table;

}  // namespace wim::cpu
