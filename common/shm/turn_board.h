// Words by which workers that compute on the same cores (or the same GPU) take turns: decode says until when others may run, prefill says what it would
// run next. Contract: docs/shared-memory.md, "Turn board". Nobody is ever held by a word for long: it is a courtesy, not a lock, and each side
// bounds its own wait.
// Room: common/shm. May touch: common/base. Processes: the store makes the region; each slot has one writer, the worker that claimed it; all workers read.
// If a writer dies at any instruction: its slot names a process that is gone, and says nothing; the next worker of its name takes it.
#pragma once

#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "common/base/process.h"
#include "common/base/status.h"
#include "common/shm/region.h"

namespace hearth {

inline constexpr uint64_t kTurnBoardVersion = 1;
inline constexpr std::string_view kTurnBoardWhat = "turns";  // hearth.<node>.turns.<generation>
inline constexpr int kTurnSlotsOfAKind = 16;                 // as many as there may be instances
inline constexpr int kTurnSlots = 2 * kTurnSlotsOfAKind;     // decode's, then prefill's
inline constexpr size_t kTurnCpusMax = 1024;
inline constexpr int DecodeTurnSlot(int64_t index) { return static_cast<int>(index); }
inline constexpr int PrefillTurnSlot(int64_t index) { return kTurnSlotsOfAKind + static_cast<int>(index); }

using CpuSet = std::bitset<kTurnCpusMax>;
// The cores that this process may run on.
CpuSet CpusOfThisProcess();

// What a slot says; published_ns and the other two are of one moment.
struct Turn {
  // Decode, `prefill_until_ns`: an op of prefill may start if it is expected to end before; 0: free, nothing is decoded here. Prefill, `asks_ns`: what the
  // next op is expected to take; 0: it has none.
  int64_t value_ns = 0;
  int64_t published_ns = 0;  // CLOCK_MONOTONIC
};

struct TurnSlot {
  // The writer: pid 0 first, then cores and start time, then the pid (release).
  std::atomic<int32_t> pid;
  uint32_t reserved;
  std::atomic<uint64_t> start_ticks;
  std::atomic<uint64_t> cpus[kTurnCpusMax / 64];
  // A seqlock over the turn: odd while the writer is in it.
  std::atomic<uint32_t> sequence;
  std::atomic<uint32_t> bell;  // +1 behind each publication that somebody may sleep for; a futex
  std::atomic<int64_t> value_ns;
  std::atomic<int64_t> published_ns;
  uint8_t pad[88];
};
static_assert(sizeof(TurnSlot) == 256 && offsetof(TurnSlot, cpus) == 16 && offsetof(TurnSlot, sequence) == 144 &&
              offsetof(TurnSlot, value_ns) == 152);
static_assert(std::atomic<int64_t>::is_always_lock_free);

class TurnBoard {
 public:
  // All slots free; leaves the region READY. Errors: as ShmRegion::Create.
  static absl::StatusOr<std::shared_ptr<TurnBoard>> Create(const RegionPlace& place, const Hash128& generation);
  // Errors: as ShmRegion::Open; FailedPrecondition when not READY; DataLoss for another size or generation.
  static absl::StatusOr<std::shared_ptr<TurnBoard>> Attach(const RegionPlace& place, const Hash128& generation);
  // In private memory, for tests and measurements.
  static std::shared_ptr<TurnBoard> InMemory();

  // Makes the slot this process's own. AlreadyExists while another process that lives has it.
  absl::Status Claim(int slot, const ProcessId& self, const CpuSet& cpus);
  // By the slot's owner, one thread at a time.
  void Publish(int slot, int64_t value_ns, int64_t now_ns);
  // Wakes who sleeps for the slot.
  void Ring(int slot);

  // None: nobody has claimed it, its owner computes on other cores than `cpus`, or no whole turn could be read (a writer that died in the middle leaves
  // such a slot). Does not ask whether the owner lives.
  std::optional<Turn> Read(int slot, const CpuSet& cpus) const;
  ProcessId Owner(int slot) const;  // pid 0: nobody
  // Until the bell is rung after `seen`, or the time is over.
  uint32_t Bell(int slot) const { return slots_[slot].bell.load(std::memory_order_acquire); }
  void Wait(int slot, uint32_t seen, int64_t timeout_ns) const;

  // Null for InMemory.
  ShmRegion* region() { return region_.has_value() ? &*region_ : nullptr; }

 private:
  TurnBoard() = default;
  std::optional<ShmRegion> region_;
  std::unique_ptr<TurnSlot[]> private_slots_;
  TurnSlot* slots_ = nullptr;
};

}  // namespace hearth
