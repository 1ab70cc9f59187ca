// Rotary embedding, of interleaved pairs and of halves: two products and one sum each, the same bits on every path.
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

void RopeHalves(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i];
    const float second = x[half + i];
    x[i] = first * cos[i] - second * sin[i];
    x[half + i] = first * sin[i] + second * cos[i];
  }
}

}  // namespace hearth
