#include <cstring>

#include "cpu/cache_ops.h"
#include "cpu/transpose.h"

namespace wim::cpu {
namespace {

// Tokens [token, token + count) and the consecutive slots of one page that they go to.
struct Run {
  int64_t token, count, page, offset;
};

// The longest run from `token` on.
Run find_run(const int64_t* slots, int64_t token, int64_t end, int64_t page_size) {
  Run run{token, 1, slots[token] / page_size, slots[token] % page_size};
  while (token + run.count < end && run.offset + run.count < page_size &&
         slots[token + run.count] == slots[token] + run.count)
    ++run.count;
  return run;
}

// Vector holds elements of the right width: appending moves bits, whatever they mean.
template <class Vector, class Element>
void write_run(const RowsView& rows, const CacheView& cache, const Run& run) {
  const Element* source = static_cast<const Element*>(rows.data) + run.token * rows.row_stride;
  Element* target = static_cast<Element*>(cache.data) + run.page * cache.page_stride +
                    run.offset * cache.slot_stride;
  for (int64_t head = 0; head < rows.heads; ++head) {
    const Element* from = source + head * rows.head_stride;
    Element* to = target + head * cache.head_stride;
    if (cache.dim_stride != 1) {
      transpose<Vector>(from, rows.row_stride, run.count, rows.dim, to, cache.dim_stride);
    } else if (rows.row_stride == rows.dim && cache.slot_stride == rows.dim) {
      std::memcpy(to, from, run.count * rows.dim * sizeof(Element));
    } else {
      for (int64_t i = 0; i < run.count; ++i)
        std::memcpy(to + i * cache.slot_stride, from + i * rows.row_stride,
                    rows.dim * sizeof(Element));
    }
  }
}

// Heads that follow each other on both sides are one long head.
void fuse_heads(RowsView& rows, CacheView& cache) {
  if (rows.head_stride != rows.dim || cache.head_stride != rows.dim || cache.dim_stride != 1)
    return;
  rows.dim *= rows.heads;
  rows.heads = 1;
}

template <class Vector, class Element>
void append(AppendKvParams params, const Context& context) {
  fuse_heads(params.key, params.k_cache);
  fuse_heads(params.value, params.v_cache);
  const int64_t token_bytes =
      (params.key.heads * params.key.dim + params.value.heads * params.value.dim) *
      int64_t{sizeof(Element)};
  const int64_t grain =
      1 + (64 << 10) / (token_bytes + 1);  // under ~64 KB a second thread costs more than it saves
  for_ranges(context, params.key.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end;) {
      if (params.slots[token] < 0) {
        ++token;
        continue;
      }
      const Run run = find_run(params.slots, token, end, params.k_cache.page_size);
      write_run<Vector, Element>(params.key, params.k_cache, run);
      write_run<Vector, Element>(params.value, params.v_cache, run);
      token += run.count;
    }
  });
}

}  // namespace

void append_kv(const AppendKvParams& params, const Context& context) {
  if (element_size(params.dtype) == 4) {
    append<Longs, uint32_t>(params, context);
  } else {
    append<Words, uint16_t>(params, context);
  }
}

}  // namespace wim::cpu
