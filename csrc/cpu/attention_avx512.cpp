// GCC 12's own AVX-512 header trips these warnings at every intrinsic.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "cpu/shell_vector.h"
#include "cpu/vec_avx512.h"

namespace wim::cpu {

const AttentionKernel avx512_kernel = VectorKernel<Avx512>::table;

}  // namespace wim::cpu
