#pragma once

#include "attention_params.h"
#include "cpu/parallel.h"

namespace wim::cpu {

// Runs the plan's items and combines their partial states. Arguments have been checked.
void paged_attention(const AttentionParams& params, const Context& context);

}  // namespace wim::cpu
