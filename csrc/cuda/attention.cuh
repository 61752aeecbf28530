// Attention over a plan, one thread for eight output dimensions of a row: the plain arithmetic of
// plan_layout.h, without tensor cores or shared memory. The tensor-core kernel replaces it behind
// the same launcher; this one then stays as what it is compared with.
#pragma once

#include <cmath>

#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "plan_layout.h"

namespace wim::cuda {

constexpr int kSlice = 8;  // divides head_dim and v_head_dim

// A plan's arrays on the device.
struct DevicePlan {
  const PlanToken* tokens;
  const PlanItem* items;
  const PlanRow* rows;
  const PlanCombine* combines;
  int64_t num_items, max_item_rows, num_combines;
};

// The states of row parts, by slot and query head.
struct Partials {
  float* largest;  // [num_partials, num_heads]
  float* sum;      // [num_partials, num_heads]
  float* out;      // [num_partials, num_heads, v_head_dim]
};

// Softmax over some keys: sum and out are scaled by exp(-largest).
struct State {
  float largest = -INFINITY, sum = 0.0f;
  float out[kSlice] = {};
};

// A finite stand-in while no score above -inf was seen: then every weight is exp(-inf) = 0, not
// NaN.
__device__ inline float pivot(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// a := a and b together. Which parts a row was cut into does not show: only this is ever done at
// the boundaries of cells, always in key order, and -fmad=false fixes the rounding.
__device__ inline void fold(State* a, const State& b) {
  const float largest = fmaxf(a->largest, b.largest);
  const float scale_a = expf(a->largest - pivot(largest));
  const float scale_b = expf(b.largest - pivot(largest));
  a->largest = largest;
  a->sum = a->sum * scale_a + b.sum * scale_b;
  for (int i = 0; i < kSlice; ++i) a->out[i] = a->out[i] * scale_a + b.out[i] * scale_b;
}

// NaN passes through both: fmaxf drops a NaN score, its weight is NaN all the same.
template <class T>
__device__ void add_key(State* state, float score, const T* v, int64_t v_stride) {
  if (score > state->largest) {
    const float scale = expf(state->largest - score);
    state->largest = score;
    state->sum *= scale;
    for (int i = 0; i < kSlice; ++i) state->out[i] *= scale;
  }
  const float weight = expf(score - pivot(state->largest));
  state->sum += weight;
  for (int i = 0; i < kSlice; ++i)
    state->out[i] = fmaf(weight, to_float(v[i * v_stride]), state->out[i]);
}

template <class T>
__device__ float dot(const T* a, const T* b, int64_t dim) {
  float sums[kSlice] = {};
  for (int64_t d = 0; d < dim; d += kSlice) {
    for (int i = 0; i < kSlice; ++i)
      sums[i] = fmaf(to_float(a[d + i]), to_float(b[d + i]), sums[i]);
  }
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

__device__ inline float scale_of(const HeadScale& scale, int64_t head) {
  return scale.data == nullptr ? 1.0f : scale.data[head * scale.stride];
}

// One row's query head and slice of V.
template <class T>
struct Row {
  const T* query;
  const T* k;            // of the KV head
  const T* v;            // of the KV head and slice
  const int32_t* pages;  // of a sequence whose keys these are
  float scale, slope, position;

  __device__ Row(const AttentionParams& params, const PlanToken& token, int64_t row, int64_t head,
                 int64_t slice, int64_t page_owner) {
    const int64_t kv_head = head / (params.query.heads / params.k_cache.heads);
    query = static_cast<const T*>(params.query.data) + row * params.query.row_stride +
            head * params.query.head_stride;
    k = static_cast<const T*>(params.k_cache.data) + kv_head * params.k_cache.head_stride;
    v = static_cast<const T*>(params.v_cache.data) + kv_head * params.v_cache.head_stride +
        slice * kSlice * params.v_cache.dim_stride;
    pages = params.block_table + page_owner * params.block_table_stride;
    scale = params.softmax_scale * scale_of(params.k_scale, kv_head);
    slope = params.alibi_slopes == nullptr
                ? 0.0f
                : params.alibi_slopes[token.sequence * params.alibi_batch_stride + head];
    position = static_cast<float>(token.position);
  }

  __device__ float score(const AttentionParams& params, int64_t key, const T* k_row) const {
    float score = scale * dot(query, k_row, params.query.dim);
    if (params.softcap > 0.0f) score = params.softcap * tanhf(score / params.softcap);
    if (params.alibi_slopes != nullptr) score -= slope * fabsf(position - static_cast<float>(key));
    return score;
  }

  // The state of keys [low, high).
  __device__ State attend(const AttentionParams& params, int32_t low, int32_t high) const {
    State state;
    const auto page_size = static_cast<int32_t>(params.k_cache.page_size);
    for (int32_t key = low; key < high; ++key) {  // 32 bits: a 64-bit division takes 100 cycles
      const int64_t page = pages[key / page_size], slot = key % page_size;
      const T* k_row = k + page * params.k_cache.page_stride + slot * params.k_cache.slot_stride;
      const T* v_row = v + page * params.v_cache.page_stride + slot * params.v_cache.slot_stride;
      add_key(&state, score(params, key, k_row), v_row, params.v_cache.dim_stride);
    }
    return state;
  }
};

// Where a row's output slice and its lse go. Slice 0 writes the lse.
template <class T>
__device__ void write_row(const AttentionParams& params, int64_t row, int64_t head, int64_t slice,
                          const float* values, float lse) {
  T* out = static_cast<T*>(params.out.data) + row * params.out.row_stride +
           head * params.out.head_stride + slice * kSlice;
  for (int i = 0; i < kSlice; ++i) out[i] = from_float<T>(values[i]);
  if (slice == 0 && params.lse != nullptr) params.lse[head * params.lse_stride + row] = lse;
}

// A row that saw keys: adds the sink, divides, scales.
template <class T>
__device__ void finish(const AttentionParams& params, int64_t row, int64_t head, int64_t slice,
                       State state) {
  if (params.sinks != nullptr) {
    State sink;
    sink.largest = params.sinks[head], sink.sum = 1.0f;
    fold(&state, sink);
  }
  const int64_t kv_head = head / (params.query.heads / params.k_cache.heads);
  const float v_scale = scale_of(params.v_scale, kv_head);
  for (int i = 0; i < kSlice; ++i) state.out[i] = state.out[i] / state.sum * v_scale;
  // Sum 0: every score was -inf, and softmax over those is not a number.
  const float lse = state.sum == 0.0f ? NAN : state.largest + logf(state.sum);
  write_row<T>(params, row, head, slice, state.out, lse);
}

// Index: item, KV head, row of the item, query head of the group, slice.
template <class T>
__global__ void attention_kernel(AttentionParams params, DevicePlan plan, Partials partials) {
  const int64_t kv_heads = params.k_cache.heads, group = params.query.heads / kv_heads;
  const int64_t slices = params.v_cache.dim / kSlice;
  const int64_t count = plan.num_items * kv_heads * plan.max_item_rows * group * slices;
  for (int64_t index = first_index(); index < count; index += index_stride()) {
    int64_t rest = index;
    const auto next = [&rest](int64_t size) {
      const int64_t coordinate = rest % size;
      rest /= size;
      return coordinate;
    };
    const int64_t slice = next(slices), member = next(group), item_row = next(plan.max_item_rows);
    const int64_t head = next(kv_heads) * group + member;
    const PlanItem item = plan.items[rest];
    if (item.row_begin + item_row >= item.row_end) continue;
    const PlanRow part = plan.rows[item.row_begin + item_row];

    const Row<T> row(params, plan.tokens[part.token], part.token, head, slice, item.sequence);
    State state;
    for (int32_t low = part.low, high; low < part.high; low = high) {
      const int64_t cell_end = (low / kCellKeys + 1) * int64_t{kCellKeys};  // perhaps 2^31
      high = cell_end < part.high ? static_cast<int32_t>(cell_end) : part.high;
      fold(&state, row.attend(params, low, high));
    }
    if (part.slot < 0) {
      finish<T>(params, part.token, head, slice, state);
      continue;
    }
    const int64_t slot = part.slot * params.query.heads + head;
    if (slice == 0) partials.largest[slot] = state.largest, partials.sum[slot] = state.sum;
    float* out = partials.out + slot * params.v_cache.dim + slice * kSlice;
    for (int i = 0; i < kSlice; ++i) out[i] = state.out[i];
  }
}

__device__ inline State load_partial(const AttentionParams& params, const Partials& partials,
                                     int64_t slot, int64_t head, int64_t slice) {
  const int64_t index = slot * params.query.heads + head;
  State state;
  state.largest = partials.largest[index], state.sum = partials.sum[index];
  const float* out = partials.out + index * params.v_cache.dim + slice * kSlice;
  for (int i = 0; i < kSlice; ++i) state.out[i] = out[i];
  return state;
}

// Index: combine, query head, slice.
template <class T>
__global__ void combine_kernel(AttentionParams params, DevicePlan plan, Partials partials) {
  const int64_t heads = params.query.heads, slices = params.v_cache.dim / kSlice;
  const int64_t count = plan.num_combines * heads * slices;
  for (int64_t i = first_index(); i < count; i += index_stride()) {
    const int64_t slice = i % slices, head = i / slices % heads;
    const PlanCombine combine = plan.combines[i / slices / heads];
    if (combine.slot_begin == combine.slot_end) {  // sees no key: the lse is the sink alone
      const float lse = params.sinks == nullptr ? -INFINITY : params.sinks[head];
      write_row<T>(params, combine.token, head, slice, State{}.out, lse);
      continue;
    }
    State state = load_partial(params, partials, combine.slot_begin, head, slice);
    for (int64_t slot = combine.slot_begin + 1; slot < combine.slot_end; ++slot)
      fold(&state, load_partial(params, partials, slot, head, slice));
    finish<T>(params, combine.token, head, slice, state);
  }
}

}  // namespace wim::cuda
