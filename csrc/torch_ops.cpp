#include "torch_ops.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "torch_attention.h"
#include "torch_ops_checks.h"

namespace wim::ops {

using namespace wim::checks;

namespace {

// -1 skips a token; all slots are checked before the first one is written.
void check_slots(const int64_t* slots, int64_t count, int64_t num_slots) {
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < -1 || slots[i] >= num_slots) {
      index_error("slot_mapping[", i, "] = ", slots[i],
                  " is out of range: allowed are -1 (skip) and 0 to ", num_slots - 1,
                  " (num_pages * page_size - 1)");
    }
  }
}

void check_page_ids(const char* name, const int64_t* pages, int64_t count, int64_t num_pages,
                    size_t cache) {
  for (int64_t i = 0; i < count; ++i) {
    if (pages[i] < 0 || pages[i] >= num_pages) {
      index_error(name, "[", i, "] = ", pages[i], " is out of range: caches[", cache,
                  "] has pages 0 to ", num_pages - 1);
    }
  }
}

// The result may not depend on the order in which pages are copied.
void check_copies_independent(const int64_t* src, const int64_t* dst, int64_t count) {
  const std::unordered_set<int64_t> sources(src, src + count);
  std::unordered_set<int64_t> targets;
  for (int64_t i = 0; i < count; ++i) {
    if (!targets.insert(dst[i]).second)
      value_error("dst must not repeat a page, found ", dst[i], " twice");
    if (sources.count(dst[i]) != 0)
      value_error("dst must not contain a page of src, found ", dst[i], " in both");
  }
}

PageShape page_shape(const Tensor& cache, size_t index) {
  if (cache.dim() < 1 || cache.dim() > PageShape::kMaxDims) {
    value_error("caches[", index, "] must have 1 to ", PageShape::kMaxDims, " dimensions, found ",
                shape_text(cache));
  }
  PageShape shape;
  shape.data = cache.data_ptr();
  shape.element_bytes = static_cast<int64_t>(cache.element_size());
  shape.page_stride = cache.stride(0);
  std::vector<int64_t> order(cache.dim() - 1);
  std::iota(order.begin(), order.end(), 1);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return cache.stride(a) > cache.stride(b); });
  // Outermost first; a dimension whose neighbour continues it seamlessly is fused with it into one
  // run.
  for (int64_t d : order) {
    const int64_t size = cache.size(d), stride = cache.stride(d);
    const int last = shape.dims - 1;
    if (last >= 0 && shape.strides[last] == size * stride) {
      shape.sizes[last] *= size;
      shape.strides[last] = stride;
    } else {
      shape.sizes[shape.dims] = size;
      shape.strides[shape.dims++] = stride;
    }
  }
  return shape;
}

struct MergeTensors {
  const Tensor &out_a, &lse_a, &out_b, &lse_b, &out, &lse;
};

// Each row is read before it is written, so the result may replace an input exactly, but not
// shifted.
void check_merge_memory(const MergeTensors& t) {
  writable("out", t.out);
  writable("lse", t.lse);
  apart("out", t.out, "out_a", t.out_a, true);
  apart("out", t.out, "out_b", t.out_b, true);
  apart("lse", t.lse, "lse_a", t.lse_a, true);
  apart("lse", t.lse, "lse_b", t.lse_b, true);
  apart("out", t.out, "lse_a", t.lse_a);
  apart("out", t.out, "lse_b", t.lse_b);
  apart("lse", t.lse, "out_a", t.out_a);
  apart("lse", t.lse, "out_b", t.out_b);
  apart("lse", t.lse, "out", t.out);
}

const float* lse_data(const char* name, const Tensor& lse, int64_t heads, int64_t tokens) {
  has_dtype(name, lse, ScalarType::Float);
  has_shape(name, lse, {{"heads", heads}, {"tokens", tokens}});
  last_dim_contiguous(name, lse);
  return static_cast<const float*>(lse.data_ptr());
}

}  // namespace

void append_kv(const Tensor& key, const Tensor& value, const Tensor& k_cache, const Tensor& v_cache,
               const Tensor& slot_mapping) {
  on_device("k_cache", k_cache);
  same_device("key", key, "k_cache", k_cache);
  same_device("value", value, "k_cache", k_cache);
  same_device("v_cache", v_cache, "k_cache", k_cache);
  AppendKvParams params;
  params.dtype = attention_dtype("k_cache", k_cache);
  cache_views(k_cache, v_cache, k_cache.scalar_type(), "k_cache", &params.k_cache, &params.v_cache);
  has_dtype("key", key, k_cache.scalar_type(), " (as k_cache)");
  has_dtype("value", value, k_cache.scalar_type(), " (as k_cache)");
  const int64_t heads = params.k_cache.heads;
  params.key = rows_view(
      "key", key, {{"num_tokens"}, {"num_kv_heads", heads}, {"head_dim", params.k_cache.dim}});
  params.value = rows_view(
      "value", value,
      {{"num_tokens", key.size(0)}, {"num_kv_heads", heads}, {"v_head_dim", params.v_cache.dim}});
  writable("k_cache", k_cache);
  writable("v_cache", v_cache);
  params.slots = int64_vector("slot_mapping", slot_mapping, {"num_tokens", key.size(0)});
  apart("k_cache", k_cache, "v_cache", v_cache);
  for (const auto& [name, cache] : {std::pair{"k_cache", &k_cache}, {"v_cache", &v_cache}}) {
    apart(name, *cache, "key", key);
    apart(name, *cache, "value", value);
    apart(name, *cache, "slot_mapping", slot_mapping);
  }
  check_slots(params.slots, key.size(0), params.k_cache.num_pages * params.k_cache.page_size);
  backend::append_kv(params, context(k_cache));
}

void copy_pages(const std::vector<Tensor>& caches, const Tensor& src, const Tensor& dst) {
  const int64_t* from = int64_vector("src", src, {"num_copies"});
  const int64_t* to = int64_vector("dst", dst, {"num_copies", src.size(0)});
  const int64_t count = src.size(0);
  std::vector<PageShape> shapes;
  for (size_t i = 0; i < caches.size(); ++i) {
    const std::string name = text("caches[", i, "]");
    on_device(name.c_str(), caches[i]);
    same_device(name.c_str(), caches[i], "caches[0]", caches[0]);
    writable(name.c_str(), caches[i]);
    apart(name.c_str(), caches[i], "src", src);
    apart(name.c_str(), caches[i], "dst", dst);
    shapes.push_back(page_shape(caches[i], i));
    check_page_ids("src", from, count, caches[i].size(0), i);
    check_page_ids("dst", to, count, caches[i].size(0), i);
  }
  check_copies_independent(from, to, count);
  if (caches.empty()) return;
  backend::copy_pages(shapes, from, to, count, context(caches[0]));
}

void merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                  const Tensor& lse_b, const Tensor& out, const Tensor& lse) {
  on_device("out_a", out_a);
  same_device("out_b", out_b, "out_a", out_a);
  same_device("out", out, "out_a", out_a);
  same_device("lse_a", lse_a, "out_a", out_a);
  same_device("lse_b", lse_b, "out_a", out_a);
  same_device("lse", lse, "out_a", out_a);
  MergeStatesParams params;
  params.dtype = attention_dtype("out_a", out_a);
  has_dtype("out_b", out_b, out_a.scalar_type(), " (as out_a)");
  has_dtype("out", out, out_a.scalar_type(), " (as out_a)");
  params.out_a = rows_view("out_a", out_a, {{"tokens"}, {"heads"}, {"dim"}});
  const int64_t tokens = out_a.size(0), heads = out_a.size(1), dim = out_a.size(2);
  params.out_b = rows_view("out_b", out_b, {{"tokens", tokens}, {"heads", heads}, {"dim", dim}});
  params.out = rows_view("out", out, {{"tokens", tokens}, {"heads", heads}, {"dim", dim}});
  params.lse_a = lse_data("lse_a", lse_a, heads, tokens), params.lse_a_stride = lse_a.stride(0);
  params.lse_b = lse_data("lse_b", lse_b, heads, tokens), params.lse_b_stride = lse_b.stride(0);
  params.lse = const_cast<float*>(lse_data("lse", lse, heads, tokens)),
  params.lse_stride = lse.stride(0);
  check_merge_memory({out_a, lse_a, out_b, lse_b, out, lse});
  backend::merge_states(params, context(out_a));
}

}  // namespace wim::ops

#ifndef WIM_CUDA_BACKEND  // schemas, and what works on host integers, are in the library that is
                          // always there
// clang-format off
STABLE_TORCH_LIBRARY(wim_ext, m) {
  m.def("append_kv(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor slot_mapping) -> ()");
  m.def("copy_pages(Tensor(a!)[] caches, Tensor src, Tensor dst) -> ()");
  m.def("merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, "
        "Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def("paged_attention(Tensor query, Tensor k_cache, Tensor v_cache, "
        "Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, Tensor? plan, "
        "Tensor(a!) out, Tensor(b!)? lse, float softmax_scale, bool causal, "
        "int window_left, int window_right, float softcap, "
        "Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale) -> ()");
  m.def("plan_attention(Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, "
        "int num_heads, int num_kv_heads, int page_size, bool causal, "
        "int window_left, int window_right, int num_threads) -> Tensor");
  m.def("plan_fields() -> str");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(wim_ext, CompositeExplicitAutograd, m) {
  m.impl("plan_fields", TORCH_BOX(&wim::ops::plan_fields));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(wim_ext, WIM_DISPATCH_KEY, m) {
  m.impl("append_kv", TORCH_BOX(&wim::ops::append_kv));
  m.impl("copy_pages", TORCH_BOX(&wim::ops::copy_pages));
  m.impl("merge_states", TORCH_BOX(&wim::ops::merge_states));
  m.impl("paged_attention", TORCH_BOX(&wim::ops::paged_attention));
  // Works on host integers for any device; with tensors on this one it says so.
  m.impl("plan_attention", TORCH_BOX(&wim::ops::plan_attention));
}
