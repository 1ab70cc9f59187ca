// Records read from real files by both queues, and everything a disk may answer instead.
#include "common/disk/disk_reader.h"
#include "common/base/align.h"

#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "common/base/time.h"
#include "common/disk/testing.h"

namespace hearth {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr uint64_t kFileBytes = (3 << 20) + 8192;

struct FreeDeleter {
  void operator()(void* p) const { free(p); }
};
std::unique_ptr<uint8_t, FreeDeleter> Room(uint64_t bytes) {
  return std::unique_ptr<uint8_t, FreeDeleter>(static_cast<uint8_t*>(aligned_alloc(kDiskAlign, AlignUp(bytes, kDiskAlign))));
}

// Param: whether by io_uring.
class DiskReaderTest : public testing::TestWithParam<bool> {
 protected:
  DiskReaderTest() {
    std::string dir = testing::TempDir() + "/hearth_disk_XXXXXX";
    dir_ = mkdtemp(dir.data());
    path_ = dir_ + "/file";
    for (uint64_t i = 0; i < kFileBytes; ++i) text_.push_back(static_cast<char>((i * 2654435761u) >> 13));
    std::ofstream(path_, std::ios::binary) << text_;
  }
  ~DiskReaderTest() override { std::filesystem::remove_all(dir_); }
  void SetUp() override {
    if (GetParam() && !MakeUringQueue(8).ok()) GTEST_SKIP() << MakeUringQueue(8).status();
  }

  std::unique_ptr<ReadQueue> Queue(int64_t depth = 8) { return GetParam() ? *MakeUringQueue(depth) : MakeThreadQueue(depth); }
  std::unique_ptr<DiskReader> Reader(std::function<ReadFault(const QueuedRead&)> fault = nullptr) {
    auto queue = Queue();
    if (fault) queue = std::make_unique<FaultyQueue>(std::move(queue), std::move(fault));
    auto reader = DiskReader::Open({"", path_}, std::move(queue));
    EXPECT_TRUE(reader.ok()) << reader.status();
    return *std::move(reader);
  }
  absl::Status ReadAll(DiskReader& reader, std::string* bytes) {
    const auto room = Room(kFileBytes);
    const absl::Status status = reader.Read(1, 0, kFileBytes, room.get(), [] { return false; });
    bytes->assign(reinterpret_cast<char*>(room.get()), kFileBytes);
    return status;
  }

  std::string dir_, path_, text_;
};

TEST_P(DiskReaderTest, RecordsOfAllSizesManyAtOnceInAnyOrder) {
  const auto reader = Reader();
  struct Asked {
    uint64_t offset, bytes, number;
    std::unique_ptr<uint8_t, FreeDeleter> room;
  };
  std::vector<Asked> asked;
  for (const uint64_t bytes :
       {uint64_t{1}, uint64_t{64}, uint64_t{4095}, uint64_t{4096}, uint64_t{4097}, uint64_t{1 << 20}, uint64_t{(1 << 20) + 64}, uint64_t{3 << 20}}) {
    for (const uint64_t offset : {uint64_t{0}, uint64_t{4096}, uint64_t{8192}}) {
      asked.push_back({offset, bytes, 0, Room(bytes)});
      asked.back().number = reader->Begin(1, offset, bytes, asked.back().room.get());
    }
  }
  std::reverse(asked.begin(), asked.end());
  uint64_t sum = 0;
  for (const Asked& a : asked) {
    ASSERT_TRUE(reader->AwaitEnded(a.number, 10'000'000'000));
    ASSERT_TRUE(reader->Outcome(a.number).ok());
    EXPECT_EQ(std::memcmp(a.room.get(), text_.data() + a.offset, a.bytes), 0) << a.offset << " " << a.bytes;
    sum += a.bytes;
  }
  const DiskReader::View view = reader->Look();
  EXPECT_EQ(view.kind, GetParam() ? "io_uring" : "threads");
  EXPECT_EQ(view.records, asked.size());
  EXPECT_EQ(view.bytes, sum);
  EXPECT_EQ(view.under_way_bytes, 0);
  EXPECT_GT(view.busy_seconds, 0);
}

TEST_P(DiskReaderTest, ShortAndInterruptedReadsAreGoneOnWith) {
  for (const uint64_t most : {uint64_t{4096}, uint64_t{65536}, uint64_t{100'001}}) {  // the last leaves a rest that can't be read directly
    int64_t reads = 0;
    const auto reader = Reader([&](const QueuedRead&) -> ReadFault {
      ++reads;
      if (reads % 5 == 0) return {.error = reads % 2 == 0 ? -EINTR : -EAGAIN};
      return {.bytes_max = most};
    });
    std::string bytes;
    ASSERT_TRUE(ReadAll(*reader, &bytes).ok());
    EXPECT_EQ(bytes, text_) << most;
    EXPECT_GE(reads, static_cast<int64_t>(kFileBytes / most));
  }
}

TEST_P(DiskReaderTest, WhereDirectReadsAreRefusedThePageCacheServes) {
  int refused = 0;
  const auto reader = Reader(
      [&](const QueuedRead& read) -> ReadFault { return read.bytes % kDiskAlign == 0 && refused++ < 2 ? ReadFault{.error = -EINVAL} : ReadFault{}; });
  std::string bytes;
  ASSERT_TRUE(ReadAll(*reader, &bytes).ok());
  EXPECT_EQ(bytes, text_);
  EXPECT_THAT(reader->Look().note, HasSubstr("page cache"));
}

// One piece of a record fails: the record does, by name, once all its pieces have ended; the next record is whole.
TEST_P(DiskReaderTest, AnErrorIsItsRecordsOutcome) {
  bool fail = true;
  const auto reader = Reader([&](const QueuedRead& read) -> ReadFault {
    if (read.offset == 0) return {.delay_ns = 30'000'000};
    return {.error = fail && read.offset == 1 << 20 ? -EIO : 0};
  });
  std::string bytes;
  absl::Status status = ReadAll(*reader, &bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(path_), HasSubstr("byte 1048576"), HasSubstr("Input/output error"), HasSubstr("disk's health")));
  EXPECT_EQ(reader->Look().under_way_bytes, 0);
  EXPECT_EQ(reader->Look().errors, 1u);
  fail = false;
  ASSERT_TRUE(ReadAll(*reader, &bytes).ok());
  EXPECT_EQ(bytes, text_);
}

TEST_P(DiskReaderTest, ATruncatedFileIsSaid) {
  const auto reader = Reader();
  std::filesystem::resize_file(path_, kFileBytes - 5000);
  std::string bytes;
  absl::Status status = ReadAll(*reader, &bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path_), HasSubstr("truncated")));
  // One that is gone by name is read on.
  std::ofstream(path_, std::ios::binary) << text_;
  std::filesystem::remove(path_);
  ASSERT_TRUE(ReadAll(*reader, &bytes).ok());
  EXPECT_EQ(bytes, text_);
  EXPECT_EQ(DiskReader::Open({path_}, Queue()).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(DiskReaderTest, ASlowDiskIsWaitedForAsLongAsTheCallerLikes) {
  auto reader = Reader([&](const QueuedRead&) -> ReadFault { return {.delay_ns = 300'000'000}; });
  const auto room = Room(4096), other = Room(4096);
  const int64_t begin_ns = MonotonicNowNs();
  const uint64_t number = reader->Begin(1, 0, 4096, room.get());
  EXPECT_FALSE(reader->AwaitEnded(number, 20'000'000));
  EXPECT_TRUE(absl::IsCancelled(reader->Read(1, 4096, 4096, other.get(), [] { return true; })));
  EXPECT_LT(MonotonicNowNs() - begin_ns, 250'000'000);
  EXPECT_TRUE(reader->AwaitEnded(number, 10'000'000'000));
  EXPECT_TRUE(reader->Outcome(number).ok());
  reader->Begin(1, 8192, 4096, other.get());
  reader.reset();  // with two reads under way, into memory that lives
  EXPECT_GE(MonotonicNowNs() - begin_ns, 500'000'000);
}

// A container's filter forbids io_uring: threads read, and it is said why.
TEST(ReadQueueTest, WhereIoUringIsForbiddenThreadsRead) {
  const pid_t child = fork();
  if (child == 0) {
    sock_filter program[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                             BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                             BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    sock_fprog filter{.len = 4, .filter = program};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) _exit(77);
    std::string note;
    const bool threads = MakeReadQueue(&note)->kind() == "threads";
    _exit(threads && note.find("forbidden") != std::string::npos ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no seccomp filters here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

INSTANTIATE_TEST_SUITE_P(Queues, DiskReaderTest, testing::Bool(), [](const auto& info) { return info.param ? "Uring" : "Threads"; });

}  // namespace
}  // namespace hearth
