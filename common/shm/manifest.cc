// Manifest to bytes and back, with nothing believed on the way back. Contract: manifest.h. Room: common/shm.
#include "common/shm/manifest.h"

#include <string.h>

#include <algorithm>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "common/base/check.h"
#include "common/shm/expert_record.h"
#include "common/shm/weight_image.h"

namespace hearth {
namespace {

constexpr int64_t kDimMax = int64_t{1} << 40;

struct Placement {
  uint64_t segments = sizeof(ManifestHeader);
  uint64_t tensors, experts, texts, end;
};

uint64_t TextBytes(const Manifest& m) {
  uint64_t bytes = m.config_json.size() + m.generation_config_json.size() + m.model_dir.size() + m.disk_dir.size();
  for (const std::string& name : m.tensor_names) bytes += name.size();
  return bytes;
}

Placement Place(const Manifest& m) {
  Placement p;
  p.tensors = p.segments + m.segments.size() * sizeof(SegmentRow);
  p.experts = p.tensors + m.tensors.size() * sizeof(TensorRow);
  p.texts = p.experts + m.experts.size() * sizeof(ExpertRow);
  p.end = p.texts + TextBytes(m);
  return p;
}

absl::Status Bad(const std::string& what) { return absl::DataLossError(absl::StrCat("manifest: ", what)); }

// [offset, offset + bytes) lies in [0, limit), without the sum ever being formed.
bool Fits(uint64_t offset, uint64_t bytes, uint64_t limit) { return offset <= limit && bytes <= limit - offset; }

// rows * row_bytes at `offset` inside the body, aligned for direct reading.
bool TableFits(uint64_t offset, uint64_t rows, uint64_t row_bytes, uint64_t body_bytes) {
  return offset % 8 == 0 && offset >= sizeof(ManifestHeader) && rows <= body_bytes / row_bytes && Fits(offset, rows * row_bytes, body_bytes);
}

bool KnownDType(uint32_t dtype) {
  return std::any_of(std::begin(kAllDTypes), std::end(kAllDTypes), [dtype](DType known) { return dtype == static_cast<uint32_t>(known); });
}

absl::Status CheckTensor(const TensorRow& row, const std::string& name, const std::vector<SegmentRow>& segments) {
  const auto bad = [&](const char* what) { return Bad(absl::StrCat("tensor ", name, ": ", what)); };
  if (!KnownDType(row.dtype)) return bad("unknown dtype");
  if (row.rank == 0 || row.rank > kManifestRankMax) return bad("unsupported rank");
  const DType dtype = static_cast<DType>(row.dtype);
  uint64_t elements = 1;
  for (uint32_t i = 0; i < kManifestRankMax; ++i) {
    if (row.dims[i] <= 0 || row.dims[i] > kDimMax || (i >= row.rank && row.dims[i] != 1)) return bad("impossible shape");
    // 8: the bytes of an element, at most.
    if (elements > std::numeric_limits<uint64_t>::max() / 8 / static_cast<uint64_t>(row.dims[i])) return bad("impossible shape");
    elements *= static_cast<uint64_t>(row.dims[i]);
  }
  if (row.dims[row.rank - 1] % BlockOf(dtype).elements != 0) return bad("its rows are no whole blocks");
  if (DTypeBytes(dtype, elements) != row.bytes) return bad("its bytes contradict its shape");
  if (row.segment >= segments.size()) return bad("segment out of range");
  const uint64_t limit = segments[row.segment].used_bytes;  // only experts may lie on disk
  if (row.offset % kImageAlign != 0 || !Fits(row.offset, row.bytes, limit)) return bad("its bytes lie outside of its segment");
  if (dtype != DType::kF8E4M3) {
    if (row.scale_offset != 0 || row.scale_bytes != 0 || row.scale_rows != 0 || row.scale_cols != 0) return bad("scales without FP8");
    return absl::OkStatus();
  }
  if (row.rank != 2 || row.scale_rows != ScaleBlocks(row.dims[0]) || row.scale_cols != ScaleBlocks(row.dims[1]) ||
      row.scale_bytes != uint64_t{row.scale_rows} * row.scale_cols * sizeof(float)) {
    return bad("its scales contradict its shape");
  }
  if (row.scale_offset % kRecordPartAlign != 0 || row.scale_offset < row.offset + row.bytes || !Fits(row.scale_offset, row.scale_bytes, limit)) {
    return bad("its scales lie outside of its segment");
  }
  return absl::OkStatus();
}

absl::Status CheckExpert(const ExpertRow& row, const std::vector<SegmentRow>& segments) {
  const auto bad = [&](const char* what) {
    return Bad(absl::StrCat("layer ", row.layer, ", expert ", row.expert, ", shard ", row.shard, ": ", what));
  };
  const ExpertDTypes dtypes = DTypesOf(row);
  for (const uint8_t dtype : {row.gate_dtype, row.up_dtype, row.down_dtype}) {
    if (!KnownDType(dtype)) return bad("unknown dtype");
    if ((dtype == static_cast<uint8_t>(DType::kF8E4M3)) != (dtypes.gate == DType::kF8E4M3)) return bad("FP8 in some of its matrices only");
  }
  if (row.segment >= segments.size()) return bad("segment out of range");
  if (row.hidden == 0 || row.hidden > kRecordSideMax || row.count < 0 || row.count > kRecordSideMax || row.begin < 0 || row.begin > kRecordSideMax) {
    return bad("impossible size");
  }
  if (row.begin % ExpertShardBlock(dtypes) != 0 && row.count != 0) return bad("does not begin on a block");
  if (row.hidden % BlockOf(dtypes.gate).elements != 0 || row.hidden % BlockOf(dtypes.up).elements != 0 ||
      row.count % BlockOf(dtypes.down).elements != 0) {
    return bad("its rows are no whole blocks");
  }
  const ExpertRecordLayout layout = ExpertRecordLayout::Of(dtypes, row.count, row.hidden);
  if (row.bytes != layout.bytes) return bad("its bytes contradict its size");
  const SegmentRow& segment = segments[row.segment];
  const bool resident = Fits(row.offset, row.bytes, segment.used_bytes);
  const bool on_disk = row.offset >= segment.used_bytes && Fits(row.offset - segment.used_bytes, row.bytes, segment.disk_bytes);
  if (row.offset % kImageAlign != 0 || !(resident || on_disk)) return bad("its bytes lie outside of its segment");
  return absl::OkStatus();
}

// Sorted by (layer, expert, shard) and complete, so that a record is found by arithmetic; the shards of an expert join
// without gap.
absl::Status CheckExperts(const Manifest& m) {
  const size_t shards = m.segments.size();
  if (m.experts.empty()) return absl::OkStatus();
  if (m.num_experts == 0 || m.experts.size() % (shards * m.num_experts) != 0) return Bad("expert rows are not complete layers");
  int64_t intermediate_end = 0;
  for (size_t i = 0; i < m.experts.size(); ++i) {
    const ExpertRow& row = m.experts[i];
    RETURN_IF_ERROR(CheckExpert(row, m.segments));
    const size_t in_layer = i % (shards * m.num_experts);
    const bool ordered = row.shard == i % shards && row.expert == in_layer / shards &&
                         (in_layer == 0 ? i == 0 || row.layer > m.experts[i - 1].layer : row.layer == m.experts[i - 1].layer);
    if (!ordered) return Bad(absl::StrCat("expert row ", i, " is out of order"));
    if (row.shard == 0) intermediate_end = 0;
    if (row.count > 0 && row.begin != intermediate_end) return Bad(absl::StrCat("expert row ", i, ": gap between shards"));
    if (row.count > 0) intermediate_end += row.count;
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t ManifestBytes(const Manifest& manifest) { return Place(manifest).end; }

void WriteManifest(const Manifest& m, uint8_t* body) {
  HEARTH_CHECK(m.tensor_names.size() == m.tensors.size());
  const Placement p = Place(m);
  uint64_t text_at = 0;
  const auto add_text = [&](const std::string& text) {
    if (!text.empty()) memcpy(body + p.texts + text_at, text.data(), text.size());
    const ManifestText place{text_at, text.size()};
    text_at += text.size();
    return place;
  };
  if (!m.segments.empty()) memcpy(body + p.segments, m.segments.data(), m.segments.size() * sizeof(SegmentRow));
  for (size_t i = 0; i < m.tensors.size(); ++i) {
    TensorRow row = m.tensors[i];
    row.name = add_text(m.tensor_names[i]);
    memcpy(body + p.tensors + i * sizeof(TensorRow), &row, sizeof(row));
  }
  if (!m.experts.empty()) memcpy(body + p.experts, m.experts.data(), m.experts.size() * sizeof(ExpertRow));
  ManifestHeader h{};
  h.magic = kManifestMagic;
  h.num_segments = static_cast<uint32_t>(m.segments.size());
  h.num_experts = m.num_experts;
  h.body_bytes = p.end;
  h.generation = m.generation;
  h.fingerprint = m.fingerprint;
  h.num_tensors = m.tensors.size();
  h.num_expert_rows = m.experts.size();
  h.segments_offset = p.segments;
  h.tensors_offset = p.tensors;
  h.experts_offset = p.experts;
  h.texts_offset = p.texts;
  h.texts_bytes = p.end - p.texts;
  h.config_json = add_text(m.config_json);
  h.generation_config_json = add_text(m.generation_config_json);
  h.model_dir = add_text(m.model_dir);
  h.disk_dir = add_text(m.disk_dir);
  h.image_bytes_max = m.image_bytes_max;
  h.rows_sum = Xxh3_64(body + sizeof(h), p.end - sizeof(h));
  h.header_sum = Xxh3_64(&h, offsetof(ManifestHeader, header_sum));
  memcpy(body, &h, sizeof(h));
}

absl::StatusOr<Manifest> ReadManifest(const uint8_t* shared, uint64_t region_body_bytes) {
  ManifestHeader h;
  if (region_body_bytes < sizeof(h)) return Bad("too short");
  memcpy(&h, shared, sizeof(h));
  if (h.magic != kManifestMagic) return Bad("no manifest header");
  if (h.header_sum != Xxh3_64(&h, offsetof(ManifestHeader, header_sum))) return Bad("the header's sum does not match: damaged");
  if (h.body_bytes < sizeof(h) || h.body_bytes > region_body_bytes) return Bad("longer than its region");
  // Checked and used from here on: a private copy that nobody can change in between.
  const std::vector<uint8_t> body(shared, shared + h.body_bytes);
  if (h.rows_sum != Xxh3_64(body.data() + sizeof(h), body.size() - sizeof(h))) return Bad("the rows' sum does not match: damaged");
  if (h.num_segments == 0 || h.num_segments > kManifestSegmentsMax) return Bad("impossible number of segments");
  if (!TableFits(h.segments_offset, h.num_segments, sizeof(SegmentRow), body.size()) ||
      !TableFits(h.tensors_offset, h.num_tensors, sizeof(TensorRow), body.size()) ||
      !TableFits(h.experts_offset, h.num_expert_rows, sizeof(ExpertRow), body.size()) || !Fits(h.texts_offset, h.texts_bytes, body.size())) {
    return Bad("a table lies outside");
  }
  bool texts_ok = true;
  const auto text = [&](const ManifestText& place) {
    if (!Fits(place.offset, place.bytes, h.texts_bytes)) {
      texts_ok = false;
      return std::string();
    }
    return std::string(reinterpret_cast<const char*>(body.data()) + h.texts_offset + place.offset, place.bytes);
  };
  const auto table = [&](auto& rows, uint64_t offset, uint64_t count) {
    rows.resize(count);
    if (count > 0) memcpy(rows.data(), body.data() + offset, count * sizeof(rows[0]));
  };
  Manifest m;
  m.generation = h.generation;
  m.fingerprint = h.fingerprint;
  m.num_experts = h.num_experts;
  m.config_json = text(h.config_json);
  m.generation_config_json = text(h.generation_config_json);
  m.model_dir = text(h.model_dir);
  m.disk_dir = text(h.disk_dir);
  m.image_bytes_max = h.image_bytes_max;
  table(m.segments, h.segments_offset, h.num_segments);
  table(m.tensors, h.tensors_offset, h.num_tensors);
  table(m.experts, h.experts_offset, h.num_expert_rows);
  for (const SegmentRow& segment : m.segments) {
    if (segment.disk_bytes == 0) continue;
    if (segment.used_bytes % kImageAlign != 0 || segment.disk_bytes % kImageAlign != 0 || m.disk_dir.empty()) return Bad("an impossible disk part");
  }
  absl::flat_hash_set<std::string> seen;
  for (const TensorRow& row : m.tensors) {
    std::string name = text(row.name);
    if (!texts_ok || name.empty()) return Bad("a name lies outside");
    RETURN_IF_ERROR(CheckTensor(row, name, m.segments));
    if (!seen.insert(name).second) return Bad(absl::StrCat("tensor ", name, " is there twice"));
    m.tensor_names.push_back(std::move(name));
  }
  if (!texts_ok) return Bad("a text lies outside");
  RETURN_IF_ERROR(CheckExperts(m));
  return m;
}

}  // namespace hearth
