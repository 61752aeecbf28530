#include "torch_attention.h"

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "plan.h"
#include "torch_ops.h"
#include "torch_ops_checks.h"

namespace wim::ops {

using namespace wim::checks;

namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxHeads = 65536;  // no model comes near; a plan's cost grows with them

void check_cu_seqlens(const BatchShape& batch, int64_t total_q) {
  const int32_t* cu = batch.cu_seqlens_q;
  if (cu[0] != 0) value_error("cu_seqlens_q must start with 0, found ", cu[0]);
  for (int64_t b = 0; b < batch.batch; ++b) {
    if (cu[b + 1] < cu[b]) {
      value_error("cu_seqlens_q must not decrease, found ", cu[b + 1], " after ", cu[b],
                  " at sequence ", b);
    }
  }
  if (total_q >= 0 && cu[batch.batch] != total_q) {
    value_error("cu_seqlens_q must end with the number of query rows (", total_q, "), found ",
                cu[batch.batch]);
  }
}

void check_lengths(const BatchShape& batch) {
  const int64_t capacity = batch.max_pages * batch.page_size;
  for (int64_t b = 0; b < batch.batch; ++b) {
    const int64_t length = batch.seqused_k[b];
    if (length < 0) value_error("seqused_k[", b, "] must not be negative, found ", length);
    if (length > capacity) {
      value_error("seqused_k[", b, "] = ", length,
                  " exceeds what block_table can hold: ", batch.max_pages, " pages of ",
                  batch.page_size, " are ", capacity, " tokens");
    }
  }
}

void check_heads(int64_t num_heads, int64_t num_kv_heads) {
  if (num_heads > kMaxHeads)
    value_error("num_heads must be at most ", kMaxHeads, ", found ", num_heads);
  if (num_heads < 1 || num_kv_heads < 1 || num_heads % num_kv_heads != 0) {
    value_error("num_heads must be a positive multiple of num_kv_heads, found ", num_heads, " and ",
                num_kv_heads);
  }
}

// -1: unlimited. Anything longer than the longest possible sequence is the same as that.
int64_t check_window(const char* name, int64_t window) {
  if (window < -1) value_error(name, " must be -1 (unlimited) or at least 0, found ", window);
  return std::min<int64_t>(window, INT32_MAX);
}

BatchShape check_batch(const Tensor& block_table, const Tensor& cu_seqlens_q,
                       const Tensor& seqused_k, int64_t total_q, int64_t num_heads,
                       int64_t num_kv_heads, int64_t page_size, bool causal, int64_t window_left,
                       int64_t window_right) {
  BatchShape batch;
  batch.seqused_k = int32_vector("seqused_k", seqused_k, {"batch"});
  batch.batch = seqused_k.size(0);
  batch.cu_seqlens_q = int32_vector("cu_seqlens_q", cu_seqlens_q, {"batch + 1", batch.batch + 1});
  on_cpu("block_table", block_table);
  has_dtype("block_table", block_table, ScalarType::Int);
  has_shape("block_table", block_table, {{"batch", batch.batch}, {"max_pages"}});
  last_dim_contiguous("block_table", block_table);
  batch.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  batch.block_table_stride = block_table.stride(0), batch.max_pages = block_table.size(1);
  check_heads(num_heads, num_kv_heads);
  if (page_size < 1 || page_size > INT32_MAX)
    value_error("page_size must be 1 to ", INT32_MAX, ", found ", page_size);
  batch.num_heads = num_heads, batch.num_kv_heads = num_kv_heads, batch.page_size = page_size;
  batch.causal = causal;
  batch.window_left = check_window("window_left", window_left);
  batch.window_right = check_window("window_right", window_right);
  check_cu_seqlens(batch, total_q);
  check_lengths(batch);
  return batch;
}

void check_page_ids(const BatchShape& batch, int64_t num_pages) {
  for (int64_t b = 0; b < batch.batch; ++b) {
    const KeyRange used = used_keys(batch, b);
    if (used.empty()) continue;
    for (int64_t page = used.low / batch.page_size; page * batch.page_size < used.high; ++page) {
      const int32_t id = batch.pages(b)[page];
      if (id < 0 || id >= num_pages) {
        index_error("block_table[", b, ", ", page, "] = ", id,
                    " is out of range: the cache has pages 0 to ", num_pages - 1);
      }
    }
  }
}

void check_plan_field(const PlanView& plan, PlanField field, const char* name, int64_t wanted) {
  const int64_t found = plan.get(field);
  if (found != wanted) {
    value_error("plan was made for another batch: its ", name, " is ", found, ", this call's is ",
                wanted);
  }
}

// A plan is trusted once its checksum and all that it was made for agree with this call.
const int32_t* check_plan(const Tensor& tensor, const BatchShape& batch) {
  const int32_t* data = int32_vector("plan", tensor, {"plan_ints"});
  const PlanView plan(data);
  const int64_t ints = tensor.size(0);
  if (ints < kPlanHeaderInts || plan.get(PlanField::magic) != kPlanMagic ||
      plan.get(PlanField::version) != kPlanVersion || plan.get(PlanField::total_ints) != ints ||
      plan.get(PlanField::checksum) != plan_checksum(data, ints)) {
    value_error("plan must be an unchanged result of plan_attention, found ", ints,
                " other integers");
  }
  check_plan_field(plan, PlanField::batch, "batch size", batch.batch);
  check_plan_field(plan, PlanField::total_q, "number of query rows", batch.total_q());
  check_plan_field(plan, PlanField::page_size, "page_size", batch.page_size);
  check_plan_field(plan, PlanField::num_heads, "num_heads", batch.num_heads);
  check_plan_field(plan, PlanField::num_kv_heads, "num_kv_heads", batch.num_kv_heads);
  check_plan_field(plan, PlanField::causal, "causal", batch.causal);
  check_plan_field(plan, PlanField::window_left, "window_left", batch.window_left);
  check_plan_field(plan, PlanField::window_right, "window_right", batch.window_right);
  for (int64_t b = 0; b < batch.batch; ++b) {
    if (plan.seqused_k()[b] != batch.seqused_k[b] ||
        plan.cu_seqlens_q()[b + 1] != batch.cu_seqlens_q[b + 1]) {
      value_error("plan was made for another batch: sequence ", b, " has other lengths");
    }
  }
  if (plan.get(PlanField::pages_hash) != static_cast<int64_t>(hash_used_pages(batch))) {
    value_error("plan was made for another batch: block_table has other pages");
  }
  return data;
}

const float* float_vector(const char* name, const Tensor& tensor, Dim dim) {
  has_dtype(name, tensor, ScalarType::Float);
  has_shape(name, tensor, {dim});
  last_dim_contiguous(name, tensor);
  return static_cast<const float*>(tensor.data_ptr());
}

HeadScale head_scale(const char* name, const std::optional<Tensor>& tensor, int64_t num_kv_heads) {
  if (!tensor) return {};
  if (tensor->numel() != 1 && tensor->numel() != num_kv_heads) {
    value_error(name, " must have 1 or num_kv_heads = ", num_kv_heads, " elements, found shape ",
                shape_text(*tensor));
  }
  has_dtype(name, *tensor, ScalarType::Float);
  if (tensor->numel() == 1) return {static_cast<const float*>(tensor->data_ptr()), 0};
  return {float_vector(name, *tensor, {"num_kv_heads", num_kv_heads}), 1};
}

void check_alibi(const Tensor& slopes, const BatchShape& batch, AttentionParams* params) {
  if (slopes.dim() == 1) {
    params->alibi_slopes = float_vector("alibi_slopes", slopes, {"num_heads", batch.num_heads});
    return;
  }
  has_dtype("alibi_slopes", slopes, ScalarType::Float);
  has_shape("alibi_slopes", slopes, {{"batch", batch.batch}, {"num_heads", batch.num_heads}});
  last_dim_contiguous("alibi_slopes", slopes);
  params->alibi_slopes = static_cast<const float*>(slopes.data_ptr());
  params->alibi_batch_stride = slopes.stride(0);
}

void check_head_dim(const char* name, int64_t dim) {
  if (dim < 8 || dim > kMaxHeadDim || dim % 8 != 0) {
    value_error(name, " must be a multiple of 8 from 8 to ", kMaxHeadDim, ", found ", dim);
  }
}

// Query, caches and out; everything that does not depend on the batch.
void check_tensors(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                   const Tensor& out, AttentionParams* params) {
  on_device("query", query);
  same_device("k_cache", k_cache, "query", query);
  same_device("v_cache", v_cache, "query", query);
  same_device("out", out, "query", query);
  params->dtype = attention_dtype("query", query);
  params->query = rows_view("query", query, {{"total_q"}, {"num_heads"}, {"head_dim"}});
  cache_views(k_cache, v_cache, query.scalar_type(), "query", &params->k_cache, &params->v_cache);
  check_head_dim("head_dim", params->k_cache.dim);
  check_head_dim("v_head_dim", params->v_cache.dim);
  const int64_t rows = params->query.rows, heads = params->query.heads;
  has_shape("query", query, {{"total_q"}, {"num_heads"}, {"head_dim", params->k_cache.dim}});
  has_dtype("out", out, query.scalar_type(), " (as query)");
  params->out = rows_view(
      "out", out, {{"total_q", rows}, {"num_heads", heads}, {"v_head_dim", params->v_cache.dim}});
  writable("out", out);
}

void check_lse(const Tensor& lse, const Tensor& query, AttentionParams* params) {
  same_device("lse", lse, "query", query);
  has_dtype("lse", lse, ScalarType::Float);
  has_shape("lse", lse, {{"num_heads", params->query.heads}, {"total_q", params->query.rows}});
  last_dim_contiguous("lse", lse);
  writable("lse", lse);
  params->lse = static_cast<float*>(lse.data_ptr()), params->lse_stride = lse.stride(0);
}

using Named = std::pair<const char*, const Tensor*>;  // null: not given

const Tensor* given(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

// The kernels read tables, plan and options while they write.
void check_apart(const char* name, const Tensor& written, std::initializer_list<Named> read) {
  for (const auto& [read_name, tensor] : read) {
    if (tensor != nullptr) apart(name, written, read_name, *tensor);
  }
}

// The kernels take them as float32: what overflows there is not finite, and a softcap that vanishes
// would be none.
void check_scalars(double softmax_scale, double softcap) {
  using Limits = std::numeric_limits<float>;
  if (!(std::abs(softmax_scale) <= Limits::max()))
    value_error("softmax_scale must be a finite float32, found ", softmax_scale);
  if (softcap != 0 && !(softcap >= Limits::min() && softcap <= Limits::max())) {
    value_error("softcap must be 0 (none) or ", Limits::min(), " to ", Limits::max(), ", found ",
                softcap);
  }
}

}  // namespace

Tensor plan_attention(const Tensor& block_table, const Tensor& cu_seqlens_q,
                      const Tensor& seqused_k, int64_t num_heads, int64_t num_kv_heads,
                      int64_t page_size, bool causal, int64_t window_left, int64_t window_right,
                      int64_t num_threads) {
  if (num_threads < 1 || num_threads > 4096)
    value_error("num_threads must be 1 to 4096, found ", num_threads);
  const BatchShape batch = check_batch(block_table, cu_seqlens_q, seqused_k, -1, num_heads,
                                       num_kv_heads, page_size, causal, window_left, window_right);
  const std::vector<int32_t> plan = make_plan(batch, num_threads);
  const int64_t size = static_cast<int64_t>(plan.size());
  Tensor result = torch::stable::empty({size}, ScalarType::Int);
  std::memcpy(result.data_ptr(), plan.data(), plan.size() * sizeof(int32_t));
  return result;
}

void paged_attention(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                     const Tensor& block_table, const Tensor& cu_seqlens_q, const Tensor& seqused_k,
                     const std::optional<Tensor>& plan, const Tensor& out,
                     const std::optional<Tensor>& lse, double softmax_scale, bool causal,
                     int64_t window_left, int64_t window_right, double softcap,
                     const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks,
                     const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  AttentionParams params;
  check_tensors(query, k_cache, v_cache, out, &params);
  check_scalars(softmax_scale, softcap);
  const BatchShape batch = check_batch(block_table, cu_seqlens_q, seqused_k, params.query.rows,
                                       params.query.heads, params.k_cache.heads,
                                       params.k_cache.page_size, causal, window_left, window_right);
  check_page_ids(batch, params.k_cache.num_pages);
  params.block_table = batch.block_table, params.block_table_stride = batch.block_table_stride;
  params.softmax_scale = static_cast<float>(softmax_scale),
  params.softcap = static_cast<float>(softcap);
  if (lse) check_lse(*lse, query, &params);
  for (const auto& [name, tensor] : {Named{"alibi_slopes", given(alibi_slopes)},
                                     {"sinks", given(sinks)},
                                     {"k_scale", given(k_scale)},
                                     {"v_scale", given(v_scale)}}) {
    if (tensor != nullptr) same_device(name, *tensor, "query", query);
  }
  if (alibi_slopes) check_alibi(*alibi_slopes, batch, &params);
  if (sinks) params.sinks = float_vector("sinks", *sinks, {"num_heads", batch.num_heads});
  params.k_scale = head_scale("k_scale", k_scale, batch.num_kv_heads);
  params.v_scale = head_scale("v_scale", v_scale, batch.num_kv_heads);
  for (const auto& [name, tensor] : {Named{"out", &out}, {"lse", given(lse)}}) {
    if (tensor == nullptr) continue;
    check_apart(name, *tensor,
                {{"query", &query},
                 {"k_cache", &k_cache},
                 {"v_cache", &v_cache},
                 {"block_table", &block_table},
                 {"cu_seqlens_q", &cu_seqlens_q},
                 {"seqused_k", &seqused_k},
                 {"plan", given(plan)},
                 {"alibi_slopes", given(alibi_slopes)},
                 {"sinks", given(sinks)},
                 {"k_scale", given(k_scale)},
                 {"v_scale", given(v_scale)}});
  }
  if (lse) apart("lse", *lse, "out", out);
  const backend::Context resources = context(query);
  std::vector<int32_t> own_plan;
  if (!plan) own_plan = make_plan(batch, resources.num_threads);
  params.plan = plan ? check_plan(*plan, batch) : own_plan.data();
  backend::paged_attention(params, resources);
}

std::string plan_fields() {
#define WIM_NAME(name) #name " "
  return WIM_PLAN_FIELDS(WIM_NAME);
#undef WIM_NAME
}

}  // namespace wim::ops
