#include "cpu/attention.h"

#include <atomic>
#include <memory>
#include <new>

#include "cpu/attention_work.h"
#include "cpu/isa.h"
#include "plan_layout.h"

namespace wim::cpu {
namespace {

// Memory aligned to a cache line, left as it comes.
class AlignedBuffer {
 public:
  char* at_least(int64_t bytes) {
    if (bytes > capacity_) {
      memory_.reset();
      capacity_ = 0;
      memory_.reset(
          static_cast<char*>(::operator new(static_cast<size_t>(bytes), std::align_val_t{64})));
      capacity_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t capacity_ = 0;
};

// One a thread, kept between calls: a fresh one would cost page faults at every layer.
char* thread_scratch(int64_t bytes) {
  thread_local AlignedBuffer buffer;
  return buffer.at_least(bytes);
}

// Idle threads take the next task; tasks come longest first.
void run_tasks(int64_t count, int64_t threads, const Context& context,
               const std::function<void(int64_t)>& task) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  context.parallel_for(threads < count ? threads : count, [&](int64_t) {
    for (int64_t i = next++; i < count; i = next++) task(i);
  });
}

}  // namespace

void paged_attention(const AttentionParams& params, const Context& context) {
  const PlanView plan(params.plan);
  const AttentionKernel& kernel = *selected_isa().kernel;
  AttentionWork work;
  work.params = params;
  work.tokens = plan.tokens(), work.items = plan.items(), work.rows = plan.rows(),
  work.combines = plan.combines();
  work.group = params.query.heads / params.k_cache.heads;
  work.max_item_rows = plan.get(PlanField::max_item_rows);
  work.partial_stride = kPartialHeader + (params.out.dim + 15) / 16 * 16;
  AlignedBuffer partials;
  const int64_t states = plan.get(PlanField::num_partials) * params.query.heads;
  work.partials = reinterpret_cast<float*>(
      partials.at_least(states * work.partial_stride * int64_t{sizeof(float)}));

  // Waking the other threads costs about what one does in 50 microseconds.
  constexpr int64_t kSmallWork = 1 << 20;
  const int64_t products = plan.get(PlanField::scores) * (params.query.dim + params.out.dim);
  const int64_t threads = products < kSmallWork ? 1 : context.num_threads;
  const int64_t scratch = kernel.scratch_bytes(work), kv_heads = params.k_cache.heads;
  run_tasks(plan.get(PlanField::num_items) * kv_heads, threads, context, [&](int64_t task) {
    kernel.run_item(work, task / kv_heads, task % kv_heads, thread_scratch(scratch));
  });
  run_tasks(plan.get(PlanField::num_combines), threads, context,
            [&](int64_t index) { kernel.run_combine(work, index, thread_scratch(scratch)); });
}

}  // namespace wim::cpu
