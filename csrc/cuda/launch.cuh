// How every kernel here is launched: a flat range of independent 64-bit indices over which the
// threads of a grid stride. No kernel depends on the grid's size.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/ops.h"

namespace wim::cuda {

__device__ inline int64_t first_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline int64_t index_stride() { return int64_t{gridDim.x} * blockDim.x; }

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA error in wim_ext ") + what + ": " +
                             cudaGetErrorString(status));
  }
}

// Enqueues `kernel(args...)` with at least one thread for each of `count` indices, as far as a grid
// reaches.
template <class... Params, class... Args>
void launch(const Context& context, const char* what, int64_t count, void (*kernel)(Params...),
            Args... args) {
  if (count == 0) return;
  constexpr int64_t kBlock = 128, kMaxGrid = INT32_MAX;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min((count + kBlock - 1) / kBlock, kMaxGrid)));
  config.blockDim = dim3(kBlock);
  config.stream = context.stream;
  check(cudaLaunchKernelEx(&config, kernel, args...), what);
}

}  // namespace wim::cuda
