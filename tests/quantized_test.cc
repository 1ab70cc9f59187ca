// Whole models of block formats: fable-moe quantized into a GGUF file or into packed INT4 must give the logits of the same numbers in F32, which is
// a matter of rounding in sums alone, and lie near the unquantized reference. On every instruction-set path, both forms, one shard and two.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include <nlohmann/json.hpp>

#include "common/image/image_builder.h"
#include "tests/model_harness.h"
#include "tests/quantized_models.h"

namespace hearth {
namespace {

struct Case {
  const char* name;
  DTypeChoice choice;
  bool int4 = false;
  bool split_kv_b = false;
  double worst_mean = 0;  // logits against the unquantized reference
};

const std::vector<Case>& Cases() {
  static const auto* cases = new std::vector<Case>{
      {"q8_0", [](const PlannedTensor& p) { return Fitting(p, DType::kQ8_0); }, false, false, 0.05},
      {"q8_0_split_kv_b", [](const PlannedTensor& p) { return Fitting(p, DType::kQ8_0); }, false, true, 0.05},
      {"q6_k", [](const PlannedTensor& p) { return Fitting(p, DType::kQ6_K); }, false, false, 0.12},
      // Mixed as conversions are: head and embedding in more bits than the rest.
      {"q4_k_split_kv_b",
       [](const PlannedTensor& p) {
         return Fitting(p, p.role == TensorRole::kHead || p.role == TensorRole::kExpertUp ? DType::kQ6_K : DType::kQ4_K);
       },
       false, true, 0.3},
      {"q5_k_and_q3_k",
       [](const PlannedTensor& p) {
         return Fitting(p, p.role == TensorRole::kHead ? DType::kQ6_K : p.role == TensorRole::kExpertGate ? DType::kQ3_K : DType::kQ5_K);
       },
       false, true, 0.6},
      {"int4", [](const PlannedTensor& p) { return p.expert >= 0 || p.role == TensorRole::kLinear ? DType::kI4G32 : DType::kF32; }, true, false, 0.4},
  };
  return *cases;
}

class Directory {
 public:
  Directory() {
    std::string name = ::testing::TempDir() + "/hearth_quantized_XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Written once for all paths.
absl::StatusOr<QuantizedModels> ModelsOf(const Case& c) {
  static Directory directory;
  static std::map<std::string, QuantizedModels> written;
  const auto found = written.find(c.name);
  if (found != written.end()) return found->second;
  const std::string from = SourceDir() + "/deploy/models/fable-moe", to = directory.path() + "/" + c.name;
  ASSIGN_OR_RETURN(QuantizedModels models, c.int4 ? WriteInt4Models(from, to, c.choice) : WriteGgufModels(from, to, c.choice, c.split_kv_b));
  return written[c.name] = std::move(models);
}

double MeanDifference(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::abs(static_cast<double>(a[i]) - b[i]);
  return sum / static_cast<double>(a.size());
}

class Quantized : public ::testing::TestWithParam<std::tuple<size_t, Isa>> {
 protected:
  static std::vector<int32_t> Prompt() {
    std::ifstream in(SourceDir() + "/tests/golden/fable-moe/golden.json");
    const nlohmann::json golden = nlohmann::json::parse(in);
    for (const auto& prompt : golden["prompts"]) {
      if (prompt["name"] == "chat_64") return prompt["ids"].get<std::vector<int32_t>>();
    }
    return {};
  }
  static std::vector<float> Reference() {
    std::ifstream in(SourceDir() + "/tests/golden/fable-moe/logits_64.f32.bin", std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    std::vector<float> out(bytes.size() / sizeof(float));
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
  static std::vector<float> Logits(const std::string& model, Isa isa, Form form, int num_shards) {
    auto made = ModelHarness::Make(model, {.device = {.isa = isa, .activation_terms = 2}, .num_shards = num_shards});
    EXPECT_TRUE(made.ok()) << made.status();
    if (!made.ok()) return {};
    TestStream stream = (*made)->NewStream(64);
    auto logits = (*made)->Feed(form, stream, Prompt(), form == Form::kPrefill ? 64 : 3, true);
    EXPECT_TRUE(logits.ok()) << logits.status();
    return logits.ok() ? *std::move(logits) : std::vector<float>();
  }
};

TEST_P(Quantized, LogitsAreThoseOfTheNumbersThatTheBlocksStandFor) {
  const Case& c = Cases()[std::get<0>(GetParam())];
  const Isa isa = std::get<1>(GetParam());
  const auto models = ModelsOf(c);
  ASSERT_TRUE(models.ok()) << models.status();
  const std::vector<float> reference = Reference();
  for (const Form form : {Form::kPrefill, Form::kDecode}) {
    const std::vector<float> plain = Logits(models->plain, isa, form, 1);
    for (const int shards : {1, 2}) {
      const std::vector<float> quantized = Logits(models->quantized, isa, form, shards);
      ASSERT_EQ(quantized.size(), reference.size());
      ASSERT_EQ(plain.size(), reference.size());
      const double difference = MeanDifference(quantized, plain), loss = MeanDifference(quantized, reference);
      std::printf("[ measured ] %-16s %-10s %-7s %d shards: mean |diff| to its floats %.7f, to the reference %.4f\n", c.name,
                  std::string(IsaName(isa)).c_str(), form == Form::kPrefill ? "prefill" : "decode", shards, difference, loss);
      EXPECT_LE(difference, 0.0002);
      EXPECT_LE(loss, c.worst_mean);
      EXPECT_GT(loss, 0.0005) << "nothing was quantized";
    }
  }
}

// What `hearth verify` does: sums, every placed byte against the files, the fingerprint; and it sees a changed byte of the model.
TEST(QuantizedImage, IsVerifiedAgainstItsFiles) {
  for (const Case& c : Cases()) {
    const auto models = ModelsOf(c);
    ASSERT_TRUE(models.ok()) << models.status();
    const Directory shm;
    const RegionPlace place{.dir = shm.path(), .node = "test"};
    for (const int shards : {1, 3}) {
      BuildOptions options;
      options.model_dir = models->quantized;
      options.place = place;
      options.num_shards = shards;
      const auto built = BuildImage(options);
      ASSERT_TRUE(built.ok()) << built.status();
      EXPECT_EQ(VerifyImage(place, built->generation, models->quantized, nullptr), absl::OkStatus()) << c.name;
      const std::string file = c.int4 ? models->quantized + "/model.safetensors" : models->quantized;
      const std::string copy = shm.path() + "/damaged" + (c.int4 ? "" : ".gguf");
      std::filesystem::copy(c.int4 ? models->quantized : file, copy,
                            std::filesystem::copy_options::overwrite_existing | std::filesystem::copy_options::recursive);
      std::fstream damaged(c.int4 ? copy + "/model.safetensors" : copy, std::ios::in | std::ios::out | std::ios::binary);
      damaged.seekp(-1000, std::ios::end);
      const int byte = damaged.peek();
      damaged.seekp(-1000, std::ios::end);
      damaged.put(static_cast<char>(byte ^ 1));
      damaged.close();
      const absl::Status status = VerifyImage(place, built->generation, copy, nullptr);
      EXPECT_TRUE(absl::IsDataLoss(status)) << c.name << ": " << status;
    }
  }
}

std::vector<std::tuple<size_t, Isa>> All() {
  std::vector<std::tuple<size_t, Isa>> all;
  for (size_t i = 0; i < Cases().size(); ++i) {
    for (const Isa isa : SupportedIsas()) all.emplace_back(i, isa);
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(EveryPath, Quantized, ::testing::ValuesIn(All()), [](const auto& info) {
  return std::string(Cases()[std::get<0>(info.param)].name) + "_" + std::string(IsaName(std::get<1>(info.param)));
});

}  // namespace
}  // namespace hearth
