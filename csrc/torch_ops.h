// The functions behind torch.ops.wim_ext.*: they check their arguments, describe them in plain
// structs and call the kernels of one backend. The CPU library and the CUDA library compile the
// same files, each for its own kernels.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#ifdef WIM_CUDA_BACKEND
#include "cuda/ops.h"
#define WIM_BACKEND cuda  // namespace of the kernels
#define WIM_DISPATCH_KEY CUDA
#else
#include "cpu/attention.h"
#include "cpu/cache_ops.h"
#define WIM_BACKEND cpu
#define WIM_DISPATCH_KEY CPU
#endif

namespace wim::ops {

namespace backend = wim::WIM_BACKEND;
using torch::stable::Tensor;

// The tensor is where this library's kernels can reach it.
void on_device(const char* name, const Tensor& tensor);

// What kernels need to run on the device of `tensor`: threads, or a stream and memory.
backend::Context context(const Tensor& tensor);

void append_kv(const Tensor& key, const Tensor& value, const Tensor& k_cache, const Tensor& v_cache,
               const Tensor& slot_mapping);
void copy_pages(const std::vector<Tensor>& caches, const Tensor& src, const Tensor& dst);
void merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                  const Tensor& lse_b, const Tensor& out, const Tensor& lse);

}  // namespace wim::ops
