// Prefill's side of taking turns with decode on the same cores: an op starts only if it is expected to end before the moment that decode has named
// (common/shm/turn_board.h), and waits otherwise; while decode has no stream, is gone or silent, and where it computes on other cores, at once.
// Room: common/worker. May touch: common/{device,shm,base}. Threads: any; ops of a pass's several threads wait for themselves.
// No wait is long: an op that was held back for twenty times its own length, and at least 0.2 s, starts anyway, whatever any word says; none waits for more
// than two seconds.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/device/gated_device.h"
#include "common/shm/turn_board.h"

namespace hearth {

// What an op of a kind takes, from what its like took: a share of the time that nominal rates would give it. Follows slower ops at once, faster ones slowly.
class OpClock {
 public:
  int64_t Expect(int kind, const OpCost& cost) const;
  void Observe(int kind, const OpCost& cost, int64_t ns);

 private:
  std::array<std::atomic<double>, kOpKinds> slower_{};  // than nominal; 0: not seen yet
};

class PrefillGate : public OpGate {
 public:
  struct Counts {
    uint64_t ops = 0;
    uint64_t held_back = 0;  // ops that waited for decode
    uint64_t forced = 0;     // of them, those that started though their turn had not come
    int64_t waited_ns = 0;   // all of them together
  };

  // `slot`: this worker's own, claimed. `cpus`: where it computes.
  PrefillGate(std::shared_ptr<TurnBoard> board, int slot, const CpuSet& cpus);
  ~PrefillGate() override;

  void Before(int kind, const OpCost& cost) override;
  void After(int kind, const OpCost& cost, int64_t ns) override { clock_.Observe(kind, cost, ns); }
  // While decode has streams, parts that fit its shortest windows; whole ops else.
  int64_t Parts(int kind, const OpCost& cost) override;
  // The pass is over: decode need not leave it time any more.
  void PassEnded();
  // Everybody waits no longer, from now on: the process is to end.
  void Open() { open_.store(true, std::memory_order_release); }

  Counts counts() const;
  // Some decode worker computes on the same cores.
  bool shares_cores() const;

 private:
  // The first decode slot that does not let an op of so many ns start now; none: it may.
  std::optional<int> BlockedBy(int64_t expected_ns, int64_t now_ns) const;
  // Publishes the longest of what waits and this one, which is about to start.
  void Ask(int64_t expected_ns, int64_t now_ns);
  // Waits until it may start, or its patience is over.
  void Await(int64_t expected_ns, int64_t begin_ns);

  const std::shared_ptr<TurnBoard> board_;
  const int slot_;
  const CpuSet cpus_;
  OpClock clock_;
  std::atomic<bool> open_{false};
  std::mutex ask_mutex_;          // the slot's word has one writer at a time
  std::vector<int64_t> waiting_;  // what the ops that wait are expected to take; under the mutex
  // Owners of decode slots that were found gone: start time and pid in one word. The word they left is not waited for again.
  std::array<std::atomic<uint64_t>, kTurnSlotsOfAKind> gone_{};
  std::atomic<uint64_t> ops_{0}, held_back_{0}, forced_{0};
  std::atomic<int64_t> waited_ns_{0};
};

}  // namespace hearth
