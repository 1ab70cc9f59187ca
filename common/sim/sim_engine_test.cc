#include "common/sim/sim_engine.h"

#include <gtest/gtest.h>

namespace hearth {
namespace {

constexpr int64_t kMs = 1'000'000;

SimOp Busy(int resource, double seconds, int64_t fixed_ns = 0) {
  return {.name = "busy", .detail = "", .phases = {{.fixed_ns = fixed_ns, .claim = {{resource, seconds}}}}};
}

// Waits for the stream and says when it was done.
int64_t EndOf(SimEngine& engine, int stream) {
  engine.Sleep([mark = engine.AddMark(stream)] { return mark->passed; }, SimEngine::kNever, "a stream");
  return engine.now_ns();
}

TEST(SimEngine, AStreamIsFirstInFirstOut) {
  SimEngine engine(/*record=*/true);
  const int link = engine.AddResource("link"), stream = engine.AddStream("gpu", "copy");
  engine.Enqueue(stream, Busy(link, 2e-3, 1 * kMs), 0);
  engine.Enqueue(stream, Busy(link, 1e-3), 0);
  EXPECT_EQ(engine.now_ns(), 0) << "enqueueing takes no time of its own";
  EXPECT_EQ(EndOf(engine, stream), 4 * kMs);
  ASSERT_EQ(engine.timeline().spans().size(), 2u);
  EXPECT_EQ(engine.timeline().spans()[0].end_ns, 3 * kMs);
  EXPECT_EQ(engine.timeline().spans()[1].begin_ns, 3 * kMs);
  EXPECT_DOUBLE_EQ(engine.busy_seconds(link), 3e-3);
}

TEST(SimEngine, TwoCopiesShareALinkAndTheLongerOneHasItAloneInTheEnd) {
  SimEngine engine(false);
  const int link = engine.AddResource("link"), a = engine.AddStream("gpu", "a"), b = engine.AddStream("gpu", "b");
  engine.Enqueue(a, Busy(link, 1e-3), 0);
  engine.Enqueue(b, Busy(link, 3e-3), 0);
  EXPECT_EQ(EndOf(engine, a), 2 * kMs) << "half of the link";
  EXPECT_EQ(EndOf(engine, b), 4 * kMs) << "1 ms of work done by then, 2 ms alone";
}

TEST(SimEngine, ALateComerTakesItsShareFromThenOn) {
  SimEngine engine(false);
  const int link = engine.AddResource("link"), a = engine.AddStream("gpu", "a"), b = engine.AddStream("gpu", "b");
  engine.Enqueue(a, Busy(link, 2e-3), /*cost_ns=*/1 * kMs);
  EXPECT_EQ(engine.now_ns(), 1 * kMs) << "the caller's own time";
  engine.Enqueue(b, Busy(link, 2e-3), 0);
  EXPECT_EQ(EndOf(engine, a), 3 * kMs);
  EXPECT_EQ(EndOf(engine, b), 4 * kMs);
}

TEST(SimEngine, ExpertsAndCopyShareDram) {
  // The copy uses a quarter of DRAM while its link is full; experts alone take 3 ms, beside it they have three quarters.
  SimEngine engine(false);
  const int dram = engine.AddResource("dram"), link = engine.AddResource("link");
  const int cpu = engine.AddStream("cpu", "experts"), copy = engine.AddStream("gpu", "copy");
  engine.Enqueue(cpu, Busy(dram, 3e-3), 0);
  engine.Enqueue(copy, {.name = "copy", .detail = "", .phases = {{.claim = {{link, 8e-3}, {dram, 2e-3}}}}}, 0);
  EXPECT_EQ(EndOf(engine, cpu), 4 * kMs);
  EXPECT_EQ(EndOf(engine, copy), 8 * kMs);
}

TEST(SimEngine, AResourceDividedByDemandSlowsAllAlike) {
  // Cores ask for 1.5 times what DRAM has, the copy's link for a half of it: both get half of what they ask for.
  SimEngine engine(false);
  const int dram = engine.AddResource("dram", Division::kByDemand), link = engine.AddResource("link"), cores = engine.AddResource("cores");
  const int cpu = engine.AddStream("cpu", "experts"), copy = engine.AddStream("gpu", "copy");
  engine.Enqueue(cpu, {.name = "experts", .detail = "", .phases = {{.claim = {{dram, 3e-3}, {cores, 2e-3}}}}}, 0);
  engine.Enqueue(copy, {.name = "copy", .detail = "", .phases = {{.claim = {{link, 4e-3}, {dram, 2e-3}}}}}, 0);
  EXPECT_EQ(EndOf(engine, cpu), 4 * kMs);
  EXPECT_EQ(EndOf(engine, copy), 6 * kMs) << "half of it by then, the rest at its link's rate";
}

TEST(SimEngine, AMarkHoldsAnotherStream) {
  SimEngine engine(true);
  const int x = engine.AddResource("x"), y = engine.AddResource("y");
  const int first = engine.AddStream("gpu", "first"), second = engine.AddStream("gpu", "second");
  engine.Enqueue(first, Busy(x, 2e-3), 0);
  const auto mark = engine.AddMark(first);
  engine.Enqueue(first, Busy(x, 5e-3), 0);
  engine.WaitFor(second, mark);
  engine.Enqueue(second, Busy(y, 1e-3), 0);
  EXPECT_FALSE(mark->passed);
  EXPECT_EQ(EndOf(engine, second), 3 * kMs);
  EXPECT_TRUE(mark->passed);
}

TEST(SimEngine, ActorsRunByTimeThenId) {
  SimEngine engine(false);
  std::string order;
  const auto body = [&](char name, int64_t period_ns) {
    return [&, name, period_ns] {
      for (int i = 0; i < 3; ++i) {
        order += name;
        engine.Sleep(nullptr, engine.now_ns() + period_ns, "time");
      }
    };
  };
  const int a = engine.Spawn("a", body('a', 2)), b = engine.Spawn("b", body('b', 3));
  EXPECT_EQ(order, "") << "a spawned actor waits for the baton";
  engine.Join(a);
  engine.Join(b);
  EXPECT_EQ(order, "ababab") << "at 0 0, 2 3, 4 6";
  EXPECT_EQ(engine.now_ns(), 9);
}

TEST(SimEngine, ASleeperWakesWhenItsConditionHoldsOrAtItsDeadline) {
  SimEngine engine(false);
  bool rung = false;
  const int ringer = engine.Spawn("ringer", [&] {
    engine.Sleep(nullptr, 5, "time");
    rung = true;
  });
  engine.Sleep([&] { return rung; }, 100, "the bell");
  EXPECT_EQ(engine.now_ns(), 5);
  engine.Sleep([] { return false; }, 100, "nothing");
  EXPECT_EQ(engine.now_ns(), 100);
  engine.Join(ringer);
}

void LetAllWaitForEver() {
  SimEngine engine(false);
  engine.Spawn("loader", [&engine] { engine.Sleep([] { return false; }, SimEngine::kNever, "a slot of the ring"); });
  const int stream = engine.AddStream("gpu 0", "copy");
  engine.Enqueue(stream, Busy(engine.AddResource("link"), 1e-3), 0);
  engine.Sleep([] { return false; }, SimEngine::kNever, "a loaded expert");
}

TEST(SimEngineDeathTest, WhenAllWaitForEverItSaysWhoForWhat) {
  EXPECT_DEATH(LetAllWaitForEver(),
               "at 0.001000 s every actor waits(.|\n)*'main' waits for a loaded expert(.|\n)*'loader' waits for a slot of the ring");
}

}  // namespace
}  // namespace hearth
