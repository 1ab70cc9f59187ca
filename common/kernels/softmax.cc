// The end of a running softmax.
#include "common/kernels/kernels.h"

namespace hearth {

void FinishSoftmax(const SoftmaxState& state, const float* acc, bf16* out, int64_t n) {
  const float inverse = 1.0f / state.sum;
  for (int64_t i = 0; i < n; ++i) out[i] = ToBf16(acc[i] * inverse);
}

}  // namespace hearth
