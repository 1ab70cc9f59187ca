#include "services/decode/slack.h"

#include <cmath>

namespace hearth {
namespace {

constexpr size_t kStepsKept = 32;

}  // namespace

int64_t Slack::Alone(int64_t streams, int64_t step_ns) {
  if (static_cast<size_t>(streams) >= steps_ns_.size()) steps_ns_.resize(static_cast<size_t>(streams) + 1);
  std::deque<int64_t>& steps = steps_ns_[static_cast<size_t>(streams)];
  steps.push_back(step_ns);
  if (steps.size() > kStepsKept) steps.pop_front();
  std::vector<int64_t> sorted(steps.begin(), steps.end());
  const auto quarter = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 4);
  std::nth_element(sorted.begin(), quarter, sorted.end());
  return *quarter;
}

void Slack::AfterStep(int64_t streams, double tokens_a_stream, int64_t step_ns) {
  if (streams < 1) return;
  const double own = static_cast<double>(Alone(streams, step_ns));
  const double target =
      options_.tpot_target_ns > 0 ? static_cast<double>(options_.tpot_target_ns) * std::max(tokens_a_stream, 1.0) : own * (1 + options_.rise);
  earned_ns_ = std::llround(std::max(target - static_cast<double>(step_ns), options_.share_min * own));
  available_ns_ += earned_ns_;
  const double weight = mean_earned_ns_ == 0 ? 1 : 1.0 / kStepsKept;
  mean_earned_ns_ += weight * (static_cast<double>(earned_ns_) - mean_earned_ns_);
  mean_step_ns_ += weight * (static_cast<double>(step_ns) - mean_step_ns_);
}

}  // namespace hearth
