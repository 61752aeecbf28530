// Code shared by files that are compiled for different instruction sets must never exist as one
// merged function: the linker would pick any of them, perhaps one that this CPU cannot run. So it
// is inlined, always.
#pragma once

#define WIM_INLINE inline __attribute__((always_inline))
