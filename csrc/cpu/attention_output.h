// From softmax states to what the caller sees: partial states in memory, their combination, the
// final division.
#pragma once

#include "cpu/attention_work.h"
#include "cpu/inline.h"
#include "cpu/pack.h"
#include "cpu/softmax.h"

namespace wim::cpu {

template <class V>
WIM_INLINE int64_t padded(int64_t dim) {
  return (dim + V::kLanes - 1) / V::kLanes * V::kLanes;
}

WIM_INLINE State partial_state(const AttentionWork& work, int64_t slot, int64_t head) {
  float* base = work.partials + (slot * work.params.query.heads + head) * work.partial_stride;
  return {base, base + 1, base + kPartialHeader};
}

// out = o / l, with the sink as one more term of l. Adding 0 makes a -0 a 0: which of them a sum of
// nothing is depends on the hidden keys that a row was multiplied with, weight 0, for its
// neighbours' sake.
template <class V, class T>
WIM_INLINE void write_output(const AttentionWork& work, int64_t token, int64_t head,
                             const State& state) {
  const AttentionParams& params = work.params;
  float maximum = *state.maximum, sum = *state.sum, shrink = 1.0f;
  if (params.sinks != nullptr) {
    const float sink = params.sinks[head] * kLog2E, pivot = finite_pivot(larger(maximum, sink));
    shrink = exp2_scalar<V>(maximum - pivot);
    sum = sum * shrink + exp2_scalar<V>(sink - pivot);
    maximum = pivot;
  }
  float scale = shrink / sum;
  if (params.v_scale.data != nullptr)
    scale *= params.v_scale.data[head / work.group * params.v_scale.stride];
  T* out = static_cast<T*>(params.out.data) + token * params.out.row_stride +
           head * params.out.head_stride;
  int64_t d = 0;
  for (; d + V::kLanes <= params.out.dim; d += V::kLanes) {
    V::store(out + d, V::fma(V::load(state.out + d), V::set1(scale), V::zero()));
  }
  if (d < params.out.dim) {
    store_part<V>(out + d, V::mul(V::load(state.out + d), V::set1(scale)), params.out.dim - d);
  }
  if (params.lse != nullptr)
    params.lse[head * params.lse_stride + token] = (maximum + __builtin_log2f(sum)) * kLn2;
}

template <class V, class T>
WIM_INLINE void write_no_keys(const AttentionWork& work, int64_t token, int64_t head) {
  const AttentionParams& params = work.params;
  T* out = static_cast<T*>(params.out.data) + token * params.out.row_stride +
           head * params.out.head_stride;
  for (int64_t d = 0; d < params.out.dim; ++d) out[d] = T{};
  if (params.lse != nullptr) {
    params.lse[head * params.lse_stride + token] =
        params.sinks != nullptr ? params.sinks[head] : kMinusInfinity;
  }
}

// The rows of one token, for all heads, from their partial states.
template <class V, class T>
WIM_INLINE void combine_token(const AttentionWork& work, const PlanCombine& combine,
                              char* scratch) {
  const int64_t dim = padded<V>(work.params.out.dim);
  float maximum, sum;
  const State state{&maximum, &sum, reinterpret_cast<float*>(scratch)};
  for (int64_t head = 0; head < work.params.query.heads; ++head) {
    if (combine.slot_begin == combine.slot_end) {
      write_no_keys<V, T>(work, combine.token, head);
      continue;
    }
    copy_state<V>(partial_state(work, combine.slot_begin, head), dim, state);
    for (int64_t slot = combine.slot_begin + 1; slot < combine.slot_end; ++slot) {
      fold_state<V>(partial_state(work, slot, head), dim, state);
    }
    write_output<V, T>(work, combine.token, head, state);
  }
}

}  // namespace wim::cpu
