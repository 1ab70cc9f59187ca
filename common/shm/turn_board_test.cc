#include "common/shm/turn_board.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

namespace hearth {
namespace {

CpuSet Cpus(std::initializer_list<size_t> cpus) {
  CpuSet set;
  for (const size_t cpu : cpus) set.set(cpu);
  return set;
}

class TurnBoardTest : public ::testing::Test {
 protected:
  TurnBoardTest() : place_{.dir = ::testing::TempDir(), .node = "turns" + std::to_string(getpid())} {}
  ~TurnBoardTest() override {
    for (const std::string& path : ListRegions(place_)) std::filesystem::remove(path);
  }
  const RegionPlace place_;
  const Hash128 generation_{3, 4};
};

TEST_F(TurnBoardTest, OneWritesAnotherReads) {
  EXPECT_TRUE(absl::IsNotFound(TurnBoard::Attach(place_, generation_).status()));
  const auto made = TurnBoard::Create(place_, generation_);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_TRUE(absl::IsAlreadyExists(TurnBoard::Create(place_, generation_).status()));
  const std::shared_ptr<TurnBoard> decode = *TurnBoard::Attach(place_, generation_), prefill = *TurnBoard::Attach(place_, generation_);
  EXPECT_EQ(decode->region()->bytes(), kRegionHeaderBytes + 32 * 256);
  const CpuSet all = Cpus({0, 1, 1023});
  EXPECT_FALSE(prefill->Read(2, all).has_value());
  ASSERT_TRUE(decode->Claim(2, SelfProcess(), Cpus({1023})).ok());
  EXPECT_EQ(prefill->Read(2, all)->value_ns, 0);
  EXPECT_EQ(prefill->Owner(2), SelfProcess());
  decode->Publish(2, 17, 18);
  EXPECT_EQ(prefill->Read(2, all)->value_ns, 17);
  EXPECT_EQ(prefill->Read(2, all)->published_ns, 18);
  EXPECT_FALSE(prefill->Read(2, Cpus({0, 1})).has_value());  // other cores
  EXPECT_FALSE(prefill->Read(3, all).has_value());
  const uint32_t bell = prefill->Bell(2);
  decode->Ring(2);
  prefill->Wait(2, bell, int64_t{3600} * 1'000'000'000);  // rung already: returns
  EXPECT_NE(prefill->Bell(2), bell);
}

TEST_F(TurnBoardTest, ASlotIsTakenOnlyFromTheDead) {
  const std::shared_ptr<TurnBoard> board = *TurnBoard::Create(place_, generation_);
  int to_child[2];
  ASSERT_EQ(pipe(to_child), 0);
  const pid_t child = fork();
  if (child == 0) {
    char c;
    if (read(to_child[0], &c, 1) < 0) _exit(1);
    _exit(0);
  }
  const ProcessId other = *ProcessOf(child);
  ASSERT_TRUE(board->Claim(0, other, Cpus({0})).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(board->Claim(0, SelfProcess(), Cpus({0}))));
  ASSERT_EQ(write(to_child[1], "x", 1), 1);
  waitpid(child, nullptr, 0);
  board->Publish(0, 99, 99);  // what it left
  EXPECT_TRUE(board->Claim(0, SelfProcess(), Cpus({0})).ok());
  EXPECT_EQ(board->Read(0, Cpus({0}))->value_ns, 0);
  EXPECT_TRUE(board->Claim(0, SelfProcess(), Cpus({1})).ok());  // by its owner again
  close(to_child[0]);
  close(to_child[1]);
}

TEST_F(TurnBoardTest, AReaderSeesWholeTurnsOnly) {
  const std::shared_ptr<TurnBoard> board = TurnBoard::InMemory();
  ASSERT_TRUE(board->Claim(0, SelfProcess(), Cpus({0})).ok());
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int64_t i = 1; i <= 200'000; ++i) board->Publish(0, i, 2 * i);
    done = true;
  });
  while (!done) {
    const std::optional<Turn> turn = board->Read(0, Cpus({0}));
    if (turn.has_value()) {
      EXPECT_EQ(turn->published_ns, 2 * turn->value_ns);
    }
  }
  writer.join();
}

TEST_F(TurnBoardTest, AWriterThatDiedInsideAPublicationLeavesNothingToReadUntilItsSlotIsTaken) {
  const std::shared_ptr<TurnBoard> board = *TurnBoard::Create(place_, generation_);
  ASSERT_TRUE(board->Claim(5, SelfProcess(), Cpus({0})).ok());
  auto& slot = reinterpret_cast<TurnSlot*>(board->region()->body())[5];
  slot.sequence.fetch_add(1);
  EXPECT_FALSE(board->Read(5, Cpus({0})).has_value());
  ASSERT_TRUE(board->Claim(5, SelfProcess(), Cpus({0})).ok());
  board->Publish(5, 7, 8);
  EXPECT_EQ(board->Read(5, Cpus({0}))->value_ns, 7);
}

TEST_F(TurnBoardTest, AFileThatIsNoneIsToldByName) {
  { ASSERT_TRUE(TurnBoard::Create(place_, generation_).ok()); }
  const std::string path = place_.Path(kTurnBoardWhat, generation_);
  std::filesystem::rename(path, place_.Path(kTurnBoardWhat, Hash128{9, 9}));
  EXPECT_TRUE(absl::IsDataLoss(TurnBoard::Attach(place_, Hash128{9, 9}).status()));
  std::filesystem::resize_file(place_.Path(kTurnBoardWhat, Hash128{9, 9}), 5000);
  EXPECT_TRUE(absl::IsDataLoss(TurnBoard::Attach(place_, Hash128{9, 9}).status()));
}

}  // namespace
}  // namespace hearth
