#include "cpu/isa.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#ifdef WIM_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace wim::cpu {
namespace {

// Why the AMX that the CPU has is not used; empty if it is, or if there is none.
std::string& amx_refusal() {
  static std::string refusal;
  return refusal;
}

#ifdef WIM_X86
bool cpu_has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
         (edx & (kBf16 | kTile)) == (kBf16 | kTile);
}

// Linux gives a process the tiles' 8 KB of state only when asked (arch_prctl, since 5.16); once
// granted they are there for all threads.
bool request_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return true;
  amx_refusal() = std::string("the operating system refused the use of AMX tiles (arch_prctl: ") +
                  std::strerror(errno) + ")";
  return false;
}
#endif

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
  const bool has_amx = pairs && cpu_has_amx();
  isas.push_back({"amx", &amx_kernel, has_amx && request_amx()});
  isas.push_back({"avx512_bf16", &avx512_bf16_kernel, pairs});
  isas.push_back({"avx512", &avx512_kernel, avx512});
  // CPUs with AMX do vdpbf16ps at half the rate of float32's multiply-adds.
  if (has_amx) std::swap(isas[1], isas[2]);
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
  return "the fastest of what this CPU has (" + names(true) + ") and what is built in (" +
         names(false) + ")" + (amx_refusal().empty() ? "" : "; " + amx_refusal());
}

}  // namespace wim::cpu
