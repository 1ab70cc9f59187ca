// What a pass over prompt tokens takes on one path of a node, and how that is learned from passes that were timed.
// Room: common/roofline. May touch: common/base. Threads: plain values; a PassFit belongs to one thread.
//
// A pass takes  fixed + per_token * tokens + per_position * positions,  positions being what its tokens attend to, summed over them. That is the shape of
// the op costs (common/device/op_cost.h): weights are read once a pass, matrix products grow with the tokens, attention with tokens times context.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace hearth {

struct PassWork {
  double tokens = 0;
  double positions = 0;

  PassWork& operator+=(const PassWork& o) {
    tokens += o.tokens;
    positions += o.positions;
    return *this;
  }
};
// Of `tokens` tokens of one prompt behind `before` others.
PassWork WorkOf(int64_t before, int64_t tokens);

struct PassCost {
  double fixed_s = 0;
  double per_token_s = 0;
  double per_position_s = 0;

  double Seconds(const PassWork& work, double passes = 1) const {
    return passes * fixed_s + per_token_s * work.tokens + per_position_s * work.positions;
  }
};

struct TimedPass {
  PassWork work;
  double seconds = 0;
  double passes = 1;  // or several behind each other, timed together
};

// The cost that fits the passes seen so far: no coefficient negative, errors relative to each pass's own time, so that short and long ones count alike,
// and passes that fit badly (something else had the machine) count less. Passes of like size replace each other, so a thousand equal chunks do
// not make it forget the one long prompt. What the passes leave open stays as it was started, or is shared out evenly between the three terms.
class PassFit {
 public:
  // What is believed before anything was measured; later only its shape: how passes that were not seen compare to those that were. `shape_only`: of a
  // machine that is not this one, so nothing is believed before the first pass.
  void StartFrom(const PassCost& start, bool shape_only = false);
  void Add(const TimedPass& pass);
  // None: nothing was measured, and nothing was believed before.
  std::optional<PassCost> cost() const;
  int64_t passes_seen() const { return passes_seen_; }

 private:
  std::optional<PassCost> start_;
  bool shape_only_ = false;
  std::map<std::pair<int, int>, std::deque<TimedPass>> by_size_;
  int64_t passes_seen_ = 0;
  mutable std::optional<PassCost> fitted_;  // none: to be fitted anew
};

}  // namespace hearth
