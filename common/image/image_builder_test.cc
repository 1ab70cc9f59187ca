// Whole checkpoints through the builder: every byte found again, every refusal leaves nothing, every death leaves
// nothing READY.
#include "common/image/image_builder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "common/image/image_plan.h"
#include "common/image/image_reader.h"
#include "common/image/image_room.h"
#include "common/image/image_test_checkpoint.h"
#include "common/image/image_writer.h"
#include "common/shm/generations.h"
#include "common/shm/manifest.h"
#include "common/shm/weight_image.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

std::string SourceDir() {
  const char* dir = getenv("HEARTH_SOURCE_DIR");
  return dir != nullptr ? dir : ".";
}
std::string SharedDir() {
  const char* dir = getenv("HEARTH_SHARED_DIR");
  return dir != nullptr ? dir : SourceDir() + "/../shared";
}
std::string FableDir() { return SourceDir() + "/deploy/models/fable-moe"; }

class ImageTest : public testing::Test {
 protected:
  ImageTest() {
    char shm[] = "/dev/shm/hearth_builder_test_XXXXXX";
    place_ = {mkdtemp(shm), "n1"};
    std::string model = testing::TempDir() + "/hearth_builder_test_XXXXXX";
    model_dir_ = mkdtemp(model.data());
  }
  ~ImageTest() override {
    fs::remove_all(place_.dir);
    fs::remove_all(model_dir_);
  }

  BuildOptions Options(const std::string& dir, int shards) {
    BuildOptions options;
    options.model_dir = dir;
    options.place = place_;
    options.num_shards = shards;
    options.num_threads = 3;
    return options;
  }
  BuildResult Build(const std::string& dir, int shards) {
    absl::StatusOr<BuildResult> result = BuildImage(Options(dir, shards));
    EXPECT_TRUE(result.ok()) << Message(result.status());
    return result.ok() ? *result : BuildResult{};
  }
  std::vector<std::string> FilesLeft() const {
    std::vector<std::string> names;
    for (const std::string& dir : {place_.dir, place_.disk_dir}) {
      if (dir.empty()) continue;
      for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename());
    }
    return names;
  }
  // Overwrites bytes of a tensor in model_dir_.
  void Poke(const std::string& tensor, uint64_t at, const std::string& bytes) {
    const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(model_dir_);
    ASSERT_TRUE(checkpoint.ok()) << Message(checkpoint.status());
    const CheckpointTensor* t = checkpoint->Find(tensor);
    ASSERT_NE(t, nullptr) << tensor;
    std::fstream file(checkpoint->files()[static_cast<size_t>(t->file)].path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(t->offset + at));
    file << bytes;
  }

  RegionPlace place_;
  std::string model_dir_;
};

// The checkpoint's bytes, read by the plainest means: the other witness.
std::string TensorBytes(const Checkpoint& checkpoint, const std::string& name) {
  const CheckpointTensor* t = checkpoint.Find(name);
  EXPECT_NE(t, nullptr) << name;
  std::string bytes(t->bytes, '\0');
  std::ifstream file(checkpoint.files()[static_cast<size_t>(t->file)].path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(t->offset));
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

std::vector<float> Scales(const Checkpoint& checkpoint, const std::string& name) {
  const std::string bytes = TensorBytes(checkpoint, name);
  std::vector<float> scales;
  if (checkpoint.Find(name)->dtype == DType::kF32) {
    scales.resize(bytes.size() / 4);
    memcpy(scales.data(), bytes.data(), bytes.size());
  } else {
    for (size_t i = 0; i < bytes.size(); i += 2) {
      bf16 value;
      memcpy(&value, bytes.data() + i, 2);
      scales.push_back(ToFloat(value));
    }
  }
  return scales;
}

// Joins a matrix from the shards of all experts: rows of gate and up follow each other, columns of down stand side by
// side.
template <typename Part>
std::string Join(const std::vector<ImageExpert>& shards, bool columns, int64_t other, size_t element, int64_t unit, Part part) {
  std::string joined;
  const auto side = [&](const ImageExpert& shard) { return (shard.count + unit - 1) / unit; };
  if (!columns) {
    for (const ImageExpert& shard : shards) joined.append(static_cast<const char*>(part(shard)), static_cast<size_t>(side(shard) * other) * element);
    return joined;
  }
  for (int64_t row = 0; row < other; ++row) {
    for (const ImageExpert& shard : shards) {
      const size_t bytes = static_cast<size_t>(side(shard)) * element;
      joined.append(static_cast<const char*>(part(shard)) + static_cast<size_t>(row) * bytes, bytes);
    }
  }
  return joined;
}

std::string FloatBytes(const std::vector<float>& floats) {
  return std::string(reinterpret_cast<const char*>(floats.data()), floats.size() * sizeof(float));
}

void ExpectImageEqualsCheckpoint(const WeightImage& image, const std::string& dir) {
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(checkpoint.ok());
  const absl::StatusOr<ModelConfig> config = ReadModelConfig(dir);
  ASSERT_TRUE(config.ok());
  const int64_t hidden = config->hidden_size, hidden_blocks = (hidden + 127) / 128;
  int experts = 0;
  for (const PlannedTensor& planned : PlanTensors(*config)) {
    const CheckpointTensor* source = checkpoint->Find(planned.name);
    ASSERT_NE(source, nullptr) << planned.name;
    const size_t element = DTypeBytes(source->dtype, 1);
    const bool fp8 = source->dtype == DType::kF8E4M3;
    if (planned.expert < 0) {
      const absl::StatusOr<ImageTensor> tensor = image.Tensor(planned.name);
      ASSERT_TRUE(tensor.ok()) << Message(tensor.status());
      EXPECT_EQ(tensor->dtype, source->dtype);
      EXPECT_EQ(tensor->shape, source->shape);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->data) % kImageAlign, 0u);
      ASSERT_EQ(std::string(static_cast<const char*>(tensor->data), source->bytes), TensorBytes(*checkpoint, planned.name)) << planned.name;
      ASSERT_EQ(tensor->scales != nullptr, fp8) << planned.name;
      if (fp8) {
        const std::vector<float> scales = Scales(*checkpoint, planned.name + "_scale_inv");
        EXPECT_EQ(tensor->scale_stride, (source->shape[1] + 127) / 128);
        ASSERT_EQ(memcmp(tensor->scales, scales.data(), scales.size() * 4), 0) << planned.name;
      }
      continue;
    }
    ++experts;
    EXPECT_FALSE(image.Tensor(planned.name).ok());
    std::vector<ImageExpert> shards;
    for (int64_t s = 0; s < image.num_shards(); ++s) {
      const absl::StatusOr<ImageExpert> shard = image.Expert(planned.layer, planned.expert, s);
      ASSERT_TRUE(shard.ok()) << Message(shard.status());
      const ShardRange range = ExpertShard(config->moe_intermediate_size, s, image.num_shards());
      EXPECT_EQ(shard->begin, range.begin);
      EXPECT_EQ(shard->count, range.count);
      EXPECT_EQ(shard->dtypes, ExpertDTypes(source->dtype));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(shard->record) % kImageAlign, 0u);
      for (const void* part :
           {shard->gate, shard->up, shard->down, static_cast<const void*>(shard->gate_scales), static_cast<const void*>(shard->down_scales)}) {
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part) % 64, 0u);
      }
      EXPECT_EQ(shard->gate_scales != nullptr, fp8 && range.count > 0);
      shards.push_back(*shard);
    }
    const bool down = planned.role == TensorRole::kExpertDown;
    const auto weights = [&](const ImageExpert& e) { return planned.role == TensorRole::kExpertGate ? e.gate : down ? e.down : e.up; };
    ASSERT_EQ(Join(shards, down, hidden, element, 1, weights), TensorBytes(*checkpoint, planned.name)) << planned.name;
    if (!fp8) continue;
    const auto scales = [&](const ImageExpert& e) -> const void* {
      return planned.role == TensorRole::kExpertGate ? e.gate_scales : down ? e.down_scales : e.up_scales;
    };
    ASSERT_EQ(Join(shards, down, hidden_blocks, 4, 128, scales), FloatBytes(Scales(*checkpoint, planned.name + "_scale_inv"))) << planned.name;
  }
  EXPECT_GT(experts, 0);
}

// --- every byte found again ---

class RoundTrip : public ImageTest, public testing::WithParamInterface<std::tuple<std::string, int>> {};

TEST_P(RoundTrip, EveryByteIsTheCheckpoints) {
  const auto& [model, shards] = GetParam();
  const std::string dir = model == "fable-moe" ? FableDir() : SharedDir() + "/oracles/models/" + model;
  if (!fs::exists(dir + "/config.json")) GTEST_SKIP() << dir << " is not there";
  const BuildResult result = Build(dir, shards);
  const absl::StatusOr<std::shared_ptr<const WeightImage>> image = WeightImage::Attach(place_, result.generation);
  ASSERT_TRUE(image.ok()) << Message(image.status());
  EXPECT_EQ((*image)->num_shards(), shards);
  EXPECT_EQ((*image)->fingerprint(), result.fingerprint);
  EXPECT_EQ((*image)->total_bytes(), result.bytes);
  EXPECT_EQ((*image)->model_dir(), dir);
  std::ifstream config(dir + "/config.json");
  std::stringstream text;
  text << config.rdbuf();
  EXPECT_EQ((*image)->config_json(), text.str());
  ExpectImageEqualsCheckpoint(**image, dir);
  const absl::Status verified = VerifyImage(place_, result.generation, dir, nullptr);
  EXPECT_TRUE(verified.ok()) << Message(verified);
}

INSTANTIATE_TEST_SUITE_P(Models, RoundTrip,
                         testing::Combine(testing::Values("fable-moe", "deepseek_v3_odd", "deepseek_v2_lite", "deepseek_v3_yarn",
                                                          "deepseek_v3_no_qlora", "kimi_k2"),
                                          testing::Values(1, 2, 3)),
                         [](const auto& info) { return std::get<0>(info.param).substr(0, 5) + std::to_string(info.index); });

struct SynthCase {
  const char* name;
  TestCheckpointOptions options;
};

class SynthRoundTrip : public ImageTest, public testing::WithParamInterface<SynthCase> {};

TEST_P(SynthRoundTrip, UnequalAndEmptyShards) {
  WriteTestCheckpoint(model_dir_, TestConfig(), GetParam().options);
  Hash128 fingerprint;
  for (const int shards : {1, 2, 3, 5}) {
    const BuildResult result = Build(model_dir_, shards);
    const absl::StatusOr<std::shared_ptr<const WeightImage>> image = WeightImage::Attach(place_, result.generation);
    ASSERT_TRUE(image.ok()) << Message(image.status());
    ExpectImageEqualsCheckpoint(**image, model_dir_);
    const absl::Status verified = VerifyImage(place_, result.generation, model_dir_, nullptr);
    EXPECT_TRUE(verified.ok()) << Message(verified);
    if (shards == 1) fingerprint = result.fingerprint;
    EXPECT_EQ(result.fingerprint, fingerprint) << "the fingerprint must not depend on the shard count";
    if (shards == 2) {
      EXPECT_EQ((*image)->Expert(1, 0, 0)->count, 128);
      EXPECT_EQ((*image)->Expert(1, 0, 1)->count, 256);
    }
    ASSERT_TRUE(RemoveGeneration(place_, result.generation).ok());
  }
  EXPECT_TRUE(FilesLeft().empty());
}

INSTANTIATE_TEST_SUITE_P(Kinds, SynthRoundTrip,
                         testing::Values(SynthCase{"Fp8", {}}, SynthCase{"Fp8Bf16Scales", {true, DType::kBF16}}, SynthCase{"Bf16", {false}},
                                         SynthCase{"F16", {false, DType::kF32, DType::kF16}}, SynthCase{"F32", {false, DType::kF32, DType::kF32}},
                                         SynthCase{"UnalignedF32", {false, DType::kF32, DType::kF32, 1, 3}},
                                         SynthCase{"UnalignedFp8", {true, DType::kF32, DType::kBF16, 1, 5}}),
                         [](const auto& info) { return info.param.name; });

// What config.json alone describes is what the checkpoint makes, but for the MTP module and the sums.
TEST(DescribedImage, HasTheRowsOfTheRealOne) {
  const auto real = PlanImage(FableDir(), 2);
  ASSERT_TRUE(real.ok()) << real.status();
  const auto texts = ReadModelTexts(FableDir());
  ASSERT_TRUE(texts.ok());
  auto described = DescribeImage(*texts, 2);
  ASSERT_TRUE(described.ok()) << described.status();
  EXPECT_EQ(described->experts.size(), 5u * 32 * 2) << "five MoE layers, without the MTP module's";
  for (size_t i = 0; i < described->experts.size(); ++i) {
    const ExpertRow& a = described->experts[i];
    const ExpertRow& b = real->manifest.experts[i];
    EXPECT_TRUE(a.layer == b.layer && a.expert == b.expert && a.shard == b.shard && a.bytes == b.bytes && a.count == b.count &&
                DTypesOf(a) == DTypesOf(b))
        << ManifestTargetName(*described, static_cast<uint32_t>(described->tensors.size() + i));
  }
  size_t found = 0;
  for (size_t i = 0; i < real->manifest.tensors.size(); ++i) {
    const std::string& name = real->manifest.tensor_names[i];
    const auto at = std::find(described->tensor_names.begin(), described->tensor_names.end(), name);
    if (at == described->tensor_names.end()) {
      EXPECT_TRUE(name.starts_with("model.layers.6.")) << name << " is not of the MTP module";
      continue;
    }
    ++found;
    const TensorRow& a = described->tensors[static_cast<size_t>(at - described->tensor_names.begin())];
    const TensorRow& b = real->manifest.tensors[i];
    EXPECT_TRUE(a.dtype == b.dtype && a.bytes == b.bytes && a.scale_bytes == b.scale_bytes && a.dims[0] == b.dims[0]) << name;
  }
  EXPECT_EQ(found, described->tensors.size());

  const auto made = WeightImage::WithoutWeights(*std::move(described));
  ASSERT_TRUE(made.ok()) << made.status();
  const auto& image = *made;
  const auto expert = image->Expert(1, 31, 1);
  ASSERT_TRUE(expert.ok()) << expert.status();
  EXPECT_EQ(expert->record[expert->record_bytes - 1], 0) << "all of it can be read";
  EXPECT_EQ(image->segment_bytes().size(), 2u);
}

TEST_F(ImageTest, TensorsLongerThanAReadPiece) {
  nlohmann::json config = TestConfig();
  config["hidden_size"] = 24000;  // experts of 384 x 24000 = 9.2 MB and an embedding of 300 x 24000 x 2 = 14.4 MB
  config["n_routed_experts"] = 2;
  config["num_hidden_layers"] = 2;
  config["intermediate_size"] = 8;
  WriteTestCheckpoint(model_dir_, config, {});
  const BuildResult result = Build(model_dir_, 2);
  const absl::StatusOr<std::shared_ptr<const WeightImage>> image = WeightImage::Attach(place_, result.generation);
  ASSERT_TRUE(image.ok()) << Message(image.status());
  ExpectImageEqualsCheckpoint(**image, model_dir_);
  EXPECT_TRUE(VerifyImage(place_, result.generation, model_dir_, nullptr).ok());
  // A bad value behind the first piece is refused too: the embedding's last element becomes infinite.
  Poke("model.embed_tokens.weight", 300 * 24000 * 2 - 2, std::string("\x80\x7f", 2));
  const absl::Status refused = BuildImage(Options(model_dir_, 1)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(refused), HasSubstr("model.embed_tokens.weight"));
  EXPECT_EQ(VerifyImage(place_, result.generation, model_dir_, nullptr).code(), absl::StatusCode::kDataLoss);
}

// --- identity ---

TEST_F(ImageTest, FingerprintTellsFineTunesAndConfigsApart) {
  WriteTestCheckpoint(model_dir_, TestConfig(), {});
  const Hash128 first = Build(model_dir_, 1).fingerprint;
  EXPECT_EQ(Build(model_dir_, 1).fingerprint, first);
  Poke("model.layers.2.mlp.experts.3.down_proj.weight", 1000, "\x11\x22");
  const Hash128 tuned = Build(model_dir_, 1).fingerprint;
  EXPECT_NE(tuned, first);
  nlohmann::json config = TestConfig();
  config["rope_theta"] = 20000.0;
  WriteTestCheckpoint(model_dir_, config, {});
  EXPECT_NE(Build(model_dir_, 1).fingerprint, first);
}

// --- proof ---

TEST_F(ImageTest, VerifyNamesWhatWasChangedInMemory) {
  WriteTestCheckpoint(model_dir_, TestConfig(), {});
  const BuildResult result = Build(model_dir_, 2);
  const absl::StatusOr<ImageFiles> files = OpenImageFiles(place_, result.generation);
  ASSERT_TRUE(files.ok());
  const auto flipped = [&](uint32_t target, uint64_t at) {
    const TargetRange range = RangeOfTarget(files->manifest, target);
    const std::string path = place_.Path(SegmentWhat(range.segment), result.generation);
    absl::StatusOr<ShmRegion> region = ShmRegion::Open(path, RegionKind::kSegment, kSegmentVersion, MapMode::kReadWrite);
    EXPECT_TRUE(region.ok());
    region->body()[range.offset + at] ^= 0x10;
    const absl::Status status = VerifyImage(place_, result.generation, "", nullptr);
    region->body()[range.offset + at] ^= 0x10;
    return status;
  };
  EXPECT_TRUE(VerifyImage(place_, result.generation, "", nullptr).ok());
  const uint32_t tensors = static_cast<uint32_t>(files->manifest.tensors.size());
  for (const uint32_t target : {0u, tensors - 1}) {
    const absl::Status status = flipped(target, 5);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(Message(status), HasSubstr(files->manifest.tensor_names[target]));
  }
  // Row 11 of the experts: layer 1 has 4 experts of 2 shards, so it is layer 2, expert 1, shard 1. Its last byte is a
  // scale's.
  const absl::Status status = flipped(tensors + 11, files->manifest.experts[11].bytes - 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), HasSubstr("model.layers.2.mlp.experts.1, shard 1 of 2"));
  EXPECT_TRUE(VerifyImage(place_, result.generation, model_dir_, nullptr).ok());
}

TEST_F(ImageTest, VerifyHoldsTheImageAgainstTheCheckpoint) {
  WriteTestCheckpoint(model_dir_, TestConfig(), {});
  const BuildResult result = Build(model_dir_, 3);
  const std::string expert = "model.layers.1.mlp.experts.2.down_proj.weight";
  Poke(expert, 200 * 384 - 1, "\x01");
  Poke(expert, 200 * 384 - 2, "\x02");
  const absl::Status status = VerifyImage(place_, result.generation, model_dir_, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), HasSubstr(expert));
  EXPECT_TRUE(VerifyImage(place_, result.generation, "", nullptr).ok());
  nlohmann::json config = TestConfig();
  config["rope_theta"] = 20000.0;
  WriteTestCheckpoint(model_dir_, config, {});
  EXPECT_THAT(Message(VerifyImage(place_, result.generation, model_dir_, nullptr)), HasSubstr("config.json"));
}

// --- refusals that leave nothing ---

TEST_F(ImageTest, TooLittleRoomIsRefusedWithBothNumbers) {
  BuildOptions options = Options(FableDir(), 2);
  uint64_t reserve_bytes = uint64_t{1} << 50;
  options.reserve = [&](const Manifest&) { return reserve_bytes; };
  const absl::StatusOr<ImagePlan> plan = PlanImage(FableDir(), 2);
  ASSERT_TRUE(plan.ok());
  const uint64_t needed = plan->segment_bytes() + ManifestBytes(plan->manifest) + 3 * kRegionHeaderBytes + reserve_bytes;
  const absl::Status status = BuildImage(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(status), AllOf(HasSubstr(absl::StrCat("(", needed, " bytes), available ")), HasSubstr(place_.dir),
                                     HasSubstr("kept free for KV pool and rings 1125899906842624")));
  reserve_bytes = UINT64_MAX;
  EXPECT_EQ(BuildImage(options).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(FilesLeft().empty());
}

TEST_F(ImageTest, NanCodesAreRefusedByNameAndLeaveNothing) {
  WriteTestCheckpoint(model_dir_, TestConfig(), {});
  for (const char* code : {"\x7f", "\xff"}) {
    WriteTestCheckpoint(model_dir_, TestConfig(), {});
    Poke("model.layers.2.mlp.experts.3.up_proj.weight", 777, code);
    const absl::Status status = BuildImage(Options(model_dir_, 2)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(Message(status), AllOf(HasSubstr("model.layers.2.mlp.experts.3.up_proj.weight"), HasSubstr("777")));
    EXPECT_TRUE(FilesLeft().empty());
  }
  for (const float scale : {0.0f, -1.0f, HUGE_VALF, NAN}) {
    WriteTestCheckpoint(model_dir_, TestConfig(), {});
    const std::string name = "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv";
    Poke(name, 4, std::string(reinterpret_cast<const char*>(&scale), 4));
    const absl::Status status = BuildImage(Options(model_dir_, 2)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << scale;
    EXPECT_THAT(Message(status), HasSubstr(name));
    EXPECT_TRUE(FilesLeft().empty());
  }
}

TEST_F(ImageTest, CancellingAtAnyTimeLeavesNothing) {
  for (int after = 0; after < 4; ++after) {
    BuildOptions options = Options(FableDir(), 2);
    int asked = 0;
    options.cancelled = [&] { return asked++ >= after; };
    const absl::StatusOr<BuildResult> result = BuildImage(options);
    if (result.ok()) {  // it was faster than the question
      ASSERT_TRUE(RemoveGeneration(place_, result->generation).ok());
    } else {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled) << Message(result.status());
    }
    EXPECT_TRUE(FilesLeft().empty());
  }
}

TEST_F(ImageTest, AnErrorBeforeReadyRemovesEverything) {
  BuildOptions options = Options(FableDir(), 1);
  options.before_ready = [&](const Hash128& generation) -> absl::Status {
    // What is made here belongs to the generation and goes with it; no worker can attach yet.
    EXPECT_EQ(WeightImage::Attach(place_, generation).status().code(), absl::StatusCode::kFailedPrecondition);
    RETURN_IF_ERROR(ShmRegion::Create(place_.Path("kv", generation), RegionKind::kKvPool, 1, generation, 10).status());
    return absl::ResourceExhaustedError("no room for the pool");
  };
  EXPECT_THAT(Message(BuildImage(options).status()), HasSubstr("no room for the pool"));
  EXPECT_TRUE(FilesLeft().empty());
}

TEST_F(ImageTest, MissingThingsAreRefusedBeforeAnythingIsMade) {
  EXPECT_EQ(BuildImage(Options("/no/such/model", 1)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(BuildImage(Options(FableDir(), 0)).status().code(), absl::StatusCode::kInvalidArgument);
  BuildOptions options = Options(FableDir(), 1);
  options.place.dir = "/no/such/dir";
  EXPECT_EQ(BuildImage(options).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(FilesLeft().empty());
}

TEST_F(ImageTest, AFileThatShrinksWhileItIsReadIsDataLoss) {
  WriteTestCheckpoint(model_dir_, TestConfig(), {});
  const absl::StatusOr<ImagePlan> plan = PlanImage(model_dir_, 1);
  ASSERT_TRUE(plan.ok());
  fs::resize_file(model_dir_ + "/model.safetensors", fs::file_size(model_dir_ + "/model.safetensors") - 1);
  std::vector<uint8_t> segment(plan->segment_bytes());
  ImageWriter writer(*plan, {{segment.data(), segment.size()}});
  const absl::Status status = ReadSources(*plan, writer, ReadOptions{2, nullptr, nullptr});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), HasSubstr("model.safetensors: ends at byte"));
}

TEST_F(ImageTest, CancellingWhileMemoryIsAllocatedLeavesNothing) {
  BuildOptions options = Options(FableDir(), 2);
  bool allocated = false, read = false;
  options.allocating = [&](const LoadProgress&) { allocated = true; };
  options.progress = [&](const LoadProgress&) { read = true; };
  options.cancelled = [&] { return allocated; };
  EXPECT_EQ(BuildImage(options).status().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(allocated);
  EXPECT_FALSE(read);
  EXPECT_TRUE(FilesLeft().empty());
}

TEST_F(ImageTest, ProgressEndsAtTheWhole) {
  std::vector<LoadProgress> seen;
  BuildOptions options = Options(FableDir(), 2);
  std::vector<LoadProgress> before;
  options.allocating = [&](const LoadProgress& p) {
    EXPECT_TRUE(seen.empty()) << "memory first";
    before.push_back(p);
  };
  options.progress = [&](const LoadProgress& p) { seen.push_back(p); };
  ASSERT_TRUE(BuildImage(options).ok());
  ASSERT_FALSE(before.empty());
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(before.back().done_bytes, before.back().total_bytes);
  EXPECT_GE(before.back().done_bytes, seen.back().total_bytes);
  for (size_t i = 1; i < seen.size(); ++i) EXPECT_GE(seen[i].done_bytes, seen[i - 1].done_bytes);
  EXPECT_EQ(seen.back().done_bytes, seen.back().total_bytes);
  EXPECT_GT(seen.back().bytes_per_second, 0);
  EXPECT_EQ(seen.back().eta_seconds, 0);
}

// --- death at any moment ---

TEST_F(ImageTest, KilledBuildersLeaveNothingReadyAndEverythingRemovable) {
  const std::string hex = RandomHash128().ToHex();
  const std::vector<std::string> foreign = {"hearth.n1.table", "hearth.n2.manifest." + hex, "hearth.n1.b.segment0." + hex, "somebody.else"};
  for (const std::string& name : foreign) std::ofstream(place_.dir + "/" + name) << "keep";
  // Deaths at known places: between reading and publishing, and when all is READY but the manifest. Then deaths after
  // all sorts of times.
  int unpublished = 0;
  constexpr int kWhileLoading = -1, kBeforeReady = -2;
  const auto run_and_kill = [&](int delay_us) {
    const pid_t child = fork();
    if (child == 0) {
      BuildOptions options = Options(FableDir(), 2);
      int asked = 0;
      if (delay_us == kWhileLoading) {
        options.cancelled = [&asked] {
          if (++asked == 2) kill(getpid(), SIGKILL);  // the first time nothing is made yet
          return false;
        };
      }
      if (delay_us == kBeforeReady) {
        options.before_ready = [](const Hash128&) -> absl::Status {
          kill(getpid(), SIGKILL);
          return absl::OkStatus();
        };
      }
      _exit(BuildImage(options).ok() ? 0 : 1);
    }
    if (delay_us >= 0) {
      usleep(static_cast<useconds_t>(delay_us));
      kill(child, SIGKILL);
    }
    int status = 0;
    waitpid(child, &status, 0);
    for (const GenerationInfo& info : ListGenerations(place_)) {
      if (info.state == RegionState::kReady) {
        EXPECT_TRUE(info.complete) << info.problem;
        EXPECT_TRUE(VerifyImage(place_, info.generation, FableDir(), nullptr).ok());
      } else {
        ++unpublished;
        EXPECT_FALSE(info.complete);
        EXPECT_FALSE(WeightImage::Attach(place_, info.generation).ok());
        EXPECT_FALSE(IsAlive(info.owner));
      }
      EXPECT_TRUE(RemoveGeneration(place_, info.generation).ok());
    }
    EXPECT_EQ(FilesLeft().size(), foreign.size());
  };
  run_and_kill(kWhileLoading);
  EXPECT_EQ(unpublished, 1);
  run_and_kill(kBeforeReady);
  EXPECT_EQ(unpublished, 2);
  const BuildResult whole = Build(FableDir(), 2);
  ASSERT_TRUE(RemoveGeneration(place_, whole.generation).ok());
  for (int i = 0; i < 25; ++i) run_and_kill(static_cast<int>(whole.seconds * 1e6 * i / 20));
  for (const std::string& name : foreign) {
    std::ifstream in(place_.dir + "/" + name);
    std::string text;
    in >> text;
    EXPECT_EQ(text, "keep") << name;
  }
}

// The other half of the next test: builds an image in a process of its own. Alone it has nothing to do.
TEST(ImageChild, BuildsInTheDirectoryOfTheEnvironment) {
  const char *dir = getenv("HEARTH_TEST_BUILD_DIR"), *disk_dir = getenv("HEARTH_TEST_DISK_DIR");
  if (dir == nullptr || disk_dir == nullptr) GTEST_SKIP() << "run by ImageTest.DeathAfterEveryStoreThatOthersCanSee";
  BuildOptions options;
  options.model_dir = FableDir();
  options.place = {dir, "n1", disk_dir};
  options.num_shards = 2;
  options.image_bytes_max = PlanImage(FableDir(), 2)->segment_bytes() / 2;
  EXPECT_TRUE(BuildImage(options).ok());
}

TEST_F(ImageTest, DeathAfterEveryStoreThatOthersCanSee) {
  // Four regions are made: a disk part (the first shard has no rows of an expert), two segments, then the manifest.
  place_.disk_dir = model_dir_;
  std::vector<std::string> points;
  for (const char* point : {"region.allocated", "region.owner_start", "region.magic", "region.fixed_hash", "region.loading"}) {
    for (const char* pass : {":1:", ":2:", ":3:", ":4:"}) points.push_back(absl::StrCat(point, pass, "kill"));
  }
  for (const char* point :
       {"image.weights:1:kill", "image.rows:1:kill", "image.disk_ready:1:kill", "image.segment_ready:1:kill", "image.segment_ready:2:kill"})
    points.push_back(point);
  const auto die_at = [&](const std::string& point) {
    const pid_t child = fork();
    if (child == 0) {
      setenv("HEARTH_TEST_BUILD_DIR", place_.dir.c_str(), 1);
      setenv("HEARTH_TEST_DISK_DIR", place_.disk_dir.c_str(), 1);
      setenv("HEARTH_PUBLISH_POINT", point.c_str(), 1);
      execl("/proc/self/exe", "image_builder_test", "--gtest_filter=ImageChild.*", "--gtest_brief=1", nullptr);
      _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << point << ": status " << status;
  };
  for (const std::string& point : points) {
    die_at(point);
    const std::vector<GenerationInfo> list = ListGenerations(place_);
    ASSERT_EQ(list.size(), 1u) << point;
    EXPECT_NE(list[0].state, RegionState::kReady) << point;
    EXPECT_FALSE(list[0].complete) << point;
    EXPECT_FALSE(list[0].owner.pid != 0 && IsAlive(list[0].owner)) << point;
    EXPECT_FALSE(WeightImage::Attach(place_, list[0].generation).ok()) << point;
    EXPECT_TRUE(RemoveGeneration(place_, list[0].generation).ok()) << point;
    EXPECT_TRUE(FilesLeft().empty()) << point;
  }
  die_at("image.ready:1:kill");
  const std::vector<GenerationInfo> list = ListGenerations(place_);
  ASSERT_EQ(list.size(), 1u);
  EXPECT_TRUE(list[0].complete) << list[0].problem;
  EXPECT_TRUE(VerifyImage(place_, list[0].generation, FableDir(), nullptr).ok());
}

// --- room ---

class RoomTest : public ImageTest {
 protected:
  void Write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(model_dir_ + path).parent_path());
    std::ofstream(model_dir_ + path) << text;
  }
  absl::Status Check(uint64_t segment_bytes) { return CheckRoom(place_.dir, ImageNeeds{{segment_bytes}, 0, 0, 0}, model_dir_); }
};

TEST_F(RoomTest, PageCacheIsNotUsedButSharedMemoryIs) {
  // 20 MB limit, 16 MB used: 10 MB of it page cache, which goes when asked; the rest, shared memory included, stays.
  Write("/proc/meminfo", "MemTotal: 100000 kB\nMemFree: 10 kB\nMemAvailable: 50000 kB\n");
  Write("/proc/self/cgroup", "0::/a/b\n");
  Write("/sys/fs/cgroup/a/memory.max", "20000000\n");
  Write("/sys/fs/cgroup/a/memory.current", "16000000\n");
  Write("/sys/fs/cgroup/a/memory.stat", "anon 1000000\nfile 15000000\nshmem 5000000\ninactive_file 4000000\nactive_file 6000000\n");
  Write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("/sys/fs/cgroup/a/b/memory.current", "16000000\n");
  const std::vector<MemoryLimit> limits = CgroupMemoryLimits(model_dir_);
  ASSERT_EQ(limits.size(), 1u);
  EXPECT_EQ(limits[0].available_bytes, 14'000'000u);
  EXPECT_TRUE(Check(13'900'000).ok());
  const absl::Status status = Check(14'000'000);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(status), AllOf(HasSubstr("/sys/fs/cgroup/a"), HasSubstr("14008192 bytes"), HasSubstr("14000000 bytes")));
}

TEST_F(RoomTest, OldCgroupsAndMemAvailable) {
  Write("/proc/meminfo", "MemTotal: 100000 kB\nMemFree: 10 kB\nMemAvailable: 50000 kB\n");
  Write("/proc/self/cgroup", "4:cpu,memory:/x\n9:name=systemd:/\n0::/\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n");
  EXPECT_TRUE(CgroupMemoryLimits(model_dir_).empty());
  EXPECT_TRUE(Check(51'000'000).ok());
  EXPECT_THAT(Message(Check(52'000'000)), AllOf(HasSubstr("this machine's memory"), HasSubstr("51200000 bytes")));
  Write("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1000000\n");
  Write("/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "900000\n");
  Write("/sys/fs/cgroup/memory/x/memory.stat", "cache 800000\ntotal_inactive_file 300000\ntotal_active_file 200000\n");
  ASSERT_EQ(CgroupMemoryLimits(model_dir_).size(), 1u);
  EXPECT_EQ(CgroupMemoryLimits(model_dir_)[0].available_bytes, 600'000u);
}

}  // namespace
}  // namespace hearth
