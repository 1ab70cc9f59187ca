// Decode's side of taking turns with prefill workers on the same cores: names the moment until which they may run (common/shm/turn_board.h), and stands
// aside until then, for as long as its slack allows (slack.h).
// Room: services/decode. May touch: common/{shm,base}. Threads: the loop; Look from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "common/shm/turn_board.h"
#include "services/decode/slack.h"

namespace hearth {

class DecodeTurns {
 public:
  // `board` null: nobody is there to take turns with. `slot`: claimed by this process.
  DecodeTurns(std::shared_ptr<TurnBoard> board, int slot, const CpuSet& cpus);
  ~DecodeTurns();

  // Streams are decoded from now on: others run only when they are let.
  void Busy();
  // None is: others run as they like.
  void Free();
  // Whether a prefill worker has an op to run now.
  bool Asked() const { return MostAsked().op_ns > 0; }
  // Between two steps: lets others run if `slack` has what they ask for by now, and returns when that time is over, nobody asks any more,
  // or what is asked for no longer fits. False: nobody asked, or the slack must still be saved up.
  bool GiveWay(Slack& slack);

  struct Counts {
    uint64_t windows = 0;  // times that it stood aside
    int64_t given_ns = 0;  // for so long in all
  };
  Counts Look() const { return {windows_.load(std::memory_order_relaxed), given_ns_.load(std::memory_order_relaxed)}; }

 private:
  struct Ask {
    int64_t op_ns = 0;  // 0: nobody asks
    int64_t published_ns = 0;
    int slot = 0;
  };
  // The longest op that a prefill worker on these cores waits to run, or runs.
  Ask MostAsked() const;

  const std::shared_ptr<TurnBoard> board_;
  const int slot_;
  const CpuSet cpus_;
  bool busy_ = false;
  std::atomic<uint64_t> windows_{0};
  std::atomic<int64_t> given_ns_{0};
};

}  // namespace hearth
