// In what order a decode step's work is done, and the choice among the orders by their measured times ([SLO] 3.4: alternating pays only where attention
// and experts take about equally long).
// Room: common/model. May touch: common/base. Threads: one step loop. Deciding moves time, never a bit of a result (DESIGN section 7).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

namespace hearth {

enum class StepOrder {
  kJoint,      // all rows in one batch
  kPlain,      // two micro-batches, one behind the other
  kAlternate,  // two micro-batches: one in attention while the other is in its experts
};
inline constexpr int kNumStepOrders = 3;

const char* StepOrderName(StepOrder order);  // "joint", "plain", "alternate"
std::optional<StepOrder> StepOrderFromName(std::string_view name);

// Times of steps that so many streams shared.
struct StepOrderTimes {
  int64_t streams = 0;
  StepOrder chosen = StepOrder::kJoint;
  bool decided = false;                            // false: still measuring
  std::array<double, kNumStepOrders> median_ms{};  // of the last rounds; 0: not measured
};

// Picks an order for each number of streams. The orders are compared in rounds, each order once in neighbouring steps, so that what drifts (contexts that
// grow, a machine that is shared) weighs on all alike: eight rounds at first, then one every 256 steps. Medians decide.
class StepOrderChooser {
 public:
  explicit StepOrderChooser(std::optional<StepOrder> pinned) : pinned_(pinned) {}

  // For the next step of so many streams, two or more, that have so many rows together.
  StepOrder Next(int64_t streams, int64_t rows) const;
  // Such a step took so long. Steps that failed are not told.
  void Add(int64_t streams, int64_t rows, StepOrder order, int64_t ns);
  // What was measured, ascending by streams.
  std::vector<StepOrderTimes> Look() const;

 private:
  static constexpr int kRounds = 8;
  static constexpr int64_t kStepsBetweenRounds = 256;
  // More rows a stream than a token and its drafts make: some of them catch up. Such steps run joint and unmeasured: they are rare, and no two are alike.
  static constexpr int64_t kRowsOfAStream = 4;
  // Another order than the present one must be faster by so much: what is within the noise is left as it is.
  static constexpr double kWorth = 0.97;

  struct Entry {
    std::array<std::array<int64_t, kRounds>, kNumStepOrders> ns{};
    std::array<int64_t, kNumStepOrders> samples{};
    StepOrder chosen = StepOrder::kJoint;
    int64_t steps_since_round = 0;
    bool in_round = true;
    int next_in_round = 0;
  };
  static bool Measured(int64_t streams, int64_t rows) { return rows <= kRowsOfAStream * streams; }
  static int64_t Median(const Entry& entry, int order);
  static void Decide(Entry& entry);

  const std::optional<StepOrder> pinned_;
  std::map<int64_t, Entry> entries_;  // by streams
};

}  // namespace hearth
