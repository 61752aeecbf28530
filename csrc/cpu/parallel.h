// How the kernels get their threads: torch's pool, handed in by torch_cpu.cpp, so that no kernel
// includes torch.
#pragma once

#include <cstdint>
#include <functional>

namespace wim::cpu {

struct Context {
  int num_threads = 1;
  // Calls work(i) once for every i in [0, count), possibly at the same time. `work` must not throw.
  std::function<void(int64_t count, const std::function<void(int64_t)>& work)> parallel_for;
};

// Splits [0, count) into one contiguous range per thread; ranges shorter than `grain` are not split
// further.
inline void for_ranges(const Context& context, int64_t count, int64_t grain,
                       const std::function<void(int64_t, int64_t)>& work) {
  const int64_t wanted = grain > 0 ? (count + grain - 1) / grain : 1;
  const int64_t parts = wanted < context.num_threads ? wanted : context.num_threads;
  if (parts <= 1) {
    if (count > 0) work(0, count);
    return;
  }
  context.parallel_for(
      parts, [&](int64_t part) { work(part * count / parts, (part + 1) * count / parts); });
}

}  // namespace wim::cpu
