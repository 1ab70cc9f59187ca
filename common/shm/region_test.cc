// Regions on a real directory: what creation leaves, what opening refuses, whose files are ours.
#include "common/shm/region.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "absl/strings/str_format.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

class RegionTest : public testing::Test {
 protected:
  RegionTest() {
    char dir[] = "/dev/shm/hearth_region_test_XXXXXX";
    place_ = {mkdtemp(dir), "n1"};
  }
  ~RegionTest() override { fs::remove_all(place_.dir); }

  ShmRegion Make(const std::string& path, uint64_t body = 100) {
    absl::StatusOr<ShmRegion> region = ShmRegion::Create(path, RegionKind::kSegment, 7, generation_, body);
    EXPECT_TRUE(region.ok()) << std::string(region.status().message());
    return *std::move(region);
  }
  absl::Status OpenStatus(const std::string& path) { return ShmRegion::Open(path, RegionKind::kSegment, 7, MapMode::kReadOnly).status(); }
  void Write(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

  // Runs `child` in a forked process and returns its exit code: for what a test must not do to its own process.
  static int InChild(const std::function<int()>& child) {
    const pid_t pid = fork();
    if (pid == 0) _exit(child());
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
  }

  RegionPlace place_;
  const Hash128 generation_ = RandomHash128();
};

TEST_F(RegionTest, CreatedRegionIsPrivateAllocatedAndLoading) {
  const std::string path = place_.Path("segment0", generation_);
  EXPECT_EQ(path, place_.dir + "/hearth.n1.segment0." + generation_.ToHex());
  ShmRegion region = Make(path, 100'000);
  EXPECT_EQ(region.bytes(), kRegionHeaderBytes + 100'000);
  EXPECT_EQ(region.state(), RegionState::kLoading);
  EXPECT_EQ(region.owner(), *ProcessOf(getpid()));
  EXPECT_EQ(region.header().generation, generation_);
  struct stat st;
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0600u);
  EXPECT_GE(static_cast<uint64_t>(st.st_blocks) * 512,
            region.bytes());  // no holes: nothing is left to fail at the first touch
  region.body()[99'999] = 42;

  absl::StatusOr<ShmRegion> reader = ShmRegion::Open(path, RegionKind::kSegment, 7, MapMode::kReadOnly);
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ(reader->body()[99'999], 42);
  region.SetState(RegionState::kReady);
  EXPECT_EQ(reader->state(), RegionState::kReady);
  region.SetOwner({1234, 99});
  EXPECT_EQ(reader->owner(), (ProcessId{1234, 99}));
  EXPECT_EQ(ShmRegion::Create(path, RegionKind::kSegment, 7, generation_, 1).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(RegionTest, MappingOutlivesTheName) {
  const std::string path = place_.Path("segment0", generation_);
  ShmRegion region = Make(path);
  fs::remove(path);
  region.body()[0] = 5;
  EXPECT_EQ(region.body()[0], 5);
  EXPECT_EQ(OpenStatus(path).code(), absl::StatusCode::kNotFound);
}

TEST_F(RegionTest, EveryFlippedBitOfTheFixedPartIsRefused) {
  const std::string path = place_.Path("segment0", generation_);
  ShmRegion region = Make(path);
  ASSERT_TRUE(OpenStatus(path).ok());
  for (size_t bit = 0; bit < offsetof(RegionHeader, state) * 8; ++bit) {
    region.base()[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    EXPECT_FALSE(OpenStatus(path).ok()) << "bit " << bit;
    region.base()[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
  }
  EXPECT_TRUE(OpenStatus(path).ok());
}

TEST_F(RegionTest, RefusalsNameWhatWasFoundAndExpected) {
  const std::string path = place_.Path("segment0", generation_);
  ShmRegion region = Make(path);
  RegionHeader& h = region.header();
  const auto rehash = [&] { h.fixed_hash = Xxh3_64(&h, offsetof(RegionHeader, fixed_hash)); };

  h.format_version = 9;
  rehash();
  EXPECT_EQ(OpenStatus(path).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(OpenStatus(path).message()), testing::AllOf(HasSubstr("version 9"), HasSubstr("version 1")));
  h.format_version = kRegionFormatVersion;
  rehash();

  const absl::Status version = ShmRegion::Open(path, RegionKind::kSegment, 8, MapMode::kReadOnly).status();
  EXPECT_EQ(version.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(version.message()), testing::AllOf(HasSubstr("version 7"), HasSubstr("version 8")));
  const absl::Status kind = ShmRegion::Open(path, RegionKind::kManifest, 7, MapMode::kReadOnly).status();
  EXPECT_EQ(kind.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(kind.message()), testing::AllOf(HasSubstr("segment"), HasSubstr("manifest")));

  h.magic = 0x1111;
  rehash();
  EXPECT_EQ(OpenStatus(path).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(OpenStatus(path).message()), testing::AllOf(HasSubstr("0x0000000000001111"), HasSubstr("expected")));
  h.magic = kRegionMagic;
  rehash();
  h.state.store(77);
  EXPECT_EQ(OpenStatus(path).code(), absl::StatusCode::kDataLoss);
  h.state.store(2);
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(region.bytes() - 1)), 0);
  EXPECT_EQ(OpenStatus(path).code(), absl::StatusCode::kDataLoss);
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(region.bytes() + 4096)), 0);
  EXPECT_EQ(OpenStatus(path).code(), absl::StatusCode::kDataLoss);
}

TEST_F(RegionTest, CutShortCreationsAndForeignThingsAreRefused) {
  const std::string path = place_.dir + "/x";
  Write(path, "");
  EXPECT_EQ(OpenStatus(path).code(), absl::StatusCode::kDataLoss);
  Write(path, std::string(4095, 'a'));
  EXPECT_EQ(OpenStatus(path).code(), absl::StatusCode::kDataLoss);
  Write(path, std::string(8192, '\0'));  // allocated, header not yet written
  EXPECT_EQ(OpenStatus(path).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(OpenStatus(path).message()), HasSubstr("died while creating"));
  fs::create_symlink(path, place_.dir + "/link");
  EXPECT_EQ(OpenStatus(place_.dir + "/link").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_FALSE(OpenStatus(place_.dir).ok());
}

TEST_F(RegionTest, TooSmallTmpfsIsResourceExhaustedWithBothNumbersAndLeavesNothing) {
  const std::string dir = place_.dir + "/small";
  fs::create_directory(dir);
  const int rc = InChild([&] {
    if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", dir.c_str(), "tmpfs", 0, "size=1m") != 0) {
      return 77;
    }
    const absl::Status status = ShmRegion::Create(dir + "/r", RegionKind::kSegment, 1, generation_, 3 << 20).status();
    const std::string message(status.message());
    const bool named = message.find("needed 3149824 bytes") != std::string::npos && message.find("available 1048576 bytes") != std::string::npos;
    if (!named) fprintf(stderr, "%s\n", message.c_str());
    return absl::IsResourceExhausted(status) && named && fs::is_empty(dir) ? 0 : 1;
  });
  if (rc == 77) GTEST_SKIP() << "mounting a tmpfs of its own is not permitted here";
  EXPECT_EQ(rc, 0);
}

// Where the kernel can, both mappings of a region lie in huge pages; where it can't, huge_bytes says so.
TEST_F(RegionTest, BigRegionsLieInHugePages) {
  const fs::path dir = fs::path("/dev/shm") / ("hearth_region_test." + std::to_string(getpid()));
  fs::create_directory(dir);
  const std::string path = RegionPlace{dir.string(), "n1"}.Path("segment0", generation_);
  absl::StatusOr<ShmRegion> made = ShmRegion::Create(path, RegionKind::kSegment, 1, generation_, (21 << 20) + 100);
  ASSERT_TRUE(made.ok()) << made.status();
  std::memset(made->body(), 0x5a, made->body_bytes());
  made->SetState(RegionState::kReady);
  absl::StatusOr<ShmRegion> opened = ShmRegion::Open(path, RegionKind::kSegment, 1, MapMode::kReadOnly);
  fs::remove_all(dir);
  ASSERT_TRUE(opened.ok()) << opened.status();
  for (const ShmRegion* region : {&*made, &*opened}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(region->base()) % kHugePageBytes, 0u);
    for (uint64_t i = 0; i < region->body_bytes(); ++i) ASSERT_EQ(region->body()[i], 0x5a) << i;
  }
  EXPECT_EQ(opened->huge_bytes(), 0u);
  const auto mapped_huge = [](const ShmRegion& region) {
    std::ifstream smaps("/proc/self/smaps");
    std::string line;
    bool here = false;
    const std::string start = absl::StrFormat("%x-", reinterpret_cast<uintptr_t>(region.base()));
    uint64_t kib = 0;
    while (std::getline(smaps, line)) {
      if (line.find('-') < line.find(' ')) here = line.rfind(start, 0) == 0;
      if (here && line.rfind("ShmemPmdMapped:", 0) == 0) kib = std::stoull(line.substr(15));
    }
    return kib << 10;
  };
  if (made->huge_bytes() == 0) GTEST_SKIP() << "this kernel makes no huge pages in /dev/shm";
  EXPECT_EQ(made->huge_bytes(), 20ull << 20);
  EXPECT_EQ(mapped_huge(*made), made->huge_bytes());
  EXPECT_EQ(mapped_huge(*opened), made->huge_bytes());
}

TEST_F(RegionTest, AllocationGoesInStepsAndEndsWhenItsHookSaysSo) {
  const std::string path = place_.Path("segment0", generation_);
  const uint64_t body = kAllocationStepBytes + (1 << 20);
  std::vector<uint64_t> steps;
  {
    const absl::StatusOr<ShmRegion> region = ShmRegion::Create(path, RegionKind::kSegment, 7, generation_, body, [&](uint64_t allocated) {
      steps.push_back(allocated);
      return absl::OkStatus();
    });
    ASSERT_TRUE(region.ok()) << std::string(region.status().message());
    EXPECT_THAT(steps, ElementsAre(kAllocationStepBytes, body + kRegionHeaderBytes));
    struct stat st;
    ASSERT_EQ(stat(path.c_str(), &st), 0);
    EXPECT_GE(static_cast<uint64_t>(st.st_blocks) * 512, region->bytes());
  }
  fs::remove(path);
  const absl::Status stopped = ShmRegion::Create(path, RegionKind::kSegment, 7, generation_, body, [&](uint64_t allocated) -> absl::Status {
                                 EXPECT_EQ(allocated, kAllocationStepBytes) << "nothing is allocated after the refusal";
                                 return absl::CancelledError("enough");
                               }).status();
  EXPECT_TRUE(absl::IsCancelled(stopped));
  EXPECT_FALSE(fs::exists(path));
}

TEST_F(RegionTest, WhatCannotFitTakesNoMemoryOnTheWay) {
  int steps = 0;
  const absl::Status refused = ShmRegion::Create(place_.dir + "/r", RegionKind::kSegment, 7, generation_, 1ull << 50, [&](uint64_t) -> absl::Status {
                                 ++steps;
                                 return absl::CancelledError("it was begun");
                               }).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << std::string(refused.message());
  EXPECT_EQ(steps, 0);
}

TEST_F(RegionTest, TheOwnerIsReadFromAnyRegionFile) {
  const std::string path = place_.dir + "/r";
  EXPECT_EQ(OwnerOfRegionFile(path), ProcessId{});
  Write(path, std::string(5000, '\0'));  // creation was cut short
  EXPECT_EQ(OwnerOfRegionFile(path), ProcessId{});
  Write(path, "short");
  EXPECT_EQ(OwnerOfRegionFile(path), ProcessId{});
  fs::remove(path);
  ShmRegion region = Make(path);
  EXPECT_EQ(OwnerOfRegionFile(path), *ProcessOf(getpid()));
  region.SetState(RegionState::kRetired);
  region.SetOwner({77, 88});
  EXPECT_EQ(OwnerOfRegionFile(path), (ProcessId{77, 88}));
}

TEST_F(RegionTest, UnwritableAndUnenterableDirectoriesAreNamed) {
  EXPECT_EQ(ShmAvailableBytes("/no/such/dir").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ShmAvailableBytes("/no/such/dir").status().message()), HasSubstr("/no does not exist"));
  EXPECT_EQ(ShmRegion::Create("/no/such/dir/x", RegionKind::kSegment, 1, generation_, 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_GT(*ShmAvailableBytes(place_.dir), 0u);
  if (geteuid() != 0) GTEST_SKIP() << "the rest needs root, to become a user without rights";
  const std::string closed = place_.dir + "/closed", inner = closed + "/inner";
  fs::create_directories(inner);
  fs::permissions(inner, fs::perms::all);
  const auto as_nobody = [&](const std::string& dir, const std::string& named) {
    return InChild([&] {
      if (setgid(65534) != 0 || setuid(65534) != 0) return 77;
      const absl::Status available = ShmAvailableBytes(dir).status();
      const absl::Status created = ShmRegion::Create(dir + "/x", RegionKind::kSegment, 1, generation_, 1).status();
      const bool ok = absl::IsPermissionDenied(available) && absl::IsPermissionDenied(created) &&
                      std::string(available.message()).find(named) != std::string::npos &&
                      std::string(created.message()).find(named) != std::string::npos;
      if (!ok) fprintf(stderr, "%s / %s\n", std::string(available.message()).c_str(), std::string(created.message()).c_str());
      return ok ? 0 : 1;
    });
  };
  fs::permissions(place_.dir, fs::perms::owner_all | fs::perms::others_read | fs::perms::others_exec);
  EXPECT_EQ(as_nobody(place_.dir, place_.dir + " is not writable"), 0);
  fs::permissions(closed, fs::perms::owner_all);
  EXPECT_EQ(as_nobody(inner, closed + " can't be entered"), 0);
}

TEST_F(RegionTest, FilesOfOtherUsersAreNotTrusted) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to own a file as somebody else";
  const std::string path = place_.Path("segment0", generation_);
  Make(path);
  ASSERT_EQ(chown(path.c_str(), 12345, 12345), 0);
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  fs::permissions(place_.dir, fs::perms::all);
  EXPECT_EQ(InChild([&] {
              if (setgid(65534) != 0 || setuid(65534) != 0) return 77;
              return absl::IsPermissionDenied(OpenStatus(path)) ? 0 : 1;
            }),
            0);
}

TEST_F(RegionTest, ListsOnlyThisNodesRegions) {
  const std::string hex = generation_.ToHex();
  const RegionPlace longer{place_.dir, "n1.b"};
  for (const std::string& name : {std::string("hearth.n1.table"), "hearth.n1.segment0." + hex, "hearth.n1.kv." + hex})
    Write(place_.dir + "/" + name, "");
  for (const std::string& name :
       {std::string("hearth.n10.table"), "hearth.n1.b.segment0." + hex, std::string("hearth.n1.b.table"), std::string("hearth.n1"),
        std::string("hearth.n1."), "x.hearth.n1.segment0." + hex, "hearth.n1.segment0." + hex + "00", "hearth.n1.segment0." + hex + ".tmp"}) {
    Write(place_.dir + "/" + name, "");
  }
  EXPECT_THAT(ListRegions(place_), ElementsAre(place_.Path("kv", generation_), place_.Path("segment0", generation_), place_.Path("table")));
  EXPECT_THAT(ListRegions(longer), ElementsAre(longer.Path("segment0", generation_), longer.Path("table")));
  const std::vector<RegionFile> files = ListRegionFiles(place_);
  EXPECT_EQ(files[1].what, "segment0");
  EXPECT_EQ(files[1].generation, generation_);
  EXPECT_FALSE(files[2].generation.has_value());
}

}  // namespace
}  // namespace hearth
