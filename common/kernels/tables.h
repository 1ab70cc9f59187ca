// The tables of the paths, each defined in the one file that may use the path's instructions. For dispatch.cc only.
// Room: common/kernels. Plain constants, so that naming a table runs no code of its file.
#pragma once

#include "common/kernels/kernels.h"

namespace hearth {

extern const KernelTable kScalarTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512Bf16Table;
extern const KernelTable kAmxTable;  // kAvx512Bf16Table with another `gemm`, this:
GemmKernel GemmInAmxTiles;

}  // namespace hearth
