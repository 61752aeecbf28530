#include "cpu/isa.h"

#include <cstdlib>
#include <stdexcept>

namespace wim::cpu {
namespace {

// cpuid bits (and the operating system's consent), never the CPU's model: virtual machines lie
// about that.
std::vector<Isa> find_isas() {
  std::vector<Isa> isas;
#ifdef WIM_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
  isas.push_back({"avx512_bf16", &avx512_bf16_kernel, pairs});
  isas.push_back({"avx512", &avx512_kernel, avx512});
  isas.push_back({"avx2", &avx2_kernel, avx2});
#endif
  isas.push_back({"portable", &portable_kernel, true});
  return isas;
}

std::string names(bool only_available) {
  std::string result;
  for (const Isa& isa : built_in_isas()) {
    if (isa.available || !only_available)
      result += (result.empty() ? "" : ", ") + std::string(isa.name);
  }
  return result;
}

const Isa& find_isa(const char* forced) {
  for (const Isa& isa : built_in_isas()) {
    if (forced == nullptr ? isa.available : isa.name == std::string(forced)) {
      if (isa.available) return isa;
      throw std::runtime_error("ValueError: WIM_CPU_ISA=" + std::string(forced) +
                               " is not supported by this CPU, which has: " + names(true));
    }
  }
  throw std::runtime_error("ValueError: WIM_CPU_ISA=" + std::string(forced) +
                           " is unknown; built in are: " + names(false));
}

const char* forced_isa() {
  const char* value = std::getenv("WIM_CPU_ISA");
  return value == nullptr || *value == '\0' ? nullptr : value;
}

}  // namespace

const std::vector<Isa>& built_in_isas() {
  static const std::vector<Isa> isas = find_isas();
  return isas;
}

const Isa& selected_isa() {
  static const Isa& isa = find_isa(forced_isa());
  return isa;
}

std::string isa_reason() {
  if (forced_isa() != nullptr) return "forced by WIM_CPU_ISA";
  return "the widest of what this CPU has (" + names(true) + ") and what is built in (" +
         names(false) + ")";
}

}  // namespace wim::cpu
