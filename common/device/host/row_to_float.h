// A row of weights as floats. Room: common/device/host. May touch: common/{kernels,base}. Threads: any.
#pragma once

#include <cstdint>

#include "common/kernels/kernels.h"

namespace hearth {

// out [table.cols]; scales included.
void RowToFloat(const WeightView& table, int64_t row, float* out);

}  // namespace hearth
