#include "cpu/shell_vector.h"
#include "cpu/vec_portable.h"

namespace wim::cpu {

const AttentionKernel portable_kernel = VectorKernel<Portable>::table;

}  // namespace wim::cpu
