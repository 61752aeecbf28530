#include "cpu/attention_kernel.h"
#include "cpu/vec_portable.h"

namespace wim::cpu {

const AttentionKernel portable_kernel{KernelTable<Portable>::scratch_bytes,
                                      KernelTable<Portable>::run_item,
                                      KernelTable<Portable>::run_combine};

}  // namespace wim::cpu
