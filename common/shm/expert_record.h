// One shard of one routed expert as one run of bytes: gate [c, H] | up [c, H] | down [H, c] | scales.
// docs/weight-image.md. Room: common/shm. May touch: common/base. The weight image, expert rings and device rings all
// hold records of this shape.
#pragma once

#include <cstdint>

#include "common/base/align.h"
#include "common/base/dtype.h"

namespace hearth {

// An expert's matrices may differ in dtype (GGUF conversions often keep `down` in more bits); FP8 they are all or none.
struct ExpertDTypes {
  DType gate = DType::kInvalid;
  DType up = DType::kInvalid;
  DType down = DType::kInvalid;

  ExpertDTypes() = default;
  ExpertDTypes(DType all) : gate(all), up(all), down(all) {}  // NOLINT: most experts have one
  ExpertDTypes(DType gate_dtype, DType up_dtype, DType down_dtype) : gate(gate_dtype), up(up_dtype), down(down_dtype) {}
  friend bool operator==(const ExpertDTypes&, const ExpertDTypes&) = default;
};

// Intermediate rows that stay together when an expert is cut into shards: they are columns of `down`, whose blocks are never cut.
inline int64_t ExpertShardBlock(const ExpertDTypes& dtypes) {
  const int64_t block = BlockOf(dtypes.down).elements;
  return block > kScaleBlock ? block : kScaleBlock;
}

inline constexpr uint64_t kRecordPartAlign = 64;    // each part begins on a cache line
inline constexpr int64_t kRecordSideMax = 1 << 24;  // count and hidden stay below, so that no product here can overflow

// Byte offsets from the record's start. Without FP8 the scale parts are empty.
struct ExpertRecordLayout {
  uint64_t gate = 0;
  uint64_t up = 0;
  uint64_t down = 0;
  uint64_t gate_scales = 0;  // [ceil(c/128), ceil(H/128)]
  uint64_t up_scales = 0;
  uint64_t down_scales = 0;  // [ceil(H/128), ceil(c/128)]
  uint64_t bytes = 0;        // up to the end of the last part; bytes between parts are zero

  // `count`: intermediate rows of this shard; 0 gives an empty record.
  static ExpertRecordLayout Of(const ExpertDTypes& dtypes, int64_t count, int64_t hidden) {
    ExpertRecordLayout layout;
    uint64_t at = 0;
    const auto part = [&at](uint64_t bytes) {
      at = AlignUp(at, kRecordPartAlign);
      const uint64_t begin = at;
      at += bytes;
      return begin;
    };
    const uint64_t elements = static_cast<uint64_t>(count) * static_cast<uint64_t>(hidden);
    layout.gate = part(DTypeBytes(dtypes.gate, elements));
    layout.up = part(DTypeBytes(dtypes.up, elements));
    layout.down = part(DTypeBytes(dtypes.down, elements));
    if (dtypes.gate == DType::kF8E4M3) {
      const uint64_t scales = static_cast<uint64_t>(ScaleBlocks(count) * ScaleBlocks(hidden)) * sizeof(float);
      layout.gate_scales = part(scales);
      layout.up_scales = part(scales);
      layout.down_scales = part(scales);
    }
    layout.bytes = count == 0 ? 0 : at;
    return layout;
  }
};

}  // namespace hearth
