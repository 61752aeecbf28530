// GCC 12's own AVX-512 header trips these warnings at every intrinsic.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "cpu/attention_kernel.h"
#include "cpu/vec_avx512.h"

namespace wim::cpu {

const AttentionKernel avx512_kernel{KernelTable<Avx512>::scratch_bytes,
                                    KernelTable<Avx512>::run_item,
                                    KernelTable<Avx512>::run_combine};

}  // namespace wim::cpu
