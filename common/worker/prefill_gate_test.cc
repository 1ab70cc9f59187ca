// Taking turns: the board between processes, what a gate does with its words, decode's windows. Nothing here asserts how long anything took.
#include "common/worker/prefill_gate.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "common/base/time.h"

namespace hearth {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kHour = int64_t{3600} * 1'000'000'000;

class PrefillGateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(board_->Claim(kDecode, SelfProcess(), cpus_).ok());
    ASSERT_TRUE(board_->Claim(kPrefill, SelfProcess(), cpus_).ok());
  }
  // A process that is gone.
  static ProcessId Gone() {
    const pid_t child = fork();
    if (child == 0) _exit(0);
    const ProcessId id = *ProcessOf(child);
    waitpid(child, nullptr, 0);
    return id;
  }
  void Op(PrefillGate& gate) { gate.Before(2, {.flops = 1e6}); }

  static constexpr int kDecode = DecodeTurnSlot(0), kPrefill = PrefillTurnSlot(0);
  const CpuSet cpus_ = CpusOfThisProcess();
  std::shared_ptr<TurnBoard> board_ = TurnBoard::InMemory();
};

TEST_F(PrefillGateTest, RunsWhereDecodeLetsItAndSaysWhatItRuns) {
  PrefillGate gate(board_, kPrefill, cpus_);
  EXPECT_TRUE(gate.shares_cores());
  Op(gate);  // free
  EXPECT_GT(board_->Read(kPrefill, cpus_)->value_ns, 0);
  board_->Publish(kDecode, MonotonicNowNs() + kHour, MonotonicNowNs());
  Op(gate);
  EXPECT_EQ(gate.counts().ops, 2U);
  EXPECT_EQ(gate.counts().held_back, 0U);
  gate.PassEnded();
  EXPECT_EQ(board_->Read(kPrefill, cpus_)->value_ns, 0);
}

TEST_F(PrefillGateTest, WaitsUntilDecodeOpensAWindow) {
  PrefillGate gate(board_, kPrefill, cpus_);
  for (int i = 0; i < 20; ++i) gate.After(2, {.flops = 1e6}, 100 * kMs);  // its patience is two seconds
  board_->Publish(kDecode, MonotonicNowNs(), MonotonicNowNs());
  std::thread prefill([&] { Op(gate); });
  while (board_->Read(kPrefill, cpus_)->value_ns < 50 * kMs) std::this_thread::yield();
  board_->Publish(kDecode, MonotonicNowNs() + kMs, MonotonicNowNs());  // too short for it
  board_->Ring(kDecode);
  board_->Publish(kDecode, MonotonicNowNs() + kHour, MonotonicNowNs());
  board_->Ring(kDecode);
  prefill.join();
  EXPECT_EQ(gate.counts().held_back, 1U);
}

TEST_F(PrefillGateTest, IsNotHeldByProcessesThatAreGoneOnOtherCoresOrSilent) {
  PrefillGate gate(board_, kPrefill, cpus_);
  for (int i = 0; i < 20; ++i) gate.After(2, {.flops = 1e6}, 1000 * kMs);
  const int64_t past_ns = MonotonicNowNs() - kMs;
  // Gone with the word in the past: found out once, and not waited for again.
  ASSERT_TRUE(board_->Claim(DecodeTurnSlot(1), Gone(), cpus_).ok());
  board_->Publish(DecodeTurnSlot(1), past_ns, MonotonicNowNs());
  for (int i = 0; i < 100; ++i) Op(gate);
  EXPECT_EQ(gate.counts().held_back, 1U);
  EXPECT_EQ(gate.counts().forced, 0U);
  // Gone with the word in the far future.
  board_->Publish(DecodeTurnSlot(1), MonotonicNowNs() + kHour, MonotonicNowNs());
  Op(gate);
  // Other cores.
  CpuSet other;
  other.set(kTurnCpusMax - 1);
  ASSERT_TRUE(board_->Claim(kDecode, SelfProcess(), other).ok());
  board_->Publish(kDecode, past_ns, MonotonicNowNs());
  Op(gate);
  // Silent for an hour, though it lives.
  ASSERT_TRUE(board_->Claim(kDecode, SelfProcess(), cpus_).ok());
  board_->Publish(kDecode, past_ns, MonotonicNowNs() - kHour);
  Op(gate);
  EXPECT_EQ(gate.counts().held_back, 1U);
}

TEST_F(PrefillGateTest, LongOpsAreDividedWhileStreamsAreDecoded) {
  PrefillGate gate(board_, kPrefill, cpus_);
  const OpCost cost{.flops = 1e9};
  for (int i = 0; i < 20; ++i) gate.After(2, cost, 30 * kMs);
  EXPECT_EQ(gate.Parts(2, cost), 1);  // free
  board_->Publish(kDecode, MonotonicNowNs() + 5 * kMs, MonotonicNowNs());
  EXPECT_GE(gate.Parts(2, cost), 15);
  EXPECT_EQ(gate.Parts(2, {}), 1);  // short
  board_->Publish(kDecode, 0, MonotonicNowNs());
  EXPECT_EQ(gate.Parts(2, cost), 1);
}

TEST_F(PrefillGateTest, PatienceEndsAndStopOpensIt) {
  PrefillGate gate(board_, kPrefill, cpus_);
  gate.After(2, {.flops = 1e6}, 1000);
  board_->Publish(kDecode, MonotonicNowNs(), MonotonicNowNs());
  Op(gate);  // a microsecond's work: held back for its patience, no longer
  EXPECT_EQ(gate.counts().held_back, 1U);
  EXPECT_EQ(gate.counts().forced, 1U);
  EXPECT_GT(gate.counts().waited_ns, 0);
  gate.Open();
  board_->Publish(kDecode, MonotonicNowNs(), MonotonicNowNs());
  for (int i = 0; i < 1000; ++i) Op(gate);
}

TEST(OpClockTest, FollowsSlowOpsAtOnceAndFastOnesSlowly) {
  OpClock clock;
  const OpCost small{.flops = 1e6}, large{.flops = 1e9};
  clock.Observe(3, small, 100'000);
  EXPECT_NEAR(static_cast<double>(clock.Expect(3, small)), 1e5, 1e3);
  EXPECT_GT(clock.Expect(3, large), 50 * clock.Expect(3, small));
  EXPECT_LT(clock.Expect(4, small), clock.Expect(3, small));  // another kind
  for (int i = 0; i < 5; ++i) clock.Observe(3, small, 1'000'000);
  EXPECT_GT(clock.Expect(3, small), 900'000);
  clock.Observe(3, small, 10'000);
  EXPECT_GT(clock.Expect(3, small), 800'000);
}

}  // namespace
}  // namespace hearth
