#include "services/decode/draft_depth.h"

#include <algorithm>
#include <utility>

namespace hearth {
namespace {

// Steps of each depth before a choice is made.
constexpr uint64_t kSamplesMin = 3;
// One step in so many looks at another depth than the best: should that take twice the time, looking costs one percent.
constexpr int64_t kLookEvery = 100;
// A larger depth must yield so much more than a smaller one: below it is noise, and fewer rows leave more for others.
constexpr double kGainMin = 1.02;
// A rate follows the text at hand: it looks back over about so many drafts.
constexpr int64_t kRateMemory = 64;

}  // namespace

int64_t DraftDepth::Times::Typical() const {
  std::array<int64_t, kKept> sorted = ns;
  const auto end = sorted.begin() + static_cast<int64_t>(std::min<uint64_t>(count, kKept));
  const auto quartile = sorted.begin() + (end - sorted.begin() - 1) / 4;
  std::nth_element(sorted.begin(), quartile, end);
  return *quartile;
}

int64_t DraftDepth::Choose(int64_t streams) {
  if (pinned_.has_value()) return *pinned_;
  Batch& batch = batches_[streams];
  for (int64_t depth = 0; depth <= kMax; ++depth) {
    if (batch.times[static_cast<size_t>(depth)].count < kSamplesMin) return depth;
  }
  const int64_t best = Best(batch);
  if (++batch.steps % kLookEvery != 0) return best;
  if (batch.next_look == best) batch.next_look = (batch.next_look + 1) % (kMax + 1);
  return std::exchange(batch.next_look, (batch.next_look + 1) % (kMax + 1));
}

int64_t DraftDepth::Best(const Batch& batch) const {
  int64_t best = 0;
  double best_rate = 0;
  for (int64_t depth = 0; depth <= kMax; ++depth) {
    const double rate = TokensPerStep(depth) / static_cast<double>(std::max<int64_t>(batch.times[static_cast<size_t>(depth)].Typical(), 1));
    if (rate <= best_rate * (depth == 0 ? 1.0 : kGainMin)) continue;
    best = depth;
    best_rate = rate;
  }
  return best;
}

void DraftDepth::Observe(int64_t streams, int64_t depth, int64_t duration_ns) {
  Times& times = batches_[streams].times[static_cast<size_t>(depth)];
  times.ns[times.count++ % Times::kKept] = duration_ns;
}

void DraftDepth::ObserveDraft(int64_t index, bool accepted) {
  Rate& rate = rates_[static_cast<size_t>(index)];
  rate.count = std::min(rate.count + 1, kRateMemory);
  rate.value += ((accepted ? 1.0 : 0.0) - rate.value) / static_cast<double>(rate.count);
}

double DraftDepth::TokensPerStep(int64_t depth) const {
  double tokens = 1, all_hold = 1;
  for (int64_t i = 0; i < depth; ++i) tokens += all_hold *= rates_[static_cast<size_t>(i)].value;
  return tokens;
}

}  // namespace hearth
