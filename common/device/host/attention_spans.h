// Attention over a long context in spans of positions (split KV, as in Flash-Decoding), so that one row's few heads keep many threads busy.
// Room: common/device/host. May touch: common/{kernels,shm,base}. Threads: pure functions.
// A span's softmax starts anew, and spans are folded in ascending order: a result depends on positions alone, not on who took which span (DESIGN
// section 7). Up to kSpanTokens positions there is one span, and folding it leaves its bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/base/ceil_div.h"
#include "common/device/host/scratch.h"
#include "common/kernels/kernels.h"
#include "common/shm/kv_pool.h"

namespace hearth {

inline constexpr int64_t kSpanTokens = 16 * kPageTokens;
// Of attention, at least, where there is so much to divide: no thread ends long before the others.
inline constexpr int64_t kTasksPerThread = 3;

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

// What some queries have summed up over some positions, their values not normalised yet: states [queries], values [queries, n].
struct QuerySums {
  SoftmaxState* states;
  float* values;

  static size_t Bytes(int64_t queries, int64_t n) { return Scratch::Bytes<SoftmaxState>(queries) + Scratch::Bytes<float>(queries * n); }
  static QuerySums Take(int64_t queries, int64_t n, Scratch& scratch) {
    SoftmaxState* states = scratch.Take<SoftmaxState>(queries);
    return {states, scratch.Take<float>(queries * n)};
  }
  QuerySums From(int64_t query, int64_t n) const { return {states + query, values + query * n}; }
  void Clear(int64_t queries, int64_t n) const {
    std::fill_n(states, queries, SoftmaxState{});
    std::fill_n(values, queries * n, 0.0f);
  }
};

// total += span, as if its positions had been walked behind those of total.
void FoldSpan(const QuerySums& span, int64_t queries, int64_t n, const QuerySums& total);

// All spans before `end`, from the first on, by one task: `walk(span, sums)` adds a span's positions to sums that are clear. What it took from scratch.
template <class Walk>
QuerySums WalkSpans(int64_t end, int64_t queries, int64_t n, Scratch& scratch, const Walk& walk) {
  const QuerySums total = QuerySums::Take(queries, n, scratch), span_sums = QuerySums::Take(queries, n, scratch);
  total.Clear(queries, n);
  walk(0, total);
  for (int64_t span = 1; span < end; ++span) {
    span_sums.Clear(queries, n);
    walk(span, span_sums);
    FoldSpan(span_sums, queries, n, total);
  }
  return total;
}

// sums / their weights' sum
void Normalise(const QuerySums& sums, int64_t queries, int64_t n);

}  // namespace hearth
