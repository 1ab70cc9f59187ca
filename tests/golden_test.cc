// The forward pass against numbers computed outside this code base (DESIGN section 7), on every instruction-set path of this CPU:
// fable-moe with its float64 reference, and every supported family of the outside oracles where they are there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include "tests/model_harness.h"

namespace hearth {
namespace {

using nlohmann::json;

// A choice that the reference itself makes by less than this may fall otherwise: BF16 activations move logits of fable-moe by up to about 0.1.
constexpr double kClearGap = 0.25;

json ReadJson(const std::string& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in.good()) << path;
  return json::parse(in);
}

template <typename T>
std::vector<T> ReadArray(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::vector<T> out(bytes.size() / sizeof(T));
  std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
  return out;
}

double MeanDifference(const float* a, const float* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::abs(static_cast<double>(a[i]) - b[i]);
  return sum / static_cast<double>(n);
}

// Best and second best of a row.
double GapToSecond(const float* row, int64_t n) {
  std::vector<float> sorted(row, row + n);
  std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<>());
  return sorted[0] - sorted[1];
}

double NegativeLogLikelihood(const float* row, int64_t n, int64_t target) {
  const double max = *std::max_element(row, row + n);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(row[i] - max);
  return max + std::log(sum) - row[target];
}

// A path, the BF16 terms of its matrix inputs and KV (common/device/host/terms.h), and what else KV may be.
struct Path {
  Isa isa;
  int terms;
  DType kv_dtype = DType::kBF16;
};

std::string NameOf(const Path& path) {
  return std::string(IsaName(path.isa)) + (path.terms == 1 ? "" : "_2terms") + (path.kv_dtype == DType::kF8E4M3 ? "_kv8" : "");
}

std::vector<Path> Paths() {
  std::vector<Path> paths;
  for (const Isa isa : SupportedIsas()) {
    for (const int terms : {1, 2}) paths.push_back({isa, terms});
  }
  return paths;
}

std::vector<Path> Kv8Paths() {
  std::vector<Path> paths;
  for (const Isa isa : SupportedIsas()) paths.push_back({isa, isa == Isa::kScalar ? 1 : 2, DType::kF8E4M3});
  return paths;
}

class FableMoe : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    golden_ = ReadJson(Golden("golden.json"));
    auto made = ModelHarness::Make(SourceDir() + "/deploy/models/fable-moe",
                                   {.device = {.isa = GetParam().isa, .activation_terms = GetParam().terms, .kv_dtype = GetParam().kv_dtype}});
    ASSERT_TRUE(made.ok()) << made.status();
    harness_ = *std::move(made);
  }
  static std::string Golden(const std::string& file) { return SourceDir() + "/tests/golden/fable-moe/" + file; }
  bool two_terms() const { return GetParam().terms == 2; }
  std::vector<int32_t> Prompt(const std::string& name) const {
    for (const json& prompt : golden_["prompts"]) {
      if (prompt["name"] == name) return prompt["ids"].get<std::vector<int32_t>>();
    }
    ADD_FAILURE() << "no prompt " << name;
    return {};
  }
  // All logits of the 64-token prompt.
  std::vector<float> Logits64(Form form, const ForwardHooks* hooks = nullptr) {
    harness_->Reset();
    const std::vector<int32_t> ids = Prompt("chat_64");
    TestStream stream = harness_->NewStream(64);
    auto logits = harness_->Feed(form, stream, ids, form == Form::kPrefill ? 64 : 1, true, hooks);
    EXPECT_TRUE(logits.ok()) << logits.status();
    return logits.ok() ? *std::move(logits) : std::vector<float>(64 * 4096);
  }
  void Measured(const char* what, double value) {
    std::printf("[ measured ] %-17s %-44s %.6f\n", NameOf(GetParam()).c_str(), what, value);
    RecordProperty(what, std::to_string(value));
  }
  // Of our probabilities for held-out text, over the reference's.
  double PerplexityRatio() {
    const std::vector<uint16_t> tokens = ReadArray<uint16_t>(Golden("heldout_tokens.u16.bin"));
    const std::vector<float> reference = ReadArray<float>(Golden("heldout_nll_fp8.f32.bin"));
    const size_t row_tokens = golden_["heldout"]["row_tokens"].get<size_t>();
    EXPECT_EQ(tokens.size(), reference.size() * row_tokens);
    const size_t rows = GetParam().isa == Isa::kScalar ? (two_terms() ? 3 : 8) : 24;  // seconds each
    double ours = 0, theirs = 0;
    for (size_t row = 0; row < rows; ++row) {
      const std::vector<int32_t> ids(tokens.begin() + static_cast<int64_t>(row * row_tokens),
                                     tokens.begin() + static_cast<int64_t>((row + 1) * row_tokens));
      harness_->Reset();
      TestStream stream = harness_->NewStream(static_cast<int64_t>(row_tokens));
      auto logits = harness_->Feed(Form::kPrefill, stream, {ids.begin(), ids.end() - 1}, 128, true);
      if (!logits.ok()) return NAN;
      double sum = 0;
      for (size_t i = 0; i + 1 < row_tokens; ++i) sum += NegativeLogLikelihood(logits->data() + i * 4096, 4096, ids[i + 1]);
      ours += sum / static_cast<double>(row_tokens - 1);
      theirs += reference[row];
    }
    Measured(("perplexity, " + std::to_string(rows) + " held-out rows").c_str(), std::exp(ours / static_cast<double>(rows)));
    return std::exp((ours - theirs) / static_cast<double>(rows));
  }
  void CompareWithReference(const std::vector<float>& logits, const char* name) {
    const std::vector<float> expected = ReadArray<float>(Golden("logits_64.f32.bin"));
    ASSERT_EQ(expected.size(), logits.size());
    const double mean = MeanDifference(logits.data(), expected.data(), static_cast<int64_t>(logits.size()));
    Measured(name, mean);
    EXPECT_LE(mean, two_terms() ? 0.0002 : 0.02);
    for (int64_t position = 0; position < 64; ++position) {
      const float* row = expected.data() + position * 4096;
      if (GapToSecond(row, 4096) > kClearGap) {
        EXPECT_EQ(Argmax(logits.data() + position * 4096, 4096), Argmax(row, 4096)) << name << ", position " << position;
      }
    }
  }

  json golden_;
  std::unique_ptr<ModelHarness> harness_;
};

// With one term an expert near a tie flips at some position or other, whatever the order of sums, and a prompt that meets one is 0.1 off; so the prompts
// are judged together, by what Transformers differs in bfloat16 (the model's README: 0.028).
TEST_P(FableMoe, LastPositionOfEachPrompt) {
  double over_prompts = 0;
  for (const json& prompt : golden_["prompts"]) {
    const std::vector<int32_t> ids = prompt["ids"].get<std::vector<int32_t>>();
    harness_->Reset();
    TestStream stream = harness_->NewStream(static_cast<int64_t>(ids.size()));
    auto logits = harness_->Feed(Form::kPrefill, stream, ids, 128, false);
    ASSERT_TRUE(logits.ok()) << logits.status();
    double mean = 0;
    for (const json& entry : prompt["top20"]) mean += std::abs((*logits)[entry[0].get<size_t>()] - entry[1].get<double>()) / 20;
    Measured(("last top-20 mean |diff| " + prompt["name"].get<std::string>()).c_str(), mean);
    EXPECT_LE(mean, two_terms() ? 0.0005 : 0.25) << prompt["name"];
    over_prompts += mean / static_cast<double>(golden_["prompts"].size());
    if (prompt["top20"][0][1].get<double>() - prompt["top20"][1][1].get<double>() > kClearGap) {
      EXPECT_EQ(Argmax(logits->data(), 4096), prompt["top20"][0][0].get<int32_t>()) << prompt["name"];
    }
  }
  EXPECT_LE(over_prompts, 0.028);
}

TEST_P(FableMoe, AllLogitsInBothForms) {
  const std::vector<float> prefill = Logits64(Form::kPrefill);
  const std::vector<float> decode = Logits64(Form::kDecode);
  CompareWithReference(prefill, "64 tokens, prefill form, mean |diff|");
  CompareWithReference(decode, "64 tokens, decode form, mean |diff|");
  const double between = MeanDifference(prefill.data(), decode.data(), static_cast<int64_t>(prefill.size()));
  Measured("64 tokens, between the forms, mean |diff|", between);
  EXPECT_LE(between, two_terms() ? 0.0002 : 0.02);
  for (int64_t position = 0; position < 64; ++position) {
    const float* row = prefill.data() + position * 4096;
    if (GapToSecond(row, 4096) > kClearGap) {
      EXPECT_EQ(Argmax(row, 4096), Argmax(decode.data() + position * 4096, 4096)) << "position " << position;
    }
  }
}

TEST_P(FableMoe, HiddenNormsAndExperts) {
  const json& reference = golden_["prompt_64"];
  int same = 0, total = 0;
  double worst_norm = 0, widest_margin = 0;
  auto vector = harness_->image().Tensor("model.norm.weight");
  ASSERT_TRUE(vector.ok()) << vector.status();
  ForwardHooks hooks;
  hooks.on_gate = [&](int64_t layer, const int32_t* ids, const float*, int64_t m, int64_t top_k) {
    ASSERT_EQ(m, 64);
    for (int64_t position = 0; position < m; ++position) {
      const std::vector<int32_t> chosen(ids + position * top_k, ids + (position + 1) * top_k);
      const bool equal = chosen == reference["experts"][std::to_string(layer)][static_cast<size_t>(position)].get<std::vector<int32_t>>();
      same += equal;
      ++total;
      if (!equal) {
        widest_margin =
            std::max(widest_margin, reference["router_margin"][static_cast<size_t>(layer - 1)][static_cast<size_t>(position)].get<double>());
      }
    }
  };
  auto compare_norms = [&](size_t row, const float* x, int64_t m, int64_t hidden) {
    for (int64_t position = 0; position < m; ++position) {
      double squares = 0;
      for (int64_t i = 0; i < hidden; ++i) squares += std::pow(static_cast<double>(x[position * hidden + i]), 2);
      const double expected = reference["hidden_l2"][row][static_cast<size_t>(position)].get<double>();
      worst_norm = std::max(worst_norm, std::abs(std::sqrt(squares) / expected - 1));
    }
  };
  hooks.on_layer = [&](int64_t layer, const float* residual, int64_t m, int64_t hidden) {
    compare_norms(static_cast<size_t>(layer + 1), residual, m, hidden);
    if (layer != 5) return;
    std::vector<float> normed(static_cast<size_t>(m * hidden));
    for (int64_t position = 0; position < m; ++position) {
      const float* x = residual + position * hidden;
      double squares = 0;
      for (int64_t i = 0; i < hidden; ++i) squares += static_cast<double>(x[i]) * x[i];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(hidden) + 1e-6);
      for (int64_t i = 0; i < hidden; ++i) {
        normed[static_cast<size_t>(position * hidden + i)] = static_cast<float>(x[i] * scale * ToFloat(static_cast<const bf16*>(vector->data)[i]));
      }
    }
    compare_norms(7, normed.data(), m, hidden);
  };
  Logits64(Form::kPrefill, &hooks);
  ASSERT_EQ(total, 5 * 64);
  Measured("expert sets equal to the reference's", static_cast<double>(same) / total);
  Measured("widest margin of one that is not", widest_margin);
  Measured("hidden norms, worst relative difference", worst_norm);
  EXPECT_GE(same, (two_terms() ? 1.0 : 0.99) * total);
  EXPECT_LT(worst_norm, two_terms() ? 0.0001 : 0.01);
}

TEST_P(FableMoe, GreedyContinuationsUntilANearTie) {
  for (const json& greedy : golden_["greedy"]) {
    const std::vector<int32_t> prompt = Prompt(greedy["prompt"].get<std::string>());
    const std::vector<int32_t> expected = greedy["ids"].get<std::vector<int32_t>>();
    harness_->Reset();
    TestStream stream = harness_->NewStream(static_cast<int64_t>(prompt.size() + expected.size()));
    // As the services do: all but the last prompt token by prefill, the rest by decode.
    if (prompt.size() > 1) {
      ASSERT_TRUE(harness_->Feed(Form::kPrefill, stream, {prompt.begin(), prompt.end() - 1}, 128, false).ok());
    }
    int32_t token = prompt.back();
    size_t equal = 0;
    for (; equal < expected.size(); ++equal) {
      auto logits = harness_->Feed(Form::kDecode, stream, {token}, 1, false);
      ASSERT_TRUE(logits.ok()) << logits.status();
      token = Argmax(logits->data(), 4096);
      if (token != expected[equal]) {
        EXPECT_LT(greedy["top1_minus_top2"][equal].get<double>(), two_terms() ? 0.001 : kClearGap) << greedy["prompt"] << ", token " << equal;
        break;
      }
    }
    Measured(("greedy tokens equal (of 48) after " + greedy["prompt"].get<std::string>()).c_str(), static_cast<double>(equal));
  }
}

TEST_P(FableMoe, PerplexityOfHeldOutText) {
  const double ratio = PerplexityRatio();
  Measured("perplexity over the reference's", ratio);
  EXPECT_NEAR(ratio, 1.0, two_terms() ? 0.0001 : 0.001);
}

// KV in FP8 (E4M3, a scale a token, rotary keys in BF16): a loss by intent, so that its size is what is held.
class FableMoeKv8 : public FableMoe {};

TEST_P(FableMoeKv8, LosesNoMoreThanStated) {
  const std::vector<float> expected = ReadArray<float>(Golden("logits_64.f32.bin"));
  for (const Form form : {Form::kPrefill, Form::kDecode}) {
    const std::vector<float> logits = Logits64(form);
    ASSERT_EQ(expected.size(), logits.size());
    const double mean = MeanDifference(logits.data(), expected.data(), static_cast<int64_t>(logits.size()));
    Measured(form == Form::kPrefill ? "64 tokens, prefill form, mean |diff|" : "64 tokens, decode form, mean |diff|", mean);
    EXPECT_LE(mean, 0.08);
  }
  double over_prompts = 0;
  for (const json& prompt : golden_["prompts"]) {
    const std::vector<int32_t> ids = prompt["ids"].get<std::vector<int32_t>>();
    harness_->Reset();
    TestStream stream = harness_->NewStream(static_cast<int64_t>(ids.size()));
    auto logits = harness_->Feed(Form::kPrefill, stream, ids, 128, false);
    ASSERT_TRUE(logits.ok()) << logits.status();
    double mean = 0;
    for (const json& entry : prompt["top20"]) mean += std::abs((*logits)[entry[0].get<size_t>()] - entry[1].get<double>()) / 20;
    over_prompts += mean / static_cast<double>(golden_["prompts"].size());
  }
  Measured("last top-20 mean |diff|, over the prompts", over_prompts);
  EXPECT_LE(over_prompts, 0.15);  // an expert changes places in one of the prompts
  const double ratio = PerplexityRatio();
  Measured("perplexity over the reference's", ratio);
  EXPECT_NEAR(ratio, 1.0, 0.004);
}

struct OracleCase {
  const char* family;
  Path path;
};

// Random weights: an expert changes places, or a token its rank, on gaps down to 0.001, so what plain BF16 makes of one position is luck (the prompts are such
// that another program's BF16 survives them). There the bar over all positions holds; with two terms every bar does.
class Oracle : public ::testing::TestWithParam<OracleCase> {};

// The one reference that was not computed from the weights in its file: Transformers 4.57.6 itself, in float32 over that file, gives other logits (by 0.002
// for its 1-token prompt, and by 0.124 for the 17-token prompt, where an expert moves), and so does a float64 forward written independently of this
// code. We give what those give; its other prompts hold the bars.
constexpr char kOffReference[] = "qwen3_moe_bf16_tied";
constexpr size_t kOffPromptTokens = 17;

TEST_P(Oracle, MeetsTheBars) {
  const Path path = GetParam().path;
  const std::string dir = SharedDir() + "/oracles/models/" + GetParam().family;
  if (!std::filesystem::exists(dir + "/golden.json")) GTEST_SKIP() << dir << " is not there (HEARTH_SHARED_DIR names the oracles' parent)";
  auto made = ModelHarness::Make(dir, {.device = {.isa = path.isa, .activation_terms = path.terms}, .max_rows = 256});
  ASSERT_TRUE(made.ok()) << made.status();
  ModelHarness& harness = **made;
  const json golden = ReadJson(dir + "/golden.json");
  const int64_t vocab = harness.vocab();
  double worst_last = 0;
  for (const json& prompt : golden["prompts"]) {
    const std::vector<int32_t> ids = prompt["ids"].get<std::vector<int32_t>>();
    harness.Reset();
    TestStream stream = harness.NewStream(static_cast<int64_t>(ids.size()) + 16);
    auto logits = harness.Feed(Form::kPrefill, stream, ids, 256, true);
    ASSERT_TRUE(logits.ok()) << logits.status();
    const float* last = logits->data() + (static_cast<int64_t>(ids.size()) - 1) * vocab;
    double mean = 0;
    for (const json& entry : prompt["last_top20"]) mean += std::abs(last[entry[0].get<size_t>()] - entry[1].get<double>()) / 20;
    worst_last = std::max(worst_last, mean);
    if (path.terms == 2 && !(GetParam().family == std::string(kOffReference) && ids.size() == kOffPromptTokens)) {
      EXPECT_LE(mean, 0.025) << ids.size() << " tokens";
    }

    if (ids.size() == 96) {
      const std::vector<float> expected = ReadArray<float>(dir + "/logits_96.f32");
      ASSERT_EQ(expected.size(), logits->size());
      std::vector<double> by_position;
      for (int64_t position = 0; position < 96; ++position) {
        by_position.push_back(MeanDifference(logits->data() + position * vocab, expected.data() + position * vocab, vocab));
      }
      std::sort(by_position.begin(), by_position.end());
      const double median = (by_position[47] + by_position[48]) / 2;
      const double bar = prompt["bf16"]["median_position"].get<double>();
      std::printf("[ measured ] %-22s %-17s median position %.6f (bfloat16 forward: %.6f)\n", GetParam().family, NameOf(path).c_str(), median, bar);
      EXPECT_LE(median, 1.25 * bar);
    }

    std::vector<int32_t> tokens;
    int32_t token = Argmax(last, vocab);
    for (int step = 0; step < 8; ++step) {
      tokens.push_back(token);
      auto next = harness.Feed(Form::kDecode, stream, {token}, 1, false);
      ASSERT_TRUE(next.ok()) << next.status();
      token = Argmax(next->data(), vocab);
    }
    const std::vector<int32_t> expected = prompt["greedy"].get<std::vector<int32_t>>();
    const auto differs = std::mismatch(tokens.begin(), tokens.end(), expected.begin()).first - tokens.begin();
    if (path.terms == 2) {
      EXPECT_EQ(tokens, std::vector<int32_t>(expected.begin(), expected.begin() + 8)) << ids.size() << " tokens";
    } else if (differs < 8) {
      std::printf("[ measured ] %-22s %-17s after %zu tokens, greedy token %d differs; the reference's gap is %.5f\n", GetParam().family,
                  NameOf(path).c_str(), ids.size(), static_cast<int>(differs),
                  prompt["greedy_gap_to_second"][static_cast<size_t>(differs)].get<double>());
    }
  }
  std::printf("[ measured ] %-22s %-17s worst last position %.6f\n", GetParam().family, NameOf(path).c_str(), worst_last);
}

std::vector<OracleCase> OracleCases() {
  std::vector<OracleCase> cases;
  for (const char* family : {"deepseek_v3_yarn", "deepseek_v3_odd", "kimi_k2", "deepseek_v3_no_qlora", "deepseek_v2_lite", "qwen3_moe",
                             "qwen3_moe_bf16_tied", "qwen2_moe", "mixtral", "glm4_moe", "glm4_moe_lite", "minimax_m2"}) {
    for (const Path& path : Paths()) cases.push_back({family, path});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(EveryPath, FableMoe, ::testing::ValuesIn(Paths()), [](const auto& info) { return NameOf(info.param); });
INSTANTIATE_TEST_SUITE_P(EveryPath, FableMoeKv8, ::testing::ValuesIn(Kv8Paths()), [](const auto& info) { return NameOf(info.param); });
INSTANTIATE_TEST_SUITE_P(EveryPath, Oracle, ::testing::ValuesIn(OracleCases()),
                         [](const auto& info) { return std::string(info.param.family) + "_" + NameOf(info.param.path); });

}  // namespace
}  // namespace hearth
