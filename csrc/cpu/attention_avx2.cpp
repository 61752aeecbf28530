#include "cpu/shell_vector.h"
#include "cpu/vec_avx2.h"

namespace wim::cpu {

const AttentionKernel avx2_kernel = VectorKernel<Avx2>::table;

}  // namespace wim::cpu
