// Images larger than the shared memory that they may have: what goes to disk, what is refused, and what damage is found.
#include "common/image/image_disk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "common/image/image_builder.h"
#include "common/image/image_plan.h"
#include "common/image/image_room.h"
#include "common/image/image_test_checkpoint.h"
#include "common/shm/generations.h"
#include "common/shm/weight_image.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

constexpr int64_t kExperts = 7;  // of which no share is a whole number but all and nothing

// Two MoE layers of 7 experts, cut into 2 shards of unequal size.
class ImageDiskTest : public testing::Test {
 protected:
  BuildOptions Options(uint64_t image_bytes_max) {
    return {.model_dir = files_.model_dir, .place = files_.regions, .image_bytes_max = image_bytes_max, .num_shards = 2, .num_threads = 3};
  }
  std::shared_ptr<const WeightImage> Build(uint64_t image_bytes_max) {
    const absl::StatusOr<BuildResult> built = BuildImage(Options(image_bytes_max));
    EXPECT_TRUE(built.ok()) << Message(built.status());
    if (!built.ok()) return nullptr;
    auto image = WeightImage::Attach(files_.regions, built->generation);
    EXPECT_TRUE(image.ok()) << Message(image.status());
    return image.ok() ? *std::move(image) : nullptr;
  }
  // The smallest limit that is not refused.
  uint64_t DenseBytes() { return all_bytes_ - PlanImage(files_.model_dir, 2)->expert_bytes(); }
  std::vector<std::string> FilesLeft() const {
    std::vector<std::string> names;
    for (const std::string& dir : {files_.regions.dir, files_.regions.disk_dir}) {
      for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename());
    }
    return names;
  }

  const TestImagePlace files_{kExperts};
  const uint64_t all_bytes_ = PlanImage(files_.model_dir, 2)->segment_bytes();
};

TEST_F(ImageDiskTest, EveryRecordIsTheOneOfAnImageThatFits) {
  const auto whole = Build(0);
  ASSERT_NE(whole, nullptr);
  EXPECT_EQ(whole->disk_bytes(), 0u);
  for (const uint64_t limit : {all_bytes_, all_bytes_ - 1, (all_bytes_ + DenseBytes()) / 2, DenseBytes()}) {
    SCOPED_TRACE(limit);
    const auto image = Build(limit);
    ASSERT_NE(image, nullptr);
    EXPECT_EQ(image->fingerprint(), whole->fingerprint());
    EXPECT_EQ(image->total_bytes(), whole->total_bytes());
    EXPECT_EQ(image->image_bytes_max(), limit);
    const std::vector<uint64_t> resident = image->segment_bytes();
    EXPECT_LE(resident[0] + resident[1], limit);
    EXPECT_EQ(resident[0] + resident[1] + image->disk_bytes(), all_bytes_);
    int64_t on_disk[2] = {0, 0};
    for (const int64_t layer : {1, 2}) {
      for (int64_t expert = 0; expert < kExperts; ++expert) {
        for (int64_t shard = 0; shard < 2; ++shard) {
          const absl::StatusOr<ImageExpert> a = whole->Expert(layer, expert, shard), b = image->Expert(layer, expert, shard);
          ASSERT_TRUE(a.ok() && b.ok());
          ASSERT_EQ(a->record_bytes, b->record_bytes);
          EXPECT_EQ(memcmp(a->record, b->record, a->record_bytes), 0);
          EXPECT_FALSE(a->disk_offset.has_value());
          if (!b->disk_offset.has_value()) continue;
          on_disk[layer - 1] += shard;
          // What a direct read would fetch.
          EXPECT_EQ(*b->disk_offset % kImageAlign, 0u);
          std::ifstream file(image->disk_parts()[static_cast<size_t>(shard)].path, std::ios::binary);
          file.seekg(static_cast<std::streamoff>(*b->disk_offset));
          std::string bytes(b->record_bytes, '\0');
          ASSERT_TRUE(file.read(bytes.data(), static_cast<std::streamsize>(bytes.size())));
          EXPECT_EQ(memcmp(a->record, bytes.data(), bytes.size()), 0);
        }
      }
    }
    EXPECT_EQ(on_disk[0], on_disk[1]) << "each layer has the same share";
    EXPECT_EQ(on_disk[0], limit == all_bytes_ ? 0 : limit == all_bytes_ - 1 ? 1 : limit == DenseBytes() ? kExperts : (kExperts + 1) / 2);
    EXPECT_TRUE(VerifyImage(files_.regions, image->generation(), files_.model_dir, nullptr).ok());
    ASSERT_TRUE(RemoveGeneration(files_.regions, image->generation()).ok());
  }
  ASSERT_TRUE(RemoveGeneration(files_.regions, whole->generation()).ok());
  EXPECT_TRUE(FilesLeft().empty());
}

TEST(DiskShare, IsSpreadEvenly) {
  for (const int64_t experts : {1, 7, 8, 256}) {
    for (int64_t on_disk = 0; on_disk <= experts; ++on_disk) {
      int64_t count = 0;
      for (int64_t expert = 0; expert < experts; ++expert) {
        count += IsOnDisk(expert, on_disk, experts);
        // No beginning of the ids has its share wrong by a whole expert.
        EXPECT_LT(std::abs(count * experts - (expert + 1) * on_disk), experts);
      }
      EXPECT_EQ(count, on_disk);
    }
  }
}

TEST_F(ImageDiskTest, WhatCantBeIsRefusedWithNumbersAndLeavesNothing) {
  absl::Status status = BuildImage(Options(DenseBytes() - 1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status),
              AllOf(HasSubstr(absl::StrCat("image_bytes_max = ", DenseBytes() - 1)), HasSubstr(absl::StrCat(DenseBytes(), " bytes"))));
  BuildOptions nowhere = Options(all_bytes_ / 2);
  nowhere.place.disk_dir.clear();
  status = BuildImage(nowhere).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(status), HasSubstr("set weightstore.disk_dir"));
  nowhere.place.disk_dir = files_.work + "/missing";
  EXPECT_EQ(BuildImage(nowhere).status().code(), absl::StatusCode::kNotFound);
  status = CheckDiskRoom(files_.regions.disk_dir, {.segment_bytes = {1}, .disk_bytes = uint64_t{1} << 60});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(status), AllOf(HasSubstr("needed"), HasSubstr("available"), HasSubstr(files_.regions.disk_dir)));
  EXPECT_TRUE(FilesLeft().empty());
}

TEST_F(ImageDiskTest, CancellingWhileItIsFlushedLeavesNothing) {
  BuildOptions options = Options(DenseBytes());
  bool read = false, published = false;
  options.progress = [&](const LoadProgress& p) { read = p.done_bytes == p.total_bytes; };
  options.cancelled = [&] { return read; };
  options.before_ready = [&](const Hash128&) {
    published = true;
    return absl::OkStatus();
  };
  EXPECT_EQ(BuildImage(options).status().code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(published);
  EXPECT_TRUE(FilesLeft().empty());
}

TEST_F(ImageDiskTest, ProgressOfTheFlushEndsAtTheWhole) {
  BuildOptions options = Options(DenseBytes());
  LoadProgress last;
  options.flushing = [&](const LoadProgress& p) { last = p; };
  const absl::StatusOr<BuildResult> built = BuildImage(options);
  ASSERT_TRUE(built.ok()) << Message(built.status());
  EXPECT_GT(built->disk_bytes, 0u);
  EXPECT_EQ(last.done_bytes, last.total_bytes);
  EXPECT_EQ(last.total_bytes, built->disk_bytes + 2 * kRegionHeaderBytes);
}

// A disk part that is shorter than it was, is another generation's, or is gone: an error that tells of the file, at attach, before anything is mapped that
// could end the process.
TEST_F(ImageDiskTest, ADiskPartThatIsNotWholeIsRefused) {
  const auto image = Build(DenseBytes());
  ASSERT_NE(image, nullptr);
  const Hash128 generation = image->generation();
  const std::string path = image->disk_parts()[1].path;
  const auto attached = [&] { return WeightImage::Attach(files_.regions, generation).status(); };
  ASSERT_TRUE(attached().ok());
  fs::rename(path, path + "x");
  absl::Status status = attached();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), AllOf(HasSubstr(path), HasSubstr("a part of the image is gone")));
  EXPECT_FALSE(ListGenerations(files_.regions)[0].complete);
  fs::copy_file(image->disk_parts()[0].path, path);
  EXPECT_EQ(attached().code(), absl::StatusCode::kDataLoss);  // too short: shards are of unequal size
  fs::remove(path);
  fs::rename(path + "x", path);
  ASSERT_TRUE(attached().ok());
  fs::resize_file(path, fs::file_size(path) - 1);
  status = attached();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), HasSubstr(path));
  EXPECT_TRUE(TellsOfTheFile(status)) << "so the store loads anew";
}

TEST_F(ImageDiskTest, VerifyNamesWhatTheDiskChanged) {
  const auto image = Build(DenseBytes());
  ASSERT_NE(image, nullptr);
  const ImageExpert expert = *image->Expert(2, 3, 1);
  const std::string path = image->disk_parts()[1].path;
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(*expert.disk_offset + 17));
  file.put(static_cast<char>(expert.record[17] ^ 0x10));
  file.close();
  const absl::Status status = VerifyImage(files_.regions, image->generation(), "", nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status),
              AllOf(HasSubstr("model.layers.2.mlp.experts.3, shard 1 of 2"), HasSubstr(absl::StrCat(*expert.disk_offset, " of ", path))));
}

// The configuration may name another directory by now: an image says itself where its disk part is.
TEST_F(ImageDiskTest, AnotherDirectoryInTheConfigurationLosesNothing) {
  const auto image = Build(DenseBytes());
  ASSERT_NE(image, nullptr);
  RegionPlace other = files_.regions;
  other.disk_dir = files_.work;
  EXPECT_TRUE(WeightImage::Attach(other, image->generation()).ok());
  EXPECT_TRUE(RemoveGeneration(other, image->generation()).ok());
  EXPECT_TRUE(FilesLeft().empty());
}

}  // namespace
}  // namespace hearth
