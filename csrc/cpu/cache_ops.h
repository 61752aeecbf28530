// The small ops: writing new tokens into pages, copying pages, merging two partial attention
// states.
#pragma once

#include <vector>

#include "attention_params.h"
#include "cpu/parallel.h"

namespace wim::cpu {

void append_kv(const AppendKvParams& params, const Context& context);

// Copies page src[i] to page dst[i] in every cache. No page is both a source and a destination.
void copy_pages(const std::vector<PageShape>& caches, const int64_t* src, const int64_t* dst,
                int64_t count, const Context& context);

// out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b); an empty state (lse = -inf) leaves
// the other untouched.
void merge_states(const MergeStatesParams& params, const Context& context);

}  // namespace wim::cpu
