// The CUDA kernels as torch_ops*.cpp calls them. They take the structs of attention_params.h whose
// tensors are on the device; what the CPU kernels read as host integers (slots, page ids, block
// table, plan) is host memory here too and is uploaded by the launcher.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "attention_params.h"

struct CUstream_st;

namespace wim::cuda {

// What a launcher needs, handed in by torch_cuda.cpp so that nothing here includes torch. The
// device is already the current one.
struct Context {
  CUstream_st* stream = nullptr;
  int num_threads = 1;  // thread blocks that a plan should keep busy
  // Device memory for the work that this call enqueues.
  std::function<void*(int64_t bytes)> scratch;
  // A device copy, ordered in the stream, of host memory that may go when the call returns.
  std::function<const void*(const void* host, int64_t bytes)> upload;
};

void append_kv(const AppendKvParams& params, const Context& context);

// Copies page src[i] to page dst[i] in every cache. No page is both a source and a destination.
void copy_pages(const std::vector<PageShape>& caches, const int64_t* src, const int64_t* dst,
                int64_t count, const Context& context);

// See cpu/cache_ops.h; `out` and `lse` may be those of a or b.
void merge_states(const MergeStatesParams& params, const Context& context);

void paged_attention(const AttentionParams& params, const Context& context);

// Thread blocks that keep the current device busy.
int busy_blocks();

}  // namespace wim::cuda
