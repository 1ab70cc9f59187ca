// A published weight image, read side: attach to a generation, find tensors and expert records. Layout:
// docs/weight-image.md. Room: common/shm. May touch: common/base. Processes: workers map it read-only; only the store
// writes, and only before READY. A mapping stays valid after the store died or retired the generation: the pages live
// as long as somebody maps them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/shm/expert_record.h"
#include "common/shm/manifest.h"
#include "common/shm/region.h"

namespace hearth {

inline constexpr uint64_t kManifestVersion = 3;  // 2: an expert row has three dtypes; 3: segments may have a part on disk
inline constexpr uint64_t kSegmentVersion = 1;
inline constexpr uint64_t kDiskPartVersion = 1;
inline constexpr uint64_t kImageAlign = 4096;  // tensors and expert records begin on these

struct ImageTensor {
  const void* data = nullptr;
  DType dtype = DType::kInvalid;
  std::vector<int64_t> shape;
  const float* scales = nullptr;  // FP8: [ceil(rows/128), ceil(cols/128)]
  int64_t scale_stride = 0;
};

// One shard of one routed expert: gate [count, H] | up [count, H] | down [H, count] | scales, for intermediate rows
// [begin, begin + count).
struct ImageExpert {
  ExpertDTypes dtypes;
  int64_t begin = 0;
  int64_t count = 0;                // 0: this shard is empty, all pointers are null
  const uint8_t* record = nullptr;  // all of it, for one copy to a device; its inner offsets are ExpertRecordLayout's
  uint64_t record_bytes = 0;
  // Where the record begins in its shard's disk part (DiskPart::path), header counted; none: it is in shared memory. On disk all pointers work as
  // well, through the page cache.
  std::optional<uint64_t> disk_offset;
  const void* gate = nullptr;
  const void* up = nullptr;
  const void* down = nullptr;
  const float* gate_scales = nullptr;  // [ceil(count/128), ceil(H/128)]
  const float* up_scales = nullptr;
  const float* down_scales = nullptr;  // [ceil(H/128), ceil(count/128)]
};

// Intermediate rows of shard s of S: blocks [s*B/S, (s+1)*B/S) of B = ceil(intermediate/block), in integer division
// (DESIGN 3.1). `block`: ExpertShardBlock of the expert's dtypes.
struct ShardRange {
  int64_t begin = 0;
  int64_t count = 0;
};
ShardRange ExpertShard(int64_t intermediate, int64_t shard, int64_t num_shards, int64_t block = kScaleBlock);

inline constexpr std::string_view kManifestWhat = "manifest";  // hearth.<node>.manifest.<generation>
std::string SegmentWhat(int64_t index);                        // hearth.<node>.segment<k>.<generation>
// Routed experts that found no place in shared memory: hearth.<node>.disk<k>.<generation>, in a directory of its own (RegionPlace::disk_dir), allocated and
// written whole before READY, never truncated. Whole records on boundaries of kImageAlign, so that each is one direct read.
std::string DiskWhat(int64_t index);
struct DiskPart {
  std::string path;
  uint64_t bytes = 0;  // of records; 0: the segment has none, and no file
};

// An image larger than the shared memory that it may have keeps a part of its experts on disk: readers see no difference but time, and errors of the disk.
// Threads: any; const after Attach. Checks and tables take milliseconds whatever the image's size: no weight byte is
// read.
class WeightImage {
 public:
  // Errors: NotFound, FailedPrecondition (not READY, another version), DataLoss (manifest hash, segment of another
  // generation, offsets outside).
  static absl::StatusOr<std::shared_ptr<const WeightImage>> Attach(const RegionPlace& place, const Hash128& generation);
  // An image that takes up addresses and no memory: every weight reads as zero. For simulation, which needs shapes and sizes only.
  // Errors: ResourceExhausted where the process may not have as many addresses.
  static absl::StatusOr<std::shared_ptr<const WeightImage>> WithoutWeights(Manifest manifest);
  virtual ~WeightImage() = default;

  virtual const Hash128& generation() const = 0;
  virtual const Hash128& fingerprint() const = 0;  // of the model: config and all tensors
  virtual const std::string& config_json() const = 0;
  virtual const std::string& generation_config_json() const = 0;
  virtual const std::string& model_dir() const = 0;  // where it was loaded from (tokenizer files)
  virtual int64_t num_shards() const = 0;
  virtual uint64_t total_bytes() const = 0;  // in shared memory and on disk
  virtual uint64_t disk_bytes() const = 0;
  virtual std::vector<DiskPart> disk_parts() const = 0;             // by shard
  virtual std::vector<uint64_t> disk_record_bytes_max() const = 0;  // by shard: of the largest record on disk
  virtual const std::string& disk_dir() const = 0;                  // of disk_parts()
  virtual uint64_t image_bytes_max() const = 0;                     // the limit that it was laid out under; 0: none
  virtual std::vector<uint64_t> segment_bytes() const = 0;          // in shared memory
  virtual const uint8_t* segment_data(int64_t shard) const = 0;     // segment_bytes()[shard] of them

  // Around reads of records on disk through these pointers (mapped_file_guard.h, without the guard every error of the disk would end the process): one mark
  // by disk part. What was read since the mark counts only if LostSince is OK; DataLoss names the file. Costs nothing where all is in shared memory.
  using Mark = std::vector<uint64_t>;
  virtual Mark BeginReads() const = 0;
  virtual absl::Status LostSince(const Mark& mark) const = 0;

  virtual absl::StatusOr<ImageTensor> Tensor(std::string_view name) const = 0;  // NotFound names the tensor
  virtual absl::StatusOr<ImageExpert> Expert(int64_t layer, int64_t expert, int64_t shard) const = 0;
};

}  // namespace hearth
