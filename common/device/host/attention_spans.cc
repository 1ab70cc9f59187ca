#include "common/device/host/attention_spans.h"

#include "common/kernels/portable_exp.h"

namespace hearth {

void FoldSpan(const QuerySums& span, int64_t n, const QuerySums& total) {
  if (span.state->sum == 0.0f) return;  // all of its positions were skipped
  if (total.state->sum == 0.0f) {
    *total.state = *span.state;
    std::copy_n(span.values, n, total.values);
    return;
  }
  const float max = std::max(total.state->max, span.state->max);
  const float keep = PortableExp(total.state->max - max), take = PortableExp(span.state->max - max);
  total.state->max = max;
  total.state->sum = total.state->sum * keep + span.state->sum * take;
  for (int64_t i = 0; i < n; ++i) total.values[i] = total.values[i] * keep + span.values[i] * take;
}

}  // namespace hearth
