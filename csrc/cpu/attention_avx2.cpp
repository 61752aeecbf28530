#include "cpu/attention_kernel.h"
#include "cpu/vec_avx2.h"

namespace wim::cpu {

const AttentionKernel avx2_kernel{KernelTable<Avx2>::scratch_bytes, KernelTable<Avx2>::run_item,
                                  KernelTable<Avx2>::run_combine};

}  // namespace wim::cpu
