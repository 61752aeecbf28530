// Which instruction set the attention kernel uses: the fastest one that is built in and that this
// CPU has.
#pragma once

#include <string>
#include <vector>

#include "cpu/attention_work.h"

namespace wim::cpu {

struct Isa {
  const char* name;
  const AttentionKernel* kernel;
  bool available;  // on this CPU
};

// All that are built in, fastest first.
const std::vector<Isa>& built_in_isas();

// The environment variable WIM_CPU_ISA, read at the first call, forces one by name. Throws
// std::runtime_error
// ("ValueError: ...") if it names one that is unknown or that this CPU lacks.
const Isa& selected_isa();

// Why selected_isa() is what it is, in words.
std::string isa_reason();

}  // namespace wim::cpu
