#include "common/shm/turn_board.h"

#include <sched.h>

#include "common/base/publish_point.h"
#include "common/shm/futex.h"

namespace hearth {
namespace {

constexpr uint64_t kBodyBytes = kTurnSlots * sizeof(TurnSlot);
constexpr int kReadTries = 64;  // a publication takes nanoseconds; its writer may be off its core for longer, and then the word says nothing

}  // namespace

CpuSet CpusOfThisProcess() {
  CpuSet cpus;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cpus.set();
  for (size_t cpu = 0; cpu < kTurnCpusMax && cpu < CPU_SETSIZE; ++cpu) cpus.set(cpu, CPU_ISSET(cpu, &set));
  return cpus;
}

absl::StatusOr<std::shared_ptr<TurnBoard>> TurnBoard::Create(const RegionPlace& place, const Hash128& generation) {
  ASSIGN_OR_RETURN(ShmRegion region,
                   ShmRegion::Create(place.Path(kTurnBoardWhat, generation), RegionKind::kTurnBoard, kTurnBoardVersion, generation, kBodyBytes));
  // Fresh shared memory is zero: no slot has an owner.
  region.SetState(RegionState::kReady);
  return Attach(place, generation);
}

absl::StatusOr<std::shared_ptr<TurnBoard>> TurnBoard::Attach(const RegionPlace& place, const Hash128& generation) {
  const std::string path = place.Path(kTurnBoardWhat, generation);
  ASSIGN_OR_RETURN(ShmRegion region, ShmRegion::Open(path, RegionKind::kTurnBoard, kTurnBoardVersion, MapMode::kReadWrite));
  if (region.header().generation != generation || region.body_bytes() < kBodyBytes) {
    return absl::DataLossError(absl::StrCat(path, ": of another generation or size"));
  }
  if (region.state() != RegionState::kReady) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": not READY, its maker died while creating it"));
  }
  std::shared_ptr<TurnBoard> board(new TurnBoard());
  board->slots_ = reinterpret_cast<TurnSlot*>(region.body());
  board->region_ = std::move(region);
  return board;
}

std::shared_ptr<TurnBoard> TurnBoard::InMemory() {
  std::shared_ptr<TurnBoard> board(new TurnBoard());
  board->private_slots_ = std::make_unique<TurnSlot[]>(kTurnSlots);
  board->slots_ = board->private_slots_.get();
  return board;
}

absl::Status TurnBoard::Claim(int slot, const ProcessId& self, const CpuSet& cpus) {
  TurnSlot& mine = slots_[slot];
  const ProcessId before = Owner(slot);
  if (before.pid != 0 && before != self && IsAlive(before)) {
    return absl::AlreadyExistsError(absl::StrCat("turn slot ", slot, " is process ", before.pid, "'s, which lives"));
  }
  mine.pid.store(0, std::memory_order_release);
  for (size_t word = 0; word < kTurnCpusMax / 64; ++word) {
    uint64_t bits = 0;
    for (size_t bit = 0; bit < 64; ++bit) bits |= static_cast<uint64_t>(cpus[word * 64 + bit]) << bit;
    mine.cpus[word].store(bits, std::memory_order_relaxed);
  }
  mine.start_ticks.store(self.start_ticks, std::memory_order_relaxed);
  // A writer that died in a publication left the sequence odd.
  if (mine.sequence.load(std::memory_order_relaxed) % 2 != 0) mine.sequence.fetch_add(1, std::memory_order_relaxed);
  Publish(slot, 0, 0);
  PublishPoint("turn.claim");
  mine.pid.store(self.pid, std::memory_order_release);
  return absl::OkStatus();
}

void TurnBoard::Publish(int slot, int64_t value_ns, int64_t now_ns) {
  TurnSlot& mine = slots_[slot];
  const uint32_t sequence = mine.sequence.load(std::memory_order_relaxed);
  mine.sequence.store(sequence + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // odd before the first word
  mine.value_ns.store(value_ns, std::memory_order_relaxed);
  PublishPoint("turn.value");
  mine.published_ns.store(now_ns, std::memory_order_relaxed);
  mine.sequence.store(sequence + 2, std::memory_order_release);
}

void TurnBoard::Ring(int slot) {
  slots_[slot].bell.fetch_add(1, std::memory_order_release);
  FutexWake(slots_[slot].bell);
}

std::optional<Turn> TurnBoard::Read(int slot, const CpuSet& cpus) const {
  const TurnSlot& its = slots_[slot];
  if (its.pid.load(std::memory_order_acquire) == 0) return std::nullopt;
  bool shares_a_core = false;
  for (size_t word = 0; word < kTurnCpusMax / 64 && !shares_a_core; ++word) {
    const uint64_t bits = its.cpus[word].load(std::memory_order_relaxed);
    for (size_t bit = 0; bits != 0 && bit < 64 && !shares_a_core; ++bit) shares_a_core = (bits >> bit & 1) != 0 && cpus[word * 64 + bit];
  }
  if (!shares_a_core) return std::nullopt;
  for (int i = 0; i < kReadTries; ++i) {
    const uint32_t before = its.sequence.load(std::memory_order_acquire);
    const Turn turn{.value_ns = its.value_ns.load(std::memory_order_relaxed), .published_ns = its.published_ns.load(std::memory_order_relaxed)};
    std::atomic_thread_fence(std::memory_order_acquire);  // the words before the second look
    if (before % 2 == 0 && its.sequence.load(std::memory_order_relaxed) == before) return turn;
  }
  return std::nullopt;
}

ProcessId TurnBoard::Owner(int slot) const {
  ProcessId owner;
  owner.pid = slots_[slot].pid.load(std::memory_order_acquire);
  owner.start_ticks = slots_[slot].start_ticks.load(std::memory_order_relaxed);
  return owner;
}

void TurnBoard::Wait(int slot, uint32_t seen, int64_t timeout_ns) const { FutexWait(slots_[slot].bell, seen, timeout_ns); }

}  // namespace hearth
