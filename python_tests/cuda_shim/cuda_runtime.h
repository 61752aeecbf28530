// Stands in for CUDA's header when g++ compiles the kernels for the tests: a kernel is a function,
// a launch runs its threads one after the other. Good for kernels without barriers only.
#pragma once

#include <cstdint>
#include <cstdlib>

#define __global__
#define __device__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned size) : x(size) {}
};

inline thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;

struct CUstream_st;
enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  CUstream_st* stream;
};

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = 3, cudaSuccess;
}

// What the tests vary: nothing may depend on the order of the threads or on their number.
inline bool last_thread_first = false;
inline unsigned largest_grid = 1u << 31;

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args... args) {
  gridDim = config->gridDim, blockDim = config->blockDim;
  if (gridDim.x > largest_grid) gridDim.x = largest_grid;
  const uint64_t threads = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = 0; i < threads; ++i) {
    const uint64_t thread = last_thread_first ? threads - 1 - i : i;
    blockIdx.x = static_cast<unsigned>(thread / blockDim.x);
    threadIdx.x = static_cast<unsigned>(thread % blockDim.x);
    kernel(args...);
  }
  return cudaSuccess;
}
