#include "common/sim/sim_collectives.h"

#include <gtest/gtest.h>

#include <array>

#include "common/device/ops.h"
#include "common/sim/sim_world.h"
#include "common/sim/testing/round_machine.h"

namespace hearth {
namespace {

constexpr int64_t kMs = 1'000'000;

struct TwoRanks {
  TwoRanks() {
    for (int64_t rank = 0; rank < 2; ++rank) streams.push_back(world->gpu(rank).MakeStream("compute"));
  }
  // body(rank), by two actors.
  void Run(const std::function<void(size_t)>& body) {
    const std::unique_ptr<Actor> other = world->gpu(1).Spawn("rank 1", [&] { body(1); });
    body(0);
  }
  const std::unique_ptr<SimWorld> world = SimWorld::Make(RoundMachine(), {});
  std::vector<std::unique_ptr<Collectives>> group = world->MakeGroup(2);
  std::vector<std::unique_ptr<Stream>> streams;
  StopToken stop;
};

// 10 MB take a millisecond on a link; rank 1 comes two milliseconds late and sends half as much.
TEST(SimCollectives, ACallTakesAsLongAsItsSlowestPartFromWhenAllAreThere) {
  TwoRanks two;
  const std::array<uint64_t, 2> bytes = {10'000'000, 5'000'000};
  std::array<int64_t, 2> ended = {};
  two.Run([&](size_t rank) {
    ASSERT_TRUE(two.group[rank]->Begin(two.stop, nullptr).ok());
    Stream& stream = *two.streams[rank];
    if (rank == 1) two.world->gpu(1).ops().ToDevice(stream, {.bytes = 20'000'000});
    two.group[rank]->AllGather(stream, {.name = "rows", .bytes = bytes.data()});
    ASSERT_TRUE(stream.Synchronize().ok());
    ended[rank] = two.world->now_ns();
    two.group[rank]->End(absl::OkStatus());
  });
  EXPECT_EQ(ended[0], 3 * kMs);
  EXPECT_EQ(ended[1], 3 * kMs);
  EXPECT_EQ(two.group[0]->traffic().at(0).bytes, 10'000'000u);
  EXPECT_EQ(two.group[1]->traffic().at(0).bytes, 5'000'000u);
}

TEST(SimCollectives, OnlyWhatSteersIsBrought) {
  TwoRanks two;
  std::array<std::array<int32_t, 2>, 2> steering = {{{7, 0}, {0, 9}}}, others = steering;
  const std::array<uint64_t, 2> bytes = {4, 4};
  two.Run([&](size_t rank) {
    ASSERT_TRUE(two.group[rank]->Begin(two.stop, nullptr).ok());
    two.group[rank]->AllGather(*two.streams[rank], {.name = "gate", .data = steering[rank].data(), .bytes = bytes.data(), .steers = true});
    two.group[rank]->AllGather(*two.streams[rank], {.name = "rows", .data = others[rank].data(), .bytes = bytes.data()});
    two.group[rank]->Barrier(*two.streams[rank], {.name = "kv", .shared_bytes = 12});
    two.group[rank]->End(absl::OkStatus());
  });
  EXPECT_EQ(steering[0], (std::array<int32_t, 2>{7, 9}));
  EXPECT_EQ(steering[1], (std::array<int32_t, 2>{7, 9}));
  EXPECT_EQ(others[0][1], 0);
  EXPECT_EQ(two.group[0]->traffic().at(2).bytes, 12u);
}

TEST(SimCollectives, ARankThatLeavesEndsTheOthersPassAndTheNextIsWhole) {
  TwoRanks two;
  for (const bool fails : {true, false}) {
    absl::Status other;
    two.Run([&](size_t rank) {
      ASSERT_TRUE(two.group[rank]->Begin(two.stop, nullptr).ok());
      const auto stream = two.world->gpu(static_cast<int64_t>(rank)).MakeStream("compute");
      if (rank == 1 && fails) return two.group[1]->End(absl::InternalError("out of luck"));
      two.group[rank]->Barrier(*stream, {.name = "kv"});
      const absl::Status status = stream->Synchronize();
      if (rank == 0) other = status;
      two.group[rank]->End(status);
    });
    EXPECT_EQ(other.code(), fails ? absl::StatusCode::kAborted : absl::StatusCode::kOk) << other;
    if (fails) {
      EXPECT_NE(other.message().find("rank 1 left the pass: out of luck"), absl::string_view::npos) << other;
    }
  }
}

TEST(SimCollectives, AStoppedRankDoesNotWaitForTheOthers) {
  TwoRanks two;
  absl::Status begun;
  {
    const std::unique_ptr<Actor> early = two.world->gpu(0).Spawn("rank 0", [&] { begun = two.group[0]->Begin(two.stop, nullptr); });
    const std::unique_ptr<HostSignal> never = two.world->gpu(1).MakeSignal();
    two.world->gpu(1).HostWait(*never, 0, {.deadline_ns = kMs});
    two.stop.Stop();
  }
  EXPECT_EQ(begun.code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace hearth
