// The manifest's bytes: what a weight image holds, where, and its sums. Byte tables: docs/weight-image.md.
// Room: common/shm. May touch: common/base. Threads: any; plain values.
// Writer: the image builder, before READY. Readers take a private copy, check every offset, and believe only that copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/shm/expert_record.h"
#include "common/shm/region.h"

namespace hearth {

inline constexpr uint64_t kManifestMagic = 0x3154'464e'414d'4748;  // "HGMANFT1" read as bytes
inline constexpr uint32_t kManifestRankMax = 4;
inline constexpr uint32_t kManifestSegmentsMax = 1024;

// A run of bytes in the manifest's text pool.
struct ManifestText {
  uint64_t offset;
  uint64_t bytes;
};

// At the start of the manifest region's body.
struct ManifestHeader {
  uint64_t magic;
  uint32_t num_segments;  // = shards of each routed expert
  uint32_t num_experts;   // routed experts a MoE layer
  uint64_t body_bytes;    // all of the manifest, this header included
  uint64_t rows_sum;      // XXH3-64 of bytes [sizeof(ManifestHeader), body_bytes)
  Hash128 generation;
  Hash128 fingerprint;
  uint64_t num_tensors;
  uint64_t num_expert_rows;
  uint64_t segments_offset;  // offsets from the body's start
  uint64_t tensors_offset;
  uint64_t experts_offset;
  uint64_t texts_offset;
  uint64_t texts_bytes;
  ManifestText config_json;
  ManifestText generation_config_json;
  ManifestText model_dir;
  ManifestText disk_dir;     // where the segments' disk parts are; empty: everything is in shared memory
  uint64_t image_bytes_max;  // the limit on shared memory that the image was laid out under; 0: none
  uint64_t header_sum;       // XXH3-64 of the bytes before this field
};
static_assert(offsetof(ManifestHeader, generation) == 32 && offsetof(ManifestHeader, num_tensors) == 64 &&
              offsetof(ManifestHeader, config_json) == 120 && offsetof(ManifestHeader, disk_dir) == 168 &&
              offsetof(ManifestHeader, header_sum) == 192 && sizeof(ManifestHeader) == 200);

// Offsets in a segment count through both of its parts: below used_bytes they lie in shared memory, from there on in its disk part.
struct SegmentRow {
  uint64_t used_bytes;  // of the body in shared memory; its region may be longer by rounding
  uint64_t disk_bytes;  // of the disk part's body: expert records only. 0: there is none; else used_bytes is a multiple of 4096
};
static_assert(sizeof(SegmentRow) == 16);

// A tensor other than a routed expert's. Offsets count from the segment's body; `offset` is a multiple of 4096.
struct TensorRow {
  ManifestText name;
  uint32_t dtype;
  uint32_t rank;
  int64_t dims[kManifestRankMax];  // 1 beyond rank
  uint32_t segment;
  uint32_t reserved;
  uint64_t offset;
  uint64_t bytes;
  uint64_t scale_offset;  // FP8: F32 [scale_rows, scale_cols]; else all four are 0
  uint64_t scale_bytes;
  uint32_t scale_rows;
  uint32_t scale_cols;
  uint64_t sum;  // XXH3-64 of [offset, end of data or scales); bytes between them are zero
};
static_assert(offsetof(TensorRow, dims) == 24 && offsetof(TensorRow, segment) == 56 && offsetof(TensorRow, offset) == 64 &&
              offsetof(TensorRow, scale_rows) == 96 && offsetof(TensorRow, sum) == 104 && sizeof(TensorRow) == 112);

// One shard of one routed expert (expert_record.h). Rows are sorted by (layer, expert, shard) without gaps in expert
// and shard.
struct ExpertRow {
  uint32_t layer;
  uint32_t expert;
  uint32_t shard;
  uint32_t segment;
  uint64_t offset;  // of the record, a multiple of 4096; 0 when empty
  uint64_t bytes;
  int64_t begin;  // intermediate rows [begin, begin + count)
  int64_t count;  // 0: empty
  uint8_t gate_dtype;
  uint8_t up_dtype;
  uint8_t down_dtype;
  uint8_t reserved;
  uint32_t hidden;
  uint64_t sum;  // XXH3-64 of the record; 0 when empty
};
static_assert(offsetof(ExpertRow, offset) == 16 && offsetof(ExpertRow, gate_dtype) == 48 && offsetof(ExpertRow, sum) == 56 &&
              sizeof(ExpertRow) == 64);

inline ExpertDTypes DTypesOf(const ExpertRow& row) {
  return {static_cast<DType>(row.gate_dtype), static_cast<DType>(row.up_dtype), static_cast<DType>(row.down_dtype)};
}

// A manifest as values: what the builder fills in and what a reader gets.
struct Manifest {
  Hash128 generation;
  Hash128 fingerprint;
  std::string config_json;
  std::string generation_config_json;
  std::string model_dir;
  std::string disk_dir;
  uint64_t image_bytes_max = 0;
  uint32_t num_experts = 0;
  std::vector<SegmentRow> segments;
  std::vector<std::string> tensor_names;  // parallel to `tensors`, whose name fields are filled by WriteManifest
  std::vector<TensorRow> tensors;
  std::vector<ExpertRow> experts;
};

// End of a tensor's bytes, scales included: its sum covers [offset, end).
inline uint64_t TensorEnd(const TensorRow& row) { return row.scale_bytes > 0 ? row.scale_offset + row.scale_bytes : row.offset + row.bytes; }

// Bytes that WriteManifest will write; depends on counts and texts only, so that the region can be made before sums are
// known.
uint64_t ManifestBytes(const Manifest& manifest);
void WriteManifest(const Manifest& manifest, uint8_t* body);
// Errors: DataLoss, for anything that can't be: sums, ranges, shapes, order of rows, double names.
absl::StatusOr<Manifest> ReadManifest(const uint8_t* body, uint64_t body_bytes);

// The bytes of one segment. Byte: uint8_t or const uint8_t.
template <typename Byte>
struct SegmentBytes {
  Byte* resident = nullptr;
  uint64_t resident_bytes = 0;
  Byte* disk = nullptr;  // null without a disk part
  Byte* At(uint64_t offset) const { return offset < resident_bytes || disk == nullptr ? resident + offset : disk + (offset - resident_bytes); }
};

// A READY generation's checked manifest and its segments, mapped read-only: what WeightImage::Attach and `verify` stand
// on.
struct ImageFiles {
  Manifest manifest;
  std::vector<ShmRegion> segments;
  std::vector<std::optional<ShmRegion>> disk_parts;  // by segment

  std::vector<SegmentBytes<const uint8_t>> bytes() const;  // by segment
  // "4096 of /dev/shm/...": where an offset of a segment is, for messages.
  std::string PlaceOf(uint32_t segment, uint64_t offset) const;
};
// Errors: those of WeightImage::Attach. Defined in weight_image.cc.
absl::StatusOr<ImageFiles> OpenImageFiles(const RegionPlace& place, const Hash128& generation);

}  // namespace hearth
