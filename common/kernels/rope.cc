// Rotary embedding of interleaved pairs: two products and one sum each, the same bits on every path.
#include "common/kernels/kernels.h"

namespace hearth {

void RopeInterleaved(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float even = x[2 * i];
    const float odd = x[2 * i + 1];
    x[2 * i] = even * cos[i] - odd * sin[i];
    x[2 * i + 1] = even * sin[i] + odd * cos[i];
  }
}

}  // namespace hearth
