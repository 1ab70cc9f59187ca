// How many drafts a step verifies. A verified draft reads more experts, so what depth pays depends on the model, the text, the machine and the batch:
// it is measured. `Observe` learns what steps take and which drafts hold, `Choose` takes the depth that yields the most tokens a second, looks at the
// others now and then, and falls to 0 where drafts lose. The choice never changes a token (DESIGN section 7), only when it comes.
// Room: services/decode. May touch: common/base. Threads: the loop only. No clock of its own: a caller's clock may be a virtual one.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace hearth {

class DraftDepth {
 public:
  static constexpr int64_t kMax = 3;  // behind two wrong guesses a third is rarely right, and every one is a row of the step

  // `pinned`: always this depth; none: measured.
  explicit DraftDepth(std::optional<int64_t> pinned) : pinned_(pinned) {}

  // For a step of so many streams.
  int64_t Choose(int64_t streams);
  // A step of so many streams, each with `depth` drafts, took so long, drafting included.
  void Observe(int64_t streams, int64_t depth, int64_t duration_ns);
  // Draft `index` of a stream, with all before it accepted, was compared with the model's own token.
  void ObserveDraft(int64_t index, bool accepted);

  // Tokens that a stream's step yields with so many drafts: 1 + a0 + a0 a1 + ..., a_i the rate at which draft i holds where those before it did.
  double TokensPerStep(int64_t depth) const;

 private:
  // The last few steps' times. What disturbs a step makes it longer, never shorter: their lower quartile is deaf to it, and forgets as contexts grow.
  struct Times {
    static constexpr size_t kKept = 9;
    std::array<int64_t, kKept> ns{};
    uint64_t count = 0;
    int64_t Typical() const;
  };
  struct Batch {
    std::array<Times, kMax + 1> times;
    int64_t steps = 0;
    int64_t next_look = 0;  // depth to be looked at next
  };
  int64_t Best(const Batch& batch) const;

  const std::optional<int64_t> pinned_;
  std::map<int64_t, Batch> batches_;  // by number of streams
  // Begins as if a few drafts had been seen that mostly hold: the first real ones must not decide for long.
  struct Rate {
    double value = 0.8;
    int64_t count = 4;
  };
  std::array<Rate, kMax> rates_;
};

}  // namespace hearth
