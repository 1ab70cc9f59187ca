// Attaching to images made by hand: look-ups, every kind of damage, listing and removing. Whole checkpoints:
// services/weightstore.
#include "common/shm/weight_image.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "common/base/time.h"
#include "common/shm/expert_record.h"
#include "common/shm/generations.h"
#include "common/shm/kv_pool.h"
#include "common/shm/manifest.h"
#include "common/shm/store_table.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// An image of a few tensors whose bytes nobody looks at.
struct HandMade {
  std::vector<ShmRegion> segments;
  std::vector<ShmRegion> manifest;  // one
};

class WeightImageTest : public testing::Test {
 protected:
  WeightImageTest() {
    char dir[] = "/dev/shm/hearth_image_test_XXXXXX";
    place_ = {mkdtemp(dir), "n1"};
  }
  ~WeightImageTest() override { fs::remove_all(place_.dir); }

  // Two shards of 4 experts in layers 1 and 3, of [192, 130] FP8: shard 0 has 128 rows, shard 1 has 64. Records share
  // their bytes.
  static Manifest SmallManifest(const Hash128& generation) {
    Manifest m;
    m.generation = generation;
    m.fingerprint = {1, 2};
    m.config_json = "{\"a\": 1}";
    m.model_dir = "/models/m";
    m.num_experts = 4;
    m.segments = {{1 << 20, 0}, {1 << 20, 0}};
    TensorRow norm{};
    norm.dtype = static_cast<uint32_t>(DType::kBF16);
    norm.rank = 1;
    for (int64_t& dim : norm.dims) dim = 1;
    norm.dims[0] = 130;
    norm.segment = 1;
    norm.offset = 8192;
    norm.bytes = 260;
    TensorRow linear = norm;
    linear.dtype = static_cast<uint32_t>(DType::kF8E4M3);
    linear.rank = 2;
    linear.dims[1] = 300;
    linear.segment = 0;
    linear.bytes = 39000;
    linear.scale_offset = 8192 + 39040;
    linear.scale_rows = 2;
    linear.scale_cols = 3;
    linear.scale_bytes = 24;
    m.tensors = {norm, linear};
    m.tensor_names = {"norm", "linear"};
    for (const uint32_t layer : {1u, 3u}) AddLayer(m, layer, 192, 130);
    return m;
  }
  static void AddLayer(Manifest& m, uint32_t layer, int64_t intermediate, uint32_t hidden) {
    for (uint32_t expert = 0; expert < m.num_experts; ++expert) {
      for (uint32_t shard = 0; shard < m.segments.size(); ++shard) {
        const ShardRange range = ExpertShard(intermediate, shard, static_cast<int64_t>(m.segments.size()));
        ExpertRow row{};
        row.layer = layer;
        row.expert = expert;
        row.shard = row.segment = shard;
        row.offset = 65536;
        row.begin = range.begin;
        row.count = range.count;
        row.gate_dtype = row.up_dtype = row.down_dtype = static_cast<uint8_t>(DType::kF8E4M3);
        row.hidden = hidden;
        row.bytes = ExpertRecordLayout::Of(DType::kF8E4M3, range.count, hidden).bytes;
        m.experts.push_back(row);
      }
    }
  }

  HandMade Publish(const Manifest& m) {
    HandMade made;
    for (size_t i = 0; i < m.segments.size(); ++i) {
      made.segments.push_back(*ShmRegion::Create(place_.Path(SegmentWhat(static_cast<int64_t>(i)), m.generation), RegionKind::kSegment,
                                                 kSegmentVersion, m.generation, m.segments[i].used_bytes));
      made.segments.back().SetState(RegionState::kReady);
    }
    made.manifest.push_back(
        *ShmRegion::Create(place_.Path(kManifestWhat, m.generation), RegionKind::kManifest, kManifestVersion, m.generation, ManifestBytes(m)));
    WriteManifest(m, made.manifest[0].body());
    made.manifest[0].SetState(RegionState::kReady);
    return made;
  }
  absl::Status AttachStatus() { return WeightImage::Attach(place_, generation_).status(); }

  RegionPlace place_;
  const Hash128 generation_ = RandomHash128();
};

TEST_F(WeightImageTest, FindsTensorsAndExperts) {
  HandMade made = Publish(SmallManifest(generation_));
  absl::StatusOr<std::shared_ptr<const WeightImage>> attached = WeightImage::Attach(place_, generation_);
  ASSERT_TRUE(attached.ok()) << std::string(attached.status().message());
  const WeightImage& image = **attached;
  EXPECT_EQ(image.generation(), generation_);
  EXPECT_EQ(image.fingerprint(), (Hash128{1, 2}));
  EXPECT_EQ(image.config_json(), "{\"a\": 1}");
  EXPECT_EQ(image.generation_config_json(), "");
  EXPECT_EQ(image.model_dir(), "/models/m");
  EXPECT_EQ(image.num_shards(), 2);
  EXPECT_EQ(image.total_bytes(), 2u << 20);

  made.segments[1].body()[8192] = 77;
  const absl::StatusOr<ImageTensor> norm = image.Tensor("norm");
  ASSERT_TRUE(norm.ok());
  EXPECT_EQ(*static_cast<const uint8_t*>(norm->data), 77);
  EXPECT_EQ(norm->shape, std::vector<int64_t>{130});
  EXPECT_EQ(norm->scales, nullptr);
  const absl::StatusOr<ImageTensor> linear = image.Tensor("linear");
  ASSERT_TRUE(linear.ok());
  EXPECT_EQ(linear->shape, (std::vector<int64_t>{130, 300}));
  EXPECT_EQ(linear->scale_stride, 3);
  EXPECT_EQ(reinterpret_cast<const uint8_t*>(linear->scales) - static_cast<const uint8_t*>(linear->data), 39040);
  const absl::Status missing = image.Tensor("nothing.weight").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("nothing.weight"));

  const absl::StatusOr<ImageExpert> expert = image.Expert(3, 2, 1);
  ASSERT_TRUE(expert.ok());
  EXPECT_EQ(expert->begin, 128);
  EXPECT_EQ(expert->count, 64);
  // 64 x 130 bytes are whole cache lines, so the parts follow each other; scales are [1, 2], [1, 2], [2, 1].
  EXPECT_EQ(static_cast<const uint8_t*>(expert->up) - expert->record, 8320);
  EXPECT_EQ(static_cast<const uint8_t*>(expert->down) - expert->record, 16640);
  EXPECT_EQ(reinterpret_cast<const uint8_t*>(expert->gate_scales) - expert->record, 24960);
  EXPECT_EQ(reinterpret_cast<const uint8_t*>(expert->down_scales) - expert->record, 24960 + 128);
  for (const auto& [layer, id, shard] : {std::tuple{2, 0, 0}, {0, 0, 0}, {4, 0, 0}, {-1, 0, 0}, {1, 4, 0}, {1, -1, 0}, {1, 0, 2}, {1, 0, -1}}) {
    EXPECT_EQ(image.Expert(layer, id, shard).status().code(), absl::StatusCode::kNotFound) << layer << " " << id << " " << shard;
  }
  // Gone by name, still mapped.
  ASSERT_TRUE(RemoveGeneration(place_, generation_).ok());
  EXPECT_EQ(*static_cast<const uint8_t*>(norm->data), 77);
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kNotFound);
}

TEST_F(WeightImageTest, ShardsFollowTheDesign) {
  EXPECT_EQ(ExpertShard(384, 0, 2).count, 128);
  EXPECT_EQ(ExpertShard(384, 1, 2).begin, 128);
  EXPECT_EQ(ExpertShard(384, 1, 2).count, 256);
  EXPECT_EQ(ExpertShard(96, 0, 2).count, 0);
  EXPECT_EQ(ExpertShard(96, 1, 2).count, 96);
  for (const int64_t intermediate : {1, 96, 128, 129, 384, 1408, 2048}) {
    for (int64_t shards = 1; shards <= 9; ++shards) {
      int64_t end = 0;
      for (int64_t s = 0; s < shards; ++s) {
        const ShardRange range = ExpertShard(intermediate, s, shards);
        EXPECT_EQ(range.begin, end);
        EXPECT_TRUE(range.count == 0 || range.begin % 128 == 0);
        end += range.count;
      }
      EXPECT_EQ(end, intermediate);
    }
  }
}

TEST_F(WeightImageTest, OnlyReadyIsBelieved) {
  HandMade made = Publish(SmallManifest(generation_));
  for (const RegionState state : {RegionState::kLoading, RegionState::kRetired}) {
    made.manifest[0].SetState(state);
    EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kFailedPrecondition);
  }
  made.manifest[0].SetState(RegionState::kReady);
  made.segments[1].SetState(RegionState::kLoading);
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kFailedPrecondition);
  made.segments[1].SetState(RegionState::kReady);
  EXPECT_TRUE(AttachStatus().ok());
}

TEST_F(WeightImageTest, EveryFlippedBitOfHeadersAndManifestIsRefused) {
  HandMade made = Publish(SmallManifest(generation_));
  const auto flips = [&](uint8_t* bytes, size_t count, const char* what) {
    for (size_t bit = 0; bit < count * 8; ++bit) {
      bytes[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
      EXPECT_FALSE(AttachStatus().ok()) << what << " bit " << bit;
      bytes[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    }
  };
  flips(made.manifest[0].base(), offsetof(RegionHeader, owner_pid), "manifest region header");
  flips(made.segments[0].base(), offsetof(RegionHeader, owner_pid), "segment region header");
  flips(made.manifest[0].body(), ManifestBytes(SmallManifest(generation_)), "manifest");
  EXPECT_TRUE(AttachStatus().ok());
}

// Damage below a right sum: what a builder with a bug would publish, or somebody who means harm.
TEST_F(WeightImageTest, RowsThatPointOutsideAreRefused) {
  const auto refused = [&](const char* what, auto change) {
    Manifest m = SmallManifest(generation_);
    change(m);
    std::vector<uint8_t> body(ManifestBytes(m));
    WriteManifest(m, body.data());
    EXPECT_EQ(ReadManifest(body.data(), body.size()).status().code(), absl::StatusCode::kDataLoss) << what;
  };
  refused("tensor offset", [](Manifest& m) { m.tensors[0].offset = 1 << 20; });
  refused("tensor offset wraps", [](Manifest& m) { m.tensors[0].offset = ~uint64_t{4095}; });
  refused("tensor offset unaligned", [](Manifest& m) { m.tensors[0].offset += 64; });
  refused("tensor bytes", [](Manifest& m) { m.tensors[0].bytes += 2; });
  refused("tensor dims", [](Manifest& m) { m.tensors[0].dims[0] = -130; });
  refused("tensor dims overflow", [](Manifest& m) {
    m.tensors[1].dims[0] = int64_t{1} << 40;
    m.tensors[1].dims[1] = int64_t{1} << 40;
  });
  refused("tensor rank", [](Manifest& m) { m.tensors[0].rank = 5; });
  refused("tensor dtype", [](Manifest& m) { m.tensors[0].dtype = 99; });
  refused("tensor segment", [](Manifest& m) { m.tensors[0].segment = 2; });
  refused("scales", [](Manifest& m) { m.tensors[1].scale_cols = 4; });
  refused("scales outside", [](Manifest& m) { m.tensors[1].scale_offset = (1 << 20) - 64 + 4096; });
  refused("scales inside data", [](Manifest& m) { m.tensors[1].scale_offset = 8192; });
  refused("double name", [](Manifest& m) { m.tensor_names[1] = "norm"; });
  refused("empty name", [](Manifest& m) { m.tensor_names[1] = ""; });
  refused("expert offset", [](Manifest& m) { m.experts[3].offset = (1 << 20) - 4096; });
  refused("expert count", [](Manifest& m) { m.experts[3].count = 65; });
  refused("expert negative count", [](Manifest& m) { m.experts[3].count = -1; });
  refused("expert huge", [](Manifest& m) { m.experts[3].count = int64_t{1} << 40; });
  refused("expert begin", [](Manifest& m) { m.experts[3].begin = 256; });
  refused("expert order", [](Manifest& m) { std::swap(m.experts[2], m.experts[4]); });
  refused("expert missing", [](Manifest& m) { m.experts.pop_back(); });
  refused("layer twice", [](Manifest& m) {
    for (size_t i = 8; i < 16; ++i) m.experts[i].layer = 1;
  });
  refused("no experts", [](Manifest& m) { m.num_experts = 0; });
  refused("no segments", [](Manifest& m) { m.segments.clear(); });
}

TEST_F(WeightImageTest, ShortBodiesAreRefused) {
  const Manifest m = SmallManifest(generation_);
  std::vector<uint8_t> body(ManifestBytes(m));
  WriteManifest(m, body.data());
  EXPECT_TRUE(ReadManifest(body.data(), body.size()).ok());
  for (size_t bytes = 0; bytes < body.size(); ++bytes) EXPECT_FALSE(ReadManifest(body.data(), bytes).ok()) << bytes;
}

TEST_F(WeightImageTest, SegmentsOfAnotherGenerationOrSizeOrMissingAreDataLoss) {
  HandMade made = Publish(SmallManifest(generation_));
  const Hash128 other = RandomHash128();
  HandMade another = Publish(SmallManifest(other));
  fs::rename(place_.Path("segment1", generation_), place_.dir + "/aside");
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kDataLoss);
  fs::copy_file(place_.Path("segment1", other), place_.Path("segment1", generation_));
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(AttachStatus().message()), HasSubstr(other.ToHex()));
  fs::remove(place_.Path("segment1", generation_));
  ShmRegion small = *ShmRegion::Create(place_.Path("segment1", generation_), RegionKind::kSegment, kSegmentVersion, generation_, 4096);
  small.SetState(RegionState::kReady);
  EXPECT_EQ(AttachStatus().code(), absl::StatusCode::kDataLoss);
}

TEST_F(WeightImageTest, GenerationsAreListedAndRemovedAlone) {
  const Hash128 half = RandomHash128(), alone = RandomHash128(), only_table = RandomHash128();
  HandMade ready = Publish(SmallManifest(generation_));
  HandMade loading = Publish(SmallManifest(half));
  loading.manifest[0].SetState(RegionState::kLoading);
  KvGeometry geometry;
  geometry.layers = 1;
  geometry.row_elements = 8;
  geometry.num_pages = 2;
  ASSERT_TRUE(KvPool::Create(place_, alone, geometry).ok());
  ASSERT_TRUE(KvPool::Create(place_, generation_, geometry).ok());
  ASSERT_TRUE(StoreTable::Create(place_, only_table, {.num_pages = 2, .num_rows = 2}).ok());
  for (const char* name : {"hearth.n1.table", "hearth.n2.manifest.0123", "other"}) std::ofstream(place_.dir + "/" + name) << "x";

  const std::vector<GenerationInfo> list = ListGenerations(place_);
  ASSERT_EQ(list.size(), 4u);
  for (const GenerationInfo& info : list) {
    EXPECT_EQ(info.complete, info.generation == generation_);
    EXPECT_EQ(info.problem.ok(), info.complete);
    EXPECT_EQ(info.has_kv_pool, info.generation == alone || info.generation == generation_);
    EXPECT_EQ(info.state, info.generation == generation_ ? RegionState::kReady : RegionState::kLoading);
    EXPECT_EQ(info.owner, *ProcessOf(getpid()));
  }
  ASSERT_TRUE(RemoveGeneration(place_, half).ok());
  ASSERT_TRUE(RemoveGeneration(place_, only_table).ok());
  ASSERT_TRUE(RemoveGeneration(place_, alone).ok());
  ASSERT_TRUE(RemoveGeneration(place_, alone).ok());
  EXPECT_TRUE(AttachStatus().ok());
  EXPECT_EQ(ListGenerations(place_).size(), 1u);
  ASSERT_TRUE(RemoveGeneration(place_, generation_).ok());
  EXPECT_TRUE(ListGenerations(place_).empty());
  EXPECT_EQ(std::distance(fs::directory_iterator(place_.dir), {}), 3);
}

TEST_F(WeightImageTest, AttachingToAGreatModelTakesMilliseconds) {
  Manifest m;
  m.generation = generation_;
  m.num_experts = 256;
  m.segments = {{8 << 20, 0}, {8 << 20, 0}};
  for (uint32_t layer = 3; layer < 63; ++layer) AddLayer(m, layer, 256, 2048);  // 30720 records; they share their bytes
  HandMade made = Publish(m);
  const int64_t begin = MonotonicNowNs();
  const absl::StatusOr<std::shared_ptr<const WeightImage>> image = WeightImage::Attach(place_, generation_);
  const double seconds = static_cast<double>(MonotonicNowNs() - begin) * 1e-9;
  ASSERT_TRUE(image.ok()) << std::string(image.status().message());
  EXPECT_LT(seconds, 0.5);
  RecordProperty("attach_us", static_cast<int>(seconds * 1e6));
  EXPECT_EQ((*image)->Expert(62, 255, 1)->begin, 128);
}

}  // namespace
}  // namespace hearth
