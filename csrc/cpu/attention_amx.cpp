// GCC 12's own AVX-512 header trips these warnings at every intrinsic.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "cpu/shell_amx.h"

namespace wim::cpu {

const AttentionKernel amx_kernel = PairKernel<AmxShell>::table;

}  // namespace wim::cpu
