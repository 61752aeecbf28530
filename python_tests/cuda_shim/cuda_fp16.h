// __half, with the conversions of the CPU kernels.
#pragma once

#include "cpu/convert.h"
#include "cuda_runtime.h"

struct __half {
  wim::cpu::Float16 value;
};
inline float __half2float(__half half) { return wim::cpu::to_float(half.value); }
inline __half __float2half_rn(float value) {
  return {wim::cpu::from_float<wim::cpu::Float16>(value)};
}
