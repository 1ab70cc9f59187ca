#include "common/device/host/attention_spans.h"

#include "common/kernels/portable_exp.h"

namespace hearth {
namespace {

void FoldOne(const SoftmaxState& span, const float* span_values, int64_t n, SoftmaxState& total, float* values) {
  if (span.sum == 0.0f) return;  // all of its positions were skipped
  if (total.sum == 0.0f) {
    total = span;
    std::copy_n(span_values, n, values);
    return;
  }
  const float max = std::max(total.max, span.max);
  const float keep = PortableExp(total.max - max), take = PortableExp(span.max - max);
  total.max = max;
  total.sum = total.sum * keep + span.sum * take;
  for (int64_t i = 0; i < n; ++i) values[i] = values[i] * keep + span_values[i] * take;
}

}  // namespace

void FoldSpan(const QuerySums& span, int64_t queries, int64_t n, const QuerySums& total) {
  for (int64_t q = 0; q < queries; ++q) FoldOne(span.states[q], span.values + q * n, n, total.states[q], total.values + q * n);
}

void Normalise(const QuerySums& sums, int64_t queries, int64_t n) {
  for (int64_t q = 0; q < queries; ++q) {
    const float factor = 1.0f / sums.states[q].sum;
    for (int64_t i = 0; i < n; ++i) sums.values[q * n + i] *= factor;
  }
}

}  // namespace hearth
