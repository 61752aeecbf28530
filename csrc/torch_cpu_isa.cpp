// What `wim info` asks about the CPU kernels.
#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/isa.h"

namespace wim::ops {
namespace {

std::string cpu_isa() { return cpu::selected_isa().name; }

// All that are built in: "name", or "name:missing" where this CPU lacks it.
std::string cpu_isas() {
  std::string result;
  for (const cpu::Isa& isa : cpu::built_in_isas()) {
    result +=
        (result.empty() ? "" : " ") + std::string(isa.name) + (isa.available ? "" : ":missing");
  }
  return result;
}

std::string cpu_isa_reason() { return cpu::isa_reason(); }

}  // namespace
}  // namespace wim::ops

STABLE_TORCH_LIBRARY_FRAGMENT(wim_ext, m) {
  m.def("cpu_isa() -> str");
  m.def("cpu_isas() -> str");
  m.def("cpu_isa_reason() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(wim_ext, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&wim::ops::cpu_isa));
  m.impl("cpu_isas", TORCH_BOX(&wim::ops::cpu_isas));
  m.impl("cpu_isa_reason", TORCH_BOX(&wim::ops::cpu_isa_reason));
}
