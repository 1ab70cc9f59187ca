// Attention over a long context in spans of positions (split KV, as in Flash-Decoding), so that one row's few heads keep many threads busy.
// Room: common/device/host. May touch: common/{kernels,base}. Threads: pure functions.
// A span's softmax starts anew, and spans are folded in ascending order: a result depends on positions alone, not on who took which span (DESIGN
// section 7). Up to kSpanTokens positions there is one span, and folding it leaves its bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/base/ceil_div.h"
#include "common/kernels/kernels.h"
#include "common/shm/kv_pool.h"

namespace hearth {

inline constexpr int64_t kSpanTokens = 16 * kPageTokens;

inline int64_t NumSpans(int64_t positions) { return CeilDiv(positions, kSpanTokens); }

// A run of spans.
struct Spans {
  int64_t begin = 0;
  int64_t end = 0;
};

// The spans of `positions` that part `part` of `parts` takes; none where there are more parts than spans.
inline Spans SpansOf(int64_t positions, int64_t part, int64_t parts) {
  const int64_t spans = NumSpans(positions);
  return {part * spans / parts, (part + 1) * spans / parts};
}

// Into how many parts the spans are cut so that `tasks` of them become about `wanted`.
inline int64_t SpanParts(int64_t most_positions, int64_t tasks, int64_t wanted) {
  return std::clamp<int64_t>(CeilDiv(wanted, std::max<int64_t>(1, tasks)), 1, std::max<int64_t>(1, NumSpans(most_positions)));
}

// What one query has summed up over some positions: values are not normalised yet.
struct QuerySums {
  SoftmaxState* state;
  float* values;  // [n]
};

// total += span, as if its positions had been walked behind those of total.
void FoldSpan(const QuerySums& span, int64_t n, const QuerySums& total);

}  // namespace hearth
