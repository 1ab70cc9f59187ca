#include "services/decode/decode_turns.h"

#include <algorithm>

#include "common/base/publish_point.h"
#include "common/base/time.h"

namespace hearth {
namespace {

// Less is not worth two wake-ups of two thread pools.
constexpr int64_t kWindowMinNs = 2'000'000;
// From the word to an op that starts by it.
constexpr int64_t kWakeUpNs = 100'000;
// No op is waited for longer; prefill's own patience lets it start.
constexpr int64_t kWindowMaxNs = 1'000'000'000;
// An ask that was not repeated for so long, or twice what its op takes, is of a pass that has ended or of a process that is gone.
constexpr int64_t kAskLastsNs = 20'000'000;

}  // namespace

DecodeTurns::DecodeTurns(std::shared_ptr<TurnBoard> board, int slot, const CpuSet& cpus) : board_(std::move(board)), slot_(slot), cpus_(cpus) {}

DecodeTurns::~DecodeTurns() { Free(); }

void DecodeTurns::Busy() {
  if (board_ == nullptr) return;
  // A moment that is over; published anew before each step, so that readers see that it is still meant.
  const int64_t now_ns = MonotonicNowNs();
  board_->Publish(slot_, now_ns, now_ns);
  busy_ = true;
}

void DecodeTurns::Free() {
  if (board_ == nullptr || !busy_) return;
  busy_ = false;
  board_->Publish(slot_, 0, MonotonicNowNs());
  board_->Ring(slot_);
}

DecodeTurns::Ask DecodeTurns::MostAsked() const {
  Ask most;
  if (board_ == nullptr) return most;
  const int64_t now_ns = MonotonicNowNs();
  for (int slot = kTurnSlotsOfAKind; slot < kTurnSlots; ++slot) {
    const std::optional<Turn> turn = board_->Read(slot, cpus_);
    if (!turn.has_value()) continue;
    const int64_t op_ns = std::min(turn->value_ns, kWindowMaxNs);
    if (op_ns > most.op_ns && now_ns - turn->published_ns <= std::max(kAskLastsNs, 2 * op_ns)) most = {op_ns, turn->published_ns, slot};
  }
  return most;
}

bool DecodeTurns::GiveWay(Slack& slack) {
  Ask ask = MostAsked();
  if (ask.op_ns == 0) return false;
  const int64_t needed_ns = std::max(ask.op_ns + kWakeUpNs, kWindowMinNs);
  slack.Keep(needed_ns);
  if (slack.available_ns() < needed_ns) return false;
  const int64_t begin_ns = MonotonicNowNs();
  const int64_t until_ns = begin_ns + slack.available_ns();
  board_->Publish(slot_, until_ns, begin_ns);
  PublishPoint("turn.window");
  board_->Ring(slot_);
  int64_t now_ns = begin_ns;
  while (now_ns < until_ns) {
    const uint32_t bell = board_->Bell(ask.slot);  // rung when its pass ends, or an op must wait
    const int slot = ask.slot;
    ask = MostAsked();
    if (ask.op_ns == 0) break;
    if (ask.published_ns >= begin_ns && ask.published_ns + ask.op_ns > until_ns) break;  // it waits for the next one: the rest stays slack
    board_->Wait(slot, bell, std::min(until_ns - now_ns, kAskLastsNs));
    now_ns = MonotonicNowNs();
  }
  Busy();
  slack.Spend(now_ns - begin_ns);
  windows_.fetch_add(1, std::memory_order_relaxed);
  given_ns_.fetch_add(now_ns - begin_ns, std::memory_order_relaxed);
  return true;
}

}  // namespace hearth
