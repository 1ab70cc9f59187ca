// Puts a checkpoint's bytes into the segments, checking and hashing them on the way; or holds them against segments
// that are there. Room: common/image. May touch: common/{formats,shm,base}. Threads: the readers of
// image_reader.h call in parallel.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/image/image_plan.h"
#include "common/image/image_reader.h"

namespace hearth {

// Fills segments. Values that can't be right are refused (CheckValues); a target's sum is taken from the segment
// itself, after the last of its parts has arrived, so that it vouches for what workers will read.
class ImageWriter : public SourceVisitor {
 public:
  // `segments`: both parts of each, as long as plan.manifest.segments has them.
  ImageWriter(const ImagePlan& plan, std::vector<SegmentBytes<uint8_t>> segments);
  absl::Status Piece(size_t index, uint64_t at, const uint8_t* data, uint64_t bytes) override;
  absl::Status Done(size_t index) override;

  // After ReadSources: XXH3-128 of each source's bytes, XXH3-64 of each target.
  const std::vector<Hash128>& digests() const { return digests_; }
  const std::vector<uint64_t>& sums() const { return sums_; }

 private:
  const ImagePlan& plan_;
  const std::vector<SegmentBytes<uint8_t>> segments_;
  std::vector<std::unique_ptr<Hasher128>> hashers_;  // of sources that come in more than one piece
  std::vector<Hash128> digests_;                     // one writer each: the thread that reads the source
  std::vector<uint64_t> sums_;                       // one writer each: the thread that brings the last part
  const std::unique_ptr<std::atomic<uint32_t>[]> parts_left_;
};

// Compares instead of filling: DataLoss names the first tensor whose placed bytes differ from the checkpoint's.
class ImageComparer : public SourceVisitor {
 public:
  ImageComparer(const ImagePlan& plan, std::vector<SegmentBytes<const uint8_t>> segments);
  absl::Status Piece(size_t index, uint64_t at, const uint8_t* data, uint64_t bytes) override;
  absl::Status Done(size_t index) override;
  const std::vector<Hash128>& digests() const { return digests_; }

 private:
  const ImagePlan& plan_;
  const std::vector<SegmentBytes<const uint8_t>> segments_;
  std::vector<std::unique_ptr<Hasher128>> hashers_;
  std::vector<Hash128> digests_;
};

// Where a target lies: segment and bytes, as its manifest row says.
struct TargetRange {
  uint32_t segment = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t sum = 0;
};
TargetRange RangeOfTarget(const Manifest& manifest, uint32_t target);
inline uint32_t NumTargets(const Manifest& m) { return static_cast<uint32_t>(m.tensors.size() + m.experts.size()); }

}  // namespace hearth
