// paged_attention and its plan behind torch.ops.wim_ext.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace wim::ops {

using torch::stable::Tensor;

Tensor plan_attention(const Tensor& block_table, const Tensor& cu_seqlens_q,
                      const Tensor& seqused_k, int64_t num_heads, int64_t num_kv_heads,
                      int64_t page_size, bool causal, int64_t window_left, int64_t window_right,
                      int64_t num_threads);

void paged_attention(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                     const Tensor& block_table, const Tensor& cu_seqlens_q, const Tensor& seqused_k,
                     const std::optional<Tensor>& plan, const Tensor& out,
                     const std::optional<Tensor>& lse, double softmax_scale, bool causal,
                     int64_t window_left, int64_t window_right, double softcap,
                     const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks,
                     const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale);

// The names of a plan's header fields in order, separated by spaces.
std::string plan_fields();

}  // namespace wim::ops
