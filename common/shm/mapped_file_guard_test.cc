// Files that lose bytes under their readers: the reader lives and is told; what is nobody's guarded mapping still ends the process.
#include "common/shm/mapped_file_guard.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>
#include <vector>

namespace hearth {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr uint64_t kBytes = (5 << 20) + 12288;

class MappedFileGuardTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string dir = testing::TempDir() + "/hearth_guard_XXXXXX";
    dir_ = mkdtemp(dir.data());
    path_ = dir_ + "/file";
    text_.assign(kBytes, 'x');
    std::ofstream(path_, std::ios::binary) << text_;
    const int fd = open(path_.c_str(), O_RDONLY);
    data_ = static_cast<uint8_t*>(mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0));
    close(fd);
    ASSERT_NE(data_, MAP_FAILED);
  }
  ~MappedFileGuardTest() override {
    munmap(data_, kBytes);
    std::filesystem::remove_all(dir_);
  }
  std::unique_ptr<MappedFileGuard> Guard() {
    auto guard = MappedFileGuard::Make(path_, data_, kBytes);
    EXPECT_TRUE(guard.ok()) << guard.status();
    return *std::move(guard);
  }
  void Cut(uint64_t bytes) { std::filesystem::resize_file(path_, bytes); }
  void Mend() {  // the same file, not another of its name
    const int fd = open(path_.c_str(), O_WRONLY);
    ASSERT_EQ(pwrite(fd, text_.data(), kBytes, 0), static_cast<ssize_t>(kBytes));
    close(fd);
  }
  uint64_t Sum() const { return std::accumulate(data_, data_ + kBytes, uint64_t{0}); }

  std::string dir_, path_, text_;
  uint8_t* data_ = nullptr;
};

TEST_F(MappedFileGuardTest, ACutFileIsReadAsZerosAndSaid) {
  const auto guard = Guard();
  const uint64_t before = guard->Begin();
  EXPECT_EQ(Sum(), kBytes * 'x');
  EXPECT_TRUE(guard->LostSince(before).ok());
  Cut(4096);
  EXPECT_EQ(Sum(), 4096u * 'x');
  const absl::Status lost = guard->LostSince(before);
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(lost.message()), AllOf(HasSubstr(path_), HasSubstr("truncated"), HasSubstr("4096")));
  const uint64_t later = guard->Begin();
  EXPECT_EQ(data_[0], 'x') << "what is left is the file's again";
  EXPECT_FALSE(guard->LostSince(later).ok());
  Mend();
  const uint64_t mended = guard->Begin();
  EXPECT_EQ(Sum(), kBytes * 'x');
  EXPECT_TRUE(guard->LostSince(mended).ok());
  EXPECT_FALSE(guard->LostSince(before).ok()) << "what an earlier reader has is no better for it";
}

TEST_F(MappedFileGuardTest, AnEndWithinAPageIsSaid) {
  const auto guard = Guard();
  const uint64_t mark = guard->Begin();
  Cut(kBytes - 1000);
  EXPECT_EQ(data_[kBytes - 1], 0) << "without any signal";
  EXPECT_FALSE(guard->LostSince(mark).ok());
}

// As a disk's error that passes: the file is whole again when the loss is looked at.
TEST_F(MappedFileGuardTest, ALossIsALossThoughTheFileIsWholeAgain) {
  const auto guard = Guard();
  const uint64_t mark = guard->Begin();
  Cut(1 << 20);
  EXPECT_EQ(data_[2 << 20], 0);
  Mend();
  EXPECT_THAT(std::string(guard->LostSince(mark).message()), AllOf(HasSubstr(path_), HasSubstr("disk gave an error")));
  const uint64_t again = guard->Begin();
  EXPECT_EQ(Sum(), kBytes * 'x');
  EXPECT_TRUE(guard->LostSince(again).ok());
}

// Readers and losses at once: no reader that was told nothing has seen a wrong byte.
TEST_F(MappedFileGuardTest, NoReaderIsDeceived) {
  const auto guard = Guard();
  std::atomic<bool> stop{false};
  std::atomic<int> whole{0}, told{0}, deceived{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        const uint64_t mark = guard->Begin();
        const bool right = Sum() == kBytes * 'x';
        const bool ok = guard->LostSince(mark).ok();
        ++(ok && right ? whole : ok ? deceived : told);
      }
    });
  }
  for (int round = 0; round < 30 || whole < 10 || told < 10; ++round) {
    Cut(static_cast<uint64_t>(round % 5) << 20);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Mend();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(deceived, 0);
}

TEST_F(MappedFileGuardTest, WhatIsNotGuardedStillEndsTheProcess) {
  for (const bool after_a_guard : {false, true}) {
    const pid_t child = fork();
    if (child == 0) {
      auto guard = Guard();
      Cut(4096);
      if (data_[kBytes - 1] != 0) _exit(1);
      if (after_a_guard) {
        guard.reset();  // its zeros stay, the rest is nobody's
        _exit(data_[3 << 20]);
      }
      const int fd = open(path_.c_str(), O_RDONLY);
      const volatile uint8_t* other = static_cast<uint8_t*>(mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0));
      _exit(other[kBytes - 1]);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
    EXPECT_EQ(WTERMSIG(status), SIGBUS);
    Mend();
  }
}

TEST_F(MappedFileGuardTest, ThereIsRoomForSoManyAndTheirPlacesAreFreedAgain) {
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<MappedFileGuard>> guards;
    for (int i = 0; i < MappedFileGuard::kMost; ++i) guards.push_back(Guard());
    EXPECT_EQ(MappedFileGuard::Make(path_, data_, kBytes).status().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(MappedFileGuard::Make(dir_ + "/none", data_, kBytes).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace hearth
