#include "common/device/host/shm_collectives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <numeric>
#include <thread>

#include "common/base/time.h"
#include "common/device/host/host_stream.h"

namespace hearth {
namespace {

using ::testing::HasSubstr;

// A group's memory, shared with what this process forks.
class Shared {
 public:
  explicit Shared(int size) : size_(size), bytes_(ShmCollectivesBytes(size)) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  }
  ~Shared() { munmap(memory_, bytes_); }
  std::unique_ptr<Collectives> Join(int rank, int64_t patience_ns = 30'000'000'000) {
    auto group = JoinShmCollectives({.rank = rank, .size = size_, .memory = memory_, .patience_ns = patience_ns});
    EXPECT_TRUE(group.ok()) << group.status();
    return *std::move(group);
  }
  int size() const { return size_; }
  void* memory() const { return memory_; }

 private:
  const int size_;
  const uint64_t bytes_;
  void* memory_;
};

void OnAllRanks(Shared& shared, const std::function<void(Collectives&)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < shared.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const auto group = shared.Join(rank);
      body(*group);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

uint8_t ByteOf(int from, int to, uint64_t i) { return static_cast<uint8_t>(from * 89 + to * 31 + i * 7 + i / 251); }

// Parts that are empty, smaller than a piece and larger than all pieces of a mailbox; several passes of them.
TEST(ShmCollectives, RaggedPartsArrive) {
  for (const int size : {2, 4}) {
    Shared shared(size);
    OnAllRanks(shared, [&](Collectives& group) {
      HostStream stream("test");
      StopToken stop;
      const int rank = group.rank();
      for (uint64_t pass = 0; pass < 3; ++pass) {
        ASSERT_TRUE(group.Begin(stop, {}).ok());
        const auto gathered = [&](int r) { return static_cast<uint64_t>(r) * 700'001 + pass; };
        std::vector<uint64_t> bytes;
        for (int r = 0; r < size; ++r) bytes.push_back(gathered(r));
        std::vector<uint8_t> all(std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}));
        const uint64_t own_begin = std::accumulate(bytes.begin(), bytes.begin() + rank, uint64_t{0});
        for (uint64_t i = 0; i < bytes[static_cast<size_t>(rank)]; ++i) all[own_begin + i] = ByteOf(rank, 0, i);
        group.AllGather(stream, {.name = "gather", .data = all.data(), .bytes = bytes.data()});
        ASSERT_TRUE(stream.status().ok()) << stream.status();
        const uint8_t* at = all.data();
        for (int r = 0; r < size; ++r) {
          for (uint64_t i = 0; i < gathered(r); ++i, ++at) ASSERT_EQ(*at, ByteOf(r, 0, i)) << r << " " << i;
        }

        const auto part = [&](int from, int to) { return static_cast<uint64_t>((from * 3 + to) % 4) * 300'007; };
        std::vector<uint64_t> send, receive;
        for (int r = 0; r < size; ++r) {
          send.push_back(part(rank, r));
          receive.push_back(part(r, rank));
        }
        std::vector<uint8_t> out, in(std::accumulate(receive.begin(), receive.end(), uint64_t{0}));
        for (int r = 0; r < size; ++r) {
          for (uint64_t i = 0; i < part(rank, r); ++i) out.push_back(ByteOf(rank, r, i));
        }
        group.AllToAll(stream,
                       {.name = "all to all", .from = out.data(), .send_bytes = send.data(), .to = in.data(), .receive_bytes = receive.data()});
        group.Barrier(stream, {.name = "barrier", .shared_bytes = 5});
        ASSERT_TRUE(stream.status().ok()) << stream.status();
        at = in.data();
        for (int r = 0; r < size; ++r) {
          for (uint64_t i = 0; i < part(r, rank); ++i, ++at) ASSERT_EQ(*at, ByteOf(r, rank, i)) << r << " " << i;
        }
        ASSERT_EQ(group.traffic().size(), 3u) << "counted anew each pass";
        EXPECT_EQ(group.traffic()[0].bytes, gathered(rank) * static_cast<uint64_t>(size - 1));
        EXPECT_EQ(group.traffic()[1].bytes, std::accumulate(send.begin(), send.end(), uint64_t{0}) - part(rank, rank));
        EXPECT_EQ(group.traffic()[2].bytes, 5u);
        group.End(absl::OkStatus());
      }
    });
  }
}

// A pass that one leaves ends for all with its name, and the next one is whole whatever lies in the mailboxes.
TEST(ShmCollectives, WhoLeavesThePassIsNamedAndTheNextIsWhole) {
  Shared shared(4);
  OnAllRanks(shared, [&](Collectives& group) {
    StopToken stop;
    const std::vector<uint64_t> bytes(4, 100'000);
    std::vector<uint8_t> data(400'000, static_cast<uint8_t>(group.rank()));
    for (int pass = 0; pass < 6; ++pass) {
      HostStream stream("test");
      const bool leaves = group.rank() == pass % 4 && pass < 5;
      if (leaves && pass == 4) {  // before it began
        group.End(absl::InternalError("an error of its own"));
        continue;
      }
      absl::Status status = group.Begin(stop, {});
      if (status.ok() && leaves) {
        group.End(absl::CancelledError("enough"));
        continue;
      }
      const int64_t begin_ns = MonotonicNowNs();
      if (status.ok()) {
        group.AllGather(stream, {.name = "gather", .data = data.data(), .bytes = bytes.data()});
        status = stream.status();
      }
      group.End(status);
      EXPECT_LT(MonotonicNowNs() - begin_ns, 1'000'000'000);
      if (pass < 5) {
        // Cancelled as long as the word of who left stands, Aborted once he has gone on and left the next pass too.
        EXPECT_TRUE(absl::IsAborted(status) || (pass < 4 && absl::IsCancelled(status))) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr("of the group left the pass"));
      } else {
        EXPECT_TRUE(status.ok()) << status;
        for (int r = 0; r < 4; ++r) EXPECT_EQ(data[static_cast<size_t>(r) * 100'000 + 5], r);
      }
    }
  });
}

TEST(ShmCollectives, AStopEndsAWait) {
  Shared shared(2);
  const auto group = shared.Join(0);
  StopToken stop;
  absl::Status status;
  std::thread waiting([&] { status = group->Begin(stop, {}); });
  stop.Stop();
  const int64_t begin_ns = MonotonicNowNs();
  waiting.join();
  EXPECT_LT(MonotonicNowNs() - begin_ns, 1'000'000'000);
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

TEST(ShmCollectives, AWaitThatIsWantedNoMoreEnds) {
  Shared shared(2);
  const auto group = shared.Join(0);
  StopToken stop;
  int looks = 3;
  const absl::Status status = group->Begin(stop, [&] { return looks-- > 0; });
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_EQ(looks, -1) << "looked at again and again";
}

// Who is not in a pass hears that another one has begun one, on a word of its own; who is in one can look whether it goes on.
TEST(ShmCollectives, APassThatAnotherBeginsIsHeardAndItsEndSeen) {
  Shared shared(2);
  const auto zero = shared.Join(0), one = shared.Join(1);
  StopToken stop;
  EXPECT_FALSE(one->Called());
  EXPECT_EQ(one->AwaitCall(0, 1'000'000), 0u);
  absl::Status began;
  std::thread caller([&] { began = zero->Begin(stop, {}); });
  EXPECT_EQ(one->AwaitCall(0, 5'000'000'000), 1u);
  EXPECT_TRUE(one->Called());
  EXPECT_FALSE(zero->Called());
  ASSERT_TRUE(one->Begin(stop, {}).ok());
  caller.join();
  ASSERT_TRUE(began.ok()) << began;
  EXPECT_FALSE(one->Called());
  EXPECT_TRUE(one->Check().ok());
  zero->End(absl::CancelledError("enough"));
  EXPECT_TRUE(absl::IsCancelled(one->Check())) << one->Check();
  zero->End(absl::CancelledError("and of the next one"));
  EXPECT_TRUE(absl::IsAborted(one->Check())) << one->Check();
  one->End(absl::OkStatus());
  EXPECT_TRUE(one->Called()) << "of the pass that rank 0 has left already";
  ASSERT_TRUE(one->Begin(stop, {}).ok()) << "it had begun";
  EXPECT_TRUE(absl::IsCancelled(one->Check())) << one->Check();
}

TEST(ShmCollectives, APeerThatLivesButNeverComesIsNamed) {
  Shared shared(2);
  const auto group = shared.Join(0, 100'000'000);
  StopToken stop;
  const absl::Status status = group->Begin(stop, {});
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
}

TEST(ShmCollectives, RanksGivenDifferentSizesSaySo) {
  Shared shared(2);
  std::vector<absl::Status> statuses(2);
  OnAllRanks(shared, [&](Collectives& group) {
    StopToken stop;
    HostStream stream("test");
    ASSERT_TRUE(group.Begin(stop, {}).ok());
    std::vector<uint8_t> data(64);
    const std::vector<uint64_t> bytes(2, group.rank() == 0 ? 16 : 32);
    group.AllGather(stream, {.name = "gather", .data = data.data(), .bytes = bytes.data()});
    statuses[static_cast<size_t>(group.rank())] = stream.status();
    group.End(stream.status());
  });
  // Who sees it first says what it is, and the other may hear of that before it looks for itself.
  int told = 0;
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(status.code() == absl::StatusCode::kInternal || absl::IsAborted(status)) << status;
    told += status.message().find("different batches") != std::string::npos ? 1 : 0;
  }
  EXPECT_GE(told, 1);
}

// A process that is killed while others wait for it.
TEST(ShmCollectives, ADeadRankIsNamedWithinASecond) {
  Shared shared(2);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto group = JoinShmCollectives({.rank = 1, .size = 2, .memory = shared.memory()});
    StopToken stop;
    if (group.ok() && (*group)->Begin(stop, {}).ok()) pause();
    _exit(1);
  }
  const auto group = shared.Join(0);
  StopToken stop;
  ASSERT_TRUE(group->Begin(stop, {}).ok());
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    kill(child, SIGKILL);
  });
  HostStream stream("test");
  const int64_t begin_ns = MonotonicNowNs();
  group->Barrier(stream, {.name = "barrier"});
  EXPECT_LT(MonotonicNowNs() - begin_ns, 1'000'000'000);
  killer.join();
  EXPECT_TRUE(absl::IsUnavailable(stream.status())) << stream.status();
  EXPECT_THAT(std::string(stream.status().message()), HasSubstr("rank 1"));
  EXPECT_EQ(JoinShmCollectives({.rank = 0, .size = 2, .memory = shared.memory()}).status().code(), absl::StatusCode::kAlreadyExists);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace hearth
