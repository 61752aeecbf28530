// Plain descriptions of what an op works on. Filled by torch_ops.cpp and torch_attention.cpp after
// every check has passed; read by the kernels. All strides and offsets count elements, never bytes,
// and are 64-bit: a cache may be larger than 2^31 elements.
#pragma once

#include <cstdint>

namespace wim {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16 };

inline int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// [rows, heads, dim], last dimension contiguous.
struct RowsView {
  void* data = nullptr;
  int64_t rows = 0, heads = 0, dim = 0;
  int64_t row_stride = 0, head_stride = 0;
};

// [num_pages, page_size, num_kv_heads, dim]; dim_stride is 1, or (V only) slot_stride is 1.
struct CacheView {
  void* data = nullptr;
  int64_t num_pages = 0, page_size = 0, heads = 0, dim = 0;
  int64_t page_stride = 0, slot_stride = 0, head_stride = 0, dim_stride = 1;
};

struct AppendKvParams {
  DType dtype = DType::kFloat32;
  RowsView key, value;             // [num_tokens, num_kv_heads, head_dim | v_head_dim]
  CacheView k_cache, v_cache;      // same num_pages, page_size and heads
  const int64_t* slots = nullptr;  // [num_tokens]: page * page_size + offset, or -1 to skip
};

// One page of one cache, its dimensions sorted so that the last is the innermost in memory.
struct PageShape {
  static constexpr int kMaxDims = 6;
  void* data = nullptr;
  int64_t element_bytes = 0;
  int64_t page_stride = 0;
  int dims = 0;
  int64_t sizes[kMaxDims] = {}, strides[kMaxDims] = {};
};

struct MergeStatesParams {
  DType dtype = DType::kFloat32;
  RowsView out_a, out_b, out;    // [tokens, heads, dim]
  const float* lse_a = nullptr;  // [heads, tokens], natural logarithm
  const float* lse_b = nullptr;
  float* lse = nullptr;
  int64_t lse_a_stride = 0, lse_b_stride = 0,
          lse_stride = 0;  // between heads; tokens are contiguous
};

// A float32 vector with one element for all KV heads (stride 0) or one for each (stride 1); null
// means 1.
struct HeadScale {
  const float* data = nullptr;
  int64_t stride = 0;
};

struct AttentionParams {
  DType dtype = DType::kFloat32;
  RowsView query;  // [total_q, num_heads, head_dim]
  RowsView out;    // [total_q, num_heads, v_head_dim]
  CacheView k_cache, v_cache;
  const int32_t* block_table =
      nullptr;  // [batch, max_pages]; entries past a sequence's last page are never read
  int64_t block_table_stride = 0;
  float* lse = nullptr;  // [num_heads, total_q] or null
  int64_t lse_stride = 0;
  float softmax_scale = 1.0f;
  float softcap = 0.0f;                 // 0: none
  const float* alibi_slopes = nullptr;  // [num_heads] (stride 0) or [batch, num_heads]
  int64_t alibi_batch_stride = 0;
  const float* sinks = nullptr;  // [num_heads] or null
  HeadScale k_scale, v_scale;
  const int32_t* plan = nullptr;  // see plan_layout.h
};

}  // namespace wim
