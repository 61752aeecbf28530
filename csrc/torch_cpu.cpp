// What the CPU library hands to its kernels.
#include <pthread.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "torch_ops.h"
#include "torch_ops_checks.h"

namespace wim::ops {
namespace {

std::atomic<bool> forked{false};
[[maybe_unused]] const int fork_hook = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

void on_device(const char* name, const Tensor& tensor) { checks::on_cpu(name, tensor); }

// torch's threads; one thread in a process that was forked (GNU OpenMP's pool does not survive a
// fork).
backend::Context context(const Tensor&) {
  const bool alone = forked;
  backend::Context result;
  result.num_threads = alone ? 1 : static_cast<int>(torch::stable::get_num_threads());
  result.parallel_for = [alone](int64_t count, const std::function<void(int64_t)>& work) {
    const auto range = [&work](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work(i);
    };
    if (alone || count == 1) return range(0, count);
    torch::stable::parallel_for(0, count, 1, range);
  };
  return result;
}

}  // namespace wim::ops
