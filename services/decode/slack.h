// How much time decode can give away and still keep its streams' pace: what its steps leave of the target, added up.
// Room: services/decode. May touch: nothing. Threads: the loop. Times are nanoseconds of the caller's clock.
//
// The target is a time per output token (decode.tpot_target_ms), or, where none is set, a step's own time and a share more. A step's own time is measured,
// for each number of streams: the faster quarter of the last steps, so that steps that something disturbed do not raise what they are measured by. A
// step that leaves nothing still earns a share of its own time: whoever waits is never starved.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

namespace hearth {

class Slack {
 public:
  struct Options {
    int64_t tpot_target_ns = 0;  // 0: measured
    double rise = 0.2;           // of a step's own time, where the target is measured
    double share_min = 0.1;      // of a step's own time that it earns at least
  };
  explicit Slack(Options options) : options_(options) {}

  // A step of so many streams, each of which got so many tokens on average.
  void AfterStep(int64_t streams, double tokens_a_stream, int64_t step_ns);
  // Saved up for who needs so much at once; more is of no use to anybody and lapses, but for what the last step earned.
  void Keep(int64_t most_ns) { available_ns_ = std::min(available_ns_, std::max(most_ns, earned_ns_)); }
  // Below zero by what was taken too much.
  void Spend(int64_t ns) { available_ns_ -= ns; }

  int64_t available_ns() const { return available_ns_; }
  // Of the time from step to step that others get, as the last dozens of steps had it; 0: no step yet.
  double share() const { return mean_earned_ns_ == 0 ? 0 : mean_earned_ns_ / (mean_earned_ns_ + mean_step_ns_); }

 private:
  int64_t Alone(int64_t streams, int64_t step_ns);

  const Options options_;
  std::vector<std::deque<int64_t>> steps_ns_;  // by number of streams, the newest
  int64_t earned_ns_ = 0;                      // by the last step
  double mean_earned_ns_ = 0, mean_step_ns_ = 0;
  int64_t available_ns_ = 0;
};

}  // namespace hearth
