#include "cuda/attention.cuh"

namespace wim::cuda {
namespace {

// Plan and block table lie in one buffer, so that a call has one upload. Of the table only the
// columns that the longest sequence uses are taken.
struct HostTables {
  std::vector<int32_t> ints;
  int64_t table_offset = 0, table_width = 0;
};

HostTables gather_tables(const AttentionParams& params, const PlanView& plan) {
  HostTables tables;
  const int64_t batch = plan.get(PlanField::batch), page_size = params.k_cache.page_size;
  for (int64_t b = 0; b < batch; ++b) {
    tables.table_width =
        std::max(tables.table_width, (plan.seqused_k()[b] + page_size - 1) / page_size);
  }
  tables.ints.assign(params.plan, params.plan + plan.get(PlanField::total_ints));
  tables.table_offset = static_cast<int64_t>(tables.ints.size());
  for (int64_t b = 0; b < batch; ++b) {
    const int32_t* pages = params.block_table + b * params.block_table_stride;
    tables.ints.insert(tables.ints.end(), pages, pages + tables.table_width);
  }
  return tables;
}

DevicePlan device_plan(const PlanView& plan, const int32_t* ints) {
  const auto array = [&](PlanField offset) { return ints + plan.get(offset); };
  DevicePlan result = {};
  result.tokens = reinterpret_cast<const PlanToken*>(array(PlanField::token_offset));
  result.items = reinterpret_cast<const PlanItem*>(array(PlanField::item_offset));
  result.rows = reinterpret_cast<const PlanRow*>(array(PlanField::row_offset));
  result.combines = reinterpret_cast<const PlanCombine*>(array(PlanField::combine_offset));
  result.num_items = plan.get(PlanField::num_items);
  result.max_item_rows = plan.get(PlanField::max_item_rows);
  result.num_combines = plan.get(PlanField::num_combines);
  return result;
}

Partials make_partials(const AttentionParams& params, const PlanView& plan,
                       const Context& context) {
  const int64_t states = plan.get(PlanField::num_partials) * params.query.heads;
  if (states == 0) return {};
  const int64_t floats = states * (2 + params.v_cache.dim);
  auto* memory = static_cast<float*>(context.scratch(floats * int64_t{sizeof(float)}));
  return {memory, memory + states, memory + 2 * states};
}

}  // namespace

void paged_attention(const AttentionParams& params, const Context& context) {
  const PlanView plan(params.plan);
  const HostTables tables = gather_tables(params, plan);
  const auto* ints = static_cast<const int32_t*>(context.upload(
      tables.ints.data(), static_cast<int64_t>(tables.ints.size()) * int64_t{sizeof(int32_t)}));
  const DevicePlan on_device = device_plan(plan, ints);
  const Partials partials = make_partials(params, plan, context);
  AttentionParams device_params = params;
  device_params.block_table = ints + tables.table_offset;
  device_params.block_table_stride = tables.table_width;
  device_params.plan = nullptr;

  const int64_t row_threads = params.query.heads * (params.v_cache.dim / kSlice);
  with_element(params.dtype, [&](auto element) {
    using T = decltype(element);
    launch(context, "paged_attention", on_device.num_items * on_device.max_item_rows * row_threads,
           attention_kernel<T>, device_params, on_device, partials);
    launch(context, "paged_attention", on_device.num_combines * row_threads, combine_kernel<T>,
           device_params, on_device, partials);
  });
}

}  // namespace wim::cuda
