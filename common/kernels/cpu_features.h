// What the processor offers and the operating system saves on a context switch, and which kernel paths that allows.
// Room: common/kernels. Split into facts and a rule, so that the rule is tested for CPUs that the test does not run on.
#pragma once

#include <vector>

#include "common/kernels/kernels.h"

namespace hearth {

struct CpuFeatures {
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512vl = false;
  bool avx512dq = false;
  bool avx512bf16 = false;
  bool avx512vbmi = false;
  bool amx_tile = false;
  bool amx_bf16 = false;
  bool os_saves_ymm = false;    // XCR0: SSE and AVX state
  bool os_saves_zmm = false;    // XCR0: those, the mask registers and both halves of the ZMM state
  bool os_saves_tiles = false;  // XCR0: the tiles' configuration and data; a process still has to ask (OsGrantsTiles)
};

CpuFeatures DetectCpuFeatures();

// Whether Linux lets this process use tile data, which it must be asked for (arch_prctl ARCH_REQ_XCOMP_PERM; kernel documentation,
// "Using XSTATE features in user space applications"). The first call asks, for all threads there are and will be.
bool OsGrantsTiles();

// Ascending; kScalar always, and a path only if every path below it is there too. kAmx only under kFast.
std::vector<Isa> IsasFor(const CpuFeatures& features, Numerics numerics = Numerics::kExact);

}  // namespace hearth
