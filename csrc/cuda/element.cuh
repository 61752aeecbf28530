// One name for the conversions of the three element types. Both 16-bit ones round to nearest, ties
// to even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "attention_params.h"

namespace wim::cuda {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Calls work(T{}) with the element type of `dtype`.
template <class Work>
void with_element(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::kFloat32:
      return work(float{});
    case DType::kBFloat16:
      return work(__nv_bfloat16{});
    case DType::kFloat16:
      return work(__half{});
  }
}

}  // namespace wim::cuda
