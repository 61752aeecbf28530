// __nv_bfloat16, with the conversions of the CPU kernels.
#pragma once

#include "cpu/convert.h"
#include "cuda_runtime.h"

struct __nv_bfloat16 {
  wim::cpu::BFloat16 value;
};
inline float __bfloat162float(__nv_bfloat16 bfloat) { return wim::cpu::to_float(bfloat.value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return {wim::cpu::from_float<wim::cpu::BFloat16>(value)};
}
