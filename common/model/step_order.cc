#include "common/model/step_order.h"

#include <algorithm>

namespace hearth {
namespace {

constexpr const char* kNames[kNumStepOrders] = {"joint", "plain", "alternate"};

}  // namespace

const char* StepOrderName(StepOrder order) { return kNames[static_cast<int>(order)]; }

std::optional<StepOrder> StepOrderFromName(std::string_view name) {
  for (int i = 0; i < kNumStepOrders; ++i) {
    if (name == kNames[i]) return static_cast<StepOrder>(i);
  }
  return std::nullopt;
}

StepOrder StepOrderChooser::Next(int64_t streams, int64_t rows) const {
  if (pinned_.has_value()) return *pinned_;
  if (!Measured(streams, rows)) return StepOrder::kJoint;
  const auto found = entries_.find(streams);
  const Entry& entry = found == entries_.end() ? Entry{} : found->second;
  return entry.in_round ? static_cast<StepOrder>(entry.next_in_round) : entry.chosen;
}

void StepOrderChooser::Add(int64_t streams, int64_t rows, StepOrder order, int64_t ns) {
  if (!Measured(streams, rows)) return;
  Entry& entry = entries_[streams];
  const size_t o = static_cast<size_t>(order);
  if (pinned_.has_value()) {
    entry.ns[o][static_cast<size_t>(entry.samples[o]++ % kRounds)] = ns;
    entry.chosen = order;
    return;
  }
  if (!entry.in_round) {
    entry.in_round = ++entry.steps_since_round >= kStepsBetweenRounds;
    return;
  }
  entry.ns[o][static_cast<size_t>(entry.samples[o]++ % kRounds)] = ns;
  if (++entry.next_in_round < kNumStepOrders) return;
  entry.next_in_round = 0;
  if (entry.samples[o] < kRounds) return;
  Decide(entry);
  entry.in_round = false;
  entry.steps_since_round = 0;
}

void StepOrderChooser::Decide(Entry& entry) {
  double best = static_cast<double>(Median(entry, static_cast<int>(entry.chosen))) * kWorth;
  for (int order = 0; order < kNumStepOrders; ++order) {
    const double median = static_cast<double>(Median(entry, order));
    if (median >= best) continue;
    best = median;
    entry.chosen = static_cast<StepOrder>(order);
  }
}

int64_t StepOrderChooser::Median(const Entry& entry, int order) {
  const size_t o = static_cast<size_t>(order);
  std::array<int64_t, kRounds> sorted = entry.ns[o];
  const int64_t count = std::min<int64_t>(entry.samples[o], kRounds);
  if (count == 0) return 0;
  std::nth_element(sorted.begin(), sorted.begin() + count / 2, sorted.begin() + count);
  return sorted[static_cast<size_t>(count / 2)];
}

std::vector<StepOrderTimes> StepOrderChooser::Look() const {
  std::vector<StepOrderTimes> all;
  for (const auto& [streams, entry] : entries_) {
    StepOrderTimes times{.streams = streams, .chosen = entry.chosen};
    times.decided = pinned_.has_value() || entry.samples.back() >= kRounds;
    for (int order = 0; order < kNumStepOrders; ++order)
      times.median_ms[static_cast<size_t>(order)] = static_cast<double>(Median(entry, order)) / 1e6;
    all.push_back(times);
  }
  return all;
}

}  // namespace hearth
