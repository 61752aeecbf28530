// The functions behind torch.ops.wim_ext.*: they check their arguments, describe them in plain
// structs and call the kernels of one backend. A second library can compile the same files for
// another backend.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cpu/parallel.h"

#ifndef WIM_BACKEND
#define WIM_BACKEND cpu  // namespace of the kernels
#define WIM_DISPATCH_KEY CPU
#endif

namespace wim::ops {

namespace backend = wim::WIM_BACKEND;
using torch::stable::Tensor;

// torch's threads; one thread in a process that was forked (GNU OpenMP's pool does not survive a
// fork).
backend::Context context();

void append_kv(const Tensor& key, const Tensor& value, const Tensor& k_cache, const Tensor& v_cache,
               const Tensor& slot_mapping);
void copy_pages(const std::vector<Tensor>& caches, const Tensor& src, const Tensor& dst);
void merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                  const Tensor& lse_b, const Tensor& out, const Tensor& lse);

}  // namespace wim::ops
