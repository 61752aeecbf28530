// One attention call as the kernels see it: parameters, the plan's arrays, memory for partial
// states.
#pragma once

#include "attention_params.h"
#include "plan_layout.h"

namespace wim::cpu {

struct AttentionWork {
  AttentionParams params;
  const PlanToken* tokens = nullptr;
  const PlanItem* items = nullptr;
  const PlanRow* rows = nullptr;
  const PlanCombine* combines = nullptr;
  int64_t group = 1;          // query heads per KV head
  int64_t max_item_rows = 0;  // tokens in the largest item
  float* partials =
      nullptr;  // [num_partials, num_heads, partial_stride]: maximum, sum, 14 unused, output
  int64_t partial_stride = 0;
};
constexpr int64_t kPartialHeader = 16;

// One instruction set. `scratch` has scratch_bytes(work) bytes, aligned to 64, for one thread.
struct AttentionKernel {
  int64_t (*scratch_bytes)(const AttentionWork& work);
  void (*run_item)(const AttentionWork& work, int64_t item, int64_t kv_head, char* scratch);
  void (*run_combine)(const AttentionWork& work, int64_t combine, char* scratch);
};

extern const AttentionKernel portable_kernel, avx2_kernel, avx512_kernel, avx512_bf16_kernel,
    amx_kernel;

}  // namespace wim::cpu
