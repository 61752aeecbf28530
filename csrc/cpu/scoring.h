// How raw products q . k become scores in base 2, for one KV head of a call.
#pragma once

#include "cpu/attention_work.h"
#include "cpu/inline.h"
#include "cpu/math.h"

namespace wim::cpu {

// Raw products times `scale` are scores in base 2, or what apply_rule makes into such. The softmax
// takes the maximum of the raw ones, so `scale` is positive: a sign goes into the queries.
struct Scoring {
  float query_sign = 1.0f, scale = 1.0f;
  float softcap = 0.0f;   // 0: none
  bool has_rule = false;  // softcap or ALiBi

  WIM_INLINE Scoring(const AttentionParams& params, int64_t kv_head) {
    float signed_scale = params.softmax_scale;
    if (params.k_scale.data != nullptr)
      signed_scale *= params.k_scale.data[kv_head * params.k_scale.stride];
    // 0 stays 0, NaN stays NaN
    query_sign = signed_scale > 0.0f ? 1.0f : signed_scale < 0.0f ? -1.0f : signed_scale;
    scale = signed_scale > 0.0f ? signed_scale : signed_scale < 0.0f ? -signed_scale : 1.0f;
    if (params.softcap == 0.0f) scale *= kLog2E;
    softcap = params.softcap;
    has_rule = params.softcap != 0.0f || params.alibi_slopes != nullptr;
  }

  template <class V>
  WIM_INLINE typename V::F capped(typename V::F raw) const {
    if (softcap == 0.0f) return V::mul(raw, V::set1(scale));
    return V::mul(tanh<V>(V::mul(raw, V::set1(scale / softcap))), V::set1(softcap * kLog2E));
  }
};

// In base 2; 0 without ALiBi.
WIM_INLINE float alibi_slope(const AttentionParams& params, int64_t sequence, int64_t head) {
  if (params.alibi_slopes == nullptr) return 0.0f;
  return kLog2E * params.alibi_slopes[sequence * params.alibi_batch_stride + head];
}

}  // namespace wim::cpu
