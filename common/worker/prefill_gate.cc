#include "common/worker/prefill_gate.h"

#include <algorithm>

#include "common/base/ceil_div.h"
#include "common/base/time.h"

namespace hearth {
namespace {

// An op that has waited for so many times its own length starts, whatever the words say.
constexpr int64_t kPatience = 20;
constexpr int64_t kPatienceMinNs = 200'000'000;
constexpr int64_t kPatienceMaxNs = 2'000'000'000;
// Decode publishes behind every step; one that has been silent for so long is stopped, or in something that is no step.
constexpr int64_t kStaleNs = 5'000'000'000;
// A waiting op looks again so often: whether decode still lives, above all.
constexpr int64_t kLookNs = 5'000'000;
// Decode's windows have two milliseconds at least; what wakes up for one must still fit.
constexpr int64_t kPartNs = 1'500'000;
// Rates of some CPU: only to weigh arithmetic against traffic.
constexpr double kFlopsPerNs = 100;
constexpr double kBytesPerNs = 20;
constexpr int64_t kOpMinNs = 1000;

double NominalNs(const OpCost& cost) { return static_cast<double>(kOpMinNs) + cost.flops / kFlopsPerNs + cost.bytes() / kBytesPerNs; }

uint64_t Word(const ProcessId& owner) { return owner.start_ticks << 24 ^ static_cast<uint64_t>(owner.pid); }

}  // namespace

int64_t OpClock::Expect(int kind, const OpCost& cost) const {
  const double slower = slower_[static_cast<size_t>(kind)].load(std::memory_order_relaxed);
  return static_cast<int64_t>(NominalNs(cost) * (slower > 0 ? slower : 1));
}

void OpClock::Observe(int kind, const OpCost& cost, int64_t ns) {
  std::atomic<double>& slower = slower_[static_cast<size_t>(kind)];
  const double before = slower.load(std::memory_order_relaxed);
  const double now = static_cast<double>(ns) / NominalNs(cost);
  // Two threads may run ops of a kind at once: one observation is lost then, which costs nothing.
  const double weight = now > before ? 0.5 : 0.1;
  slower.store(before > 0 ? before + weight * (now - before) : now, std::memory_order_relaxed);
}

PrefillGate::PrefillGate(std::shared_ptr<TurnBoard> board, int slot, const CpuSet& cpus) : board_(std::move(board)), slot_(slot), cpus_(cpus) {}

PrefillGate::~PrefillGate() { PassEnded(); }

std::optional<int> PrefillGate::BlockedBy(int64_t expected_ns, int64_t now_ns) const {
  for (int slot = 0; slot < kTurnSlotsOfAKind; ++slot) {
    const std::optional<Turn> turn = board_->Read(slot, cpus_);
    if (!turn.has_value() || turn->value_ns == 0 || now_ns - turn->published_ns > kStaleNs) continue;
    if (now_ns + expected_ns <= turn->value_ns) continue;
    if (gone_[static_cast<size_t>(slot)].load(std::memory_order_relaxed) != Word(board_->Owner(slot))) return slot;
  }
  return std::nullopt;
}

void PrefillGate::Before(int kind, const OpCost& cost) {
  ops_.fetch_add(1, std::memory_order_relaxed);
  const int64_t expected_ns = std::max<int64_t>(clock_.Expect(kind, cost), 1);
  const int64_t begin_ns = MonotonicNowNs();
  Ask(expected_ns, begin_ns);
  if (BlockedBy(expected_ns, begin_ns).has_value()) Await(expected_ns, begin_ns);
}

int64_t PrefillGate::Parts(int kind, const OpCost& cost) {
  constexpr int64_t kNoWindowIsSoLong = int64_t{1} << 60;
  const int64_t expected_ns = clock_.Expect(kind, cost);
  if (expected_ns <= kPartNs || !BlockedBy(kNoWindowIsSoLong, MonotonicNowNs()).has_value()) return 1;
  return CeilDiv(expected_ns, kPartNs);
}

void PrefillGate::Await(int64_t expected_ns, int64_t begin_ns) {
  {
    std::lock_guard lock(ask_mutex_);
    waiting_.push_back(expected_ns);
  }
  board_->Ring(slot_);  // decode may stand aside for an op that does not fit what is left
  const int64_t end_ns = begin_ns + std::clamp(kPatience * expected_ns, kPatienceMinNs, kPatienceMaxNs);
  int64_t now_ns = begin_ns, looked_ns = begin_ns;
  std::optional<int> blocked = BlockedBy(expected_ns, now_ns);
  while (blocked.has_value() && now_ns < end_ns && !open_.load(std::memory_order_acquire)) {
    const uint32_t bell = board_->Bell(*blocked);
    const std::optional<int> still = BlockedBy(expected_ns, now_ns);  // what was published before this look at the bell rings no more
    if (still == blocked) board_->Wait(*blocked, bell, std::min(kLookNs, end_ns - now_ns));
    now_ns = MonotonicNowNs();
    if (now_ns - looked_ns >= kLookNs) {
      looked_ns = now_ns;
      if (const ProcessId owner = board_->Owner(*blocked); !IsAlive(owner)) gone_[static_cast<size_t>(*blocked)].store(Word(owner));
      Ask(expected_ns, now_ns);
    }
    blocked = BlockedBy(expected_ns, now_ns);
  }
  {
    std::lock_guard lock(ask_mutex_);
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), expected_ns));
  }
  held_back_.fetch_add(1, std::memory_order_relaxed);
  if (blocked.has_value()) forced_.fetch_add(1, std::memory_order_relaxed);
  waited_ns_.fetch_add(now_ns - begin_ns, std::memory_order_relaxed);
}

void PrefillGate::Ask(int64_t expected_ns, int64_t now_ns) {
  std::lock_guard lock(ask_mutex_);
  for (const int64_t each : waiting_) expected_ns = std::max(expected_ns, each);
  board_->Publish(slot_, expected_ns, now_ns);
}

void PrefillGate::PassEnded() {
  std::lock_guard lock(ask_mutex_);
  board_->Publish(slot_, 0, MonotonicNowNs());
  board_->Ring(slot_);
}

PrefillGate::Counts PrefillGate::counts() const {
  return {.ops = ops_.load(), .held_back = held_back_.load(), .forced = forced_.load(), .waited_ns = waited_ns_.load()};
}

bool PrefillGate::shares_cores() const {
  for (int slot = 0; slot < kTurnSlotsOfAKind; ++slot) {
    if (board_->Read(slot, cpus_).has_value() && IsAlive(board_->Owner(slot))) return true;
  }
  return false;
}

}  // namespace hearth
