// Tests of the sampler: each option's meaning on small distributions, and that a draw depends on (seed, position) alone.
#include "services/decode/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>

namespace hearth {
namespace {

StreamRequest Request(SamplingParams sampling) {
  StreamRequest request;
  request.tokens = {3, 4};
  request.prompt_size = 2;
  request.max_new_tokens = 10;
  request.sampling = sampling;
  request.seed = 42;
  return request;
}

std::map<int32_t, int> Histogram(StreamRequest request, const std::vector<float>& logits, int draws) {
  Sampler sampler;
  std::map<int32_t, int> counts;
  for (int i = 0; i < draws; ++i) {
    request.seed = static_cast<uint64_t>(i);
    ++counts[sampler.Draw(request, logits.data(), static_cast<int64_t>(logits.size()))->id];
  }
  return counts;
}

TEST(Sampler, GreedyTakesTheLowerIdOfEquals) {
  const std::vector<float> logits = {0, 2, 5, 5, 1};
  Sampler sampler;
  EXPECT_EQ(sampler.Draw(Request({.temperature = 0}), logits.data(), 5)->id, 2);
}

TEST(Sampler, DrawsFollowTheProbabilities) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.2f), -50, -50};
  const auto counts = Histogram(Request({}), logits, 20000);
  EXPECT_NEAR(counts.at(0), 10000, 300);
  EXPECT_NEAR(counts.at(1), 6000, 300);
  EXPECT_NEAR(counts.at(2), 4000, 300);
  EXPECT_EQ(counts.count(3), 0u);
}

TEST(Sampler, TemperatureSharpens) {
  const std::vector<float> logits = {1, 0, 0, 0, 0};
  const auto cold = Histogram(Request({.temperature = 0.25f}), logits, 4000);
  // exp(4) / (exp(4) + 4)
  EXPECT_NEAR(cold.at(0) / 4000.0, std::exp(4.0) / (std::exp(4.0) + 4), 0.02);
}

TEST(Sampler, TopPKeepsTheSmallestSetThatReachesIt) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.3f), std::log(0.2f)};
  const auto set_of = [&](float top_p) {
    std::set<int32_t> ids;
    for (const auto& [id, n] : Histogram(Request({.top_p = top_p}), logits, 3000)) ids.insert(id);
    return ids;
  };
  EXPECT_EQ(set_of(0.39f), (std::set<int32_t>{1}));
  EXPECT_EQ(set_of(0.5f), (std::set<int32_t>{1, 2}));
  EXPECT_EQ(set_of(0.85f), (std::set<int32_t>{1, 2, 3}));
  EXPECT_EQ(set_of(0.0f), (std::set<int32_t>{1}));
}

TEST(Sampler, TopKAndMinP) {
  const std::vector<float> logits = {3, 3, 2, 1, 0};
  EXPECT_EQ(Histogram(Request({.top_k = 2}), logits, 2000).size(), 2u);
  // min_p 0.3: p >= 0.3 p_max leaves 3, 3 and 2 (exp(-1) = 0.37).
  const auto counts = Histogram(Request({.min_p = 0.3f}), logits, 4000);
  EXPECT_EQ(counts.size(), 3u);
  EXPECT_EQ(counts.count(3), 0u);
}

TEST(Sampler, PenaltiesCountOutputAndPromptAsDocumented) {
  StreamRequest request = Request({.temperature = 0, .presence_penalty = 1.0f, .frequency_penalty = 0.5f});
  request.tokens = {0, 1, 1};  // prompt {0, 1}, output {1}
  std::vector<float> logits = {1.9f, 3.4f, 2.0f};
  Sampler sampler;
  EXPECT_EQ(sampler.Draw(request, logits.data(), 3)->id, 2) << "1 loses 1.5 and falls behind; 0 is prompt only and loses nothing";
  request.sampling = {.temperature = 0, .repetition_penalty = 2.0f};
  logits = {3.9f, 3.0f, 1.96f};
  EXPECT_EQ(sampler.Draw(request, logits.data(), 3)->id, 2) << "the prompt counts: 0 is halved to 1.95, 1 to 1.5";
}

TEST(Sampler, BiasAndMinTokens) {
  StreamRequest request = Request({.temperature = 0, .logit_bias = {{2, 100.0f}, {99, 5.0f}}});
  const std::vector<float> logits = {5, 1, 0};
  Sampler sampler;
  EXPECT_EQ(sampler.Draw(request, logits.data(), 3)->id, 2);
  request = Request({.temperature = 0});
  request.eos_ids = {0};
  request.min_tokens = 1;
  EXPECT_EQ(sampler.Draw(request, logits.data(), 3)->id, 1);
  request.min_tokens = 0;
  EXPECT_EQ(sampler.Draw(request, logits.data(), 3)->id, 0);
}

TEST(Sampler, LogprobsAreTheModelsOwnAndFinite) {
  StreamRequest request = Request({.temperature = 0, .logit_bias = {{0, -100.0f}}});
  request.num_logprobs = 2;
  const std::vector<float> logits = {2, 1, -1000};
  Sampler sampler;
  const TokenEvent event = *sampler.Draw(request, logits.data(), 3);
  EXPECT_EQ(event.id, 1);
  const double log_sum = std::log(std::exp(2.0) + std::exp(1.0));
  EXPECT_NEAR(event.logprob, 1 - log_sum, 1e-6);
  ASSERT_EQ(event.top.size(), 2u);
  EXPECT_EQ(event.top[0].id, 0);
  EXPECT_NEAR(event.top[0].logprob, 2 - log_sum, 1e-6);
  EXPECT_LE(event.top[0].logprob, 0);
}

TEST(Sampler, ADrawDependsOnSeedAndPositionAlone) {
  std::mt19937 random(7);
  std::vector<float> logits(1000);
  for (float& x : logits) x = std::normal_distribution<float>(0, 2)(random);
  StreamRequest request = Request({.temperature = 0.8f, .top_p = 0.9f, .top_k = 50});
  Sampler fresh, used;
  StreamRequest other = Request({.temperature = 1.5f});
  std::vector<int32_t> ids;
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(used.Draw(other, logits.data(), 1000).ok());
    const int32_t a = fresh.Draw(request, logits.data(), 1000)->id;
    EXPECT_EQ(a, used.Draw(request, logits.data(), 1000)->id);
    request.tokens.push_back(a);
    ids.push_back(a);
  }
  EXPECT_GT(std::set<int32_t>(ids.begin(), ids.end()).size(), 10u);
}

// The documented order of options, by sorting everything and adding up in double.
int32_t PlainDraw(const StreamRequest& request, const std::vector<float>& logits) {
  const SamplingParams& p = request.sampling;
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
  const double max = logits[static_cast<size_t>(ids.front())];
  const auto weight = [&](int32_t id) { return std::exp((logits[static_cast<size_t>(id)] - max) / static_cast<double>(p.temperature)); };
  while (weight(ids.back()) < p.min_p) ids.pop_back();
  if (p.top_k > 0) ids.resize(std::min(ids.size(), static_cast<size_t>(p.top_k)));
  double all = 0;
  for (const int32_t id : ids) all += weight(id);
  if (p.top_p < 1.0f) {
    double kept = 0;
    size_t count = 0;
    while (count < ids.size() && (count == 0 || kept < p.top_p * all)) kept += weight(ids[count++]);
    ids.resize(count);
    all = kept;
  }
  std::sort(ids.begin(), ids.end());
  double left = UniformAt(request.seed, request.tokens.size()) * all;
  for (const int32_t id : ids) {
    left -= weight(id);
    if (left < 0) return id;
  }
  return ids.back();
}

TEST(Sampler, DrawsWhatSortingTheVocabularyWouldDraw) {
  std::mt19937 random(11);
  for (const size_t vocab : {1, 5, 255, 256, 257, 5000}) {
    for (const float spread : {0.0f, 0.02f, 1.0f, 6.0f}) {
      std::vector<float> logits(vocab);
      for (float& x : logits) x = std::normal_distribution<float>(-3, 1)(random) * spread;
      for (const SamplingParams& sampling : {SamplingParams{},
                                             {.temperature = 0.6f},
                                             {.temperature = 0.3f, .top_p = 0.9f},
                                             {.top_p = 0.999f},
                                             {.top_p = 0.05f},
                                             {.top_k = 3},
                                             {.top_k = 700},
                                             {.temperature = 2.0f, .min_p = 0.05f},
                                             {.top_p = 0.8f, .top_k = 40, .min_p = 0.001f},
                                             {.top_p = 0.5f, .min_p = 0.02f}}) {
        Sampler sampler;
        StreamRequest request = Request(sampling);
        for (uint64_t seed = 0; seed < 40; ++seed) {
          request.seed = seed;
          ASSERT_EQ(sampler.Draw(request, logits.data(), static_cast<int64_t>(vocab))->id, PlainDraw(request, logits))
              << "vocabulary " << vocab << " spread " << spread << " temperature " << sampling.temperature << " top_p " << sampling.top_p << " top_k "
              << sampling.top_k << " min_p " << sampling.min_p << " seed " << seed;
        }
      }
    }
  }
}

TEST(Sampler, TheBestLogprobsAreTheBestOfTheWholeVocabulary) {
  std::mt19937 random(12);
  std::vector<float> logits(3001);
  for (float& x : logits) x = std::round(std::normal_distribution<float>(0, 3)(random));  // many ties
  for (const int32_t k : {0, 1, 5, 12, 20, 3001}) {
    StreamRequest request = Request({});
    request.num_logprobs = k;
    Sampler sampler;
    const TokenEvent event = *sampler.Draw(request, logits.data(), 3001);
    std::vector<int32_t> ids(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
    ASSERT_EQ(event.top.size(), static_cast<size_t>(k));
    for (size_t i = 0; i < event.top.size(); ++i) ASSERT_EQ(event.top[i].id, ids[i]) << "place " << i << " of " << k;
  }
}

TEST(Sampler, BiasBeyondF32IsTheRequestsOwnError) {
  Sampler sampler;
  StreamRequest request = Request({.repetition_penalty = 1e-38f});
  request.tokens = {2, 2};
  const std::vector<float> large = {1, 2, 3e5f};
  EXPECT_TRUE(absl::IsInvalidArgument(sampler.Draw(request, large.data(), 3).status()));
}

TEST(Sampler, UniformIsUniform) {
  double sum = 0, square = 0;
  for (uint64_t p = 0; p < 100000; ++p) {
    const double u = UniformAt(1, p);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
    square += u * u;
  }
  EXPECT_NEAR(sum / 1e5, 0.5, 0.005);
  EXPECT_NEAR(square / 1e5, 1.0 / 3, 0.005);
}

TEST(Sampler, NothingIsDrawnFromWhatIsNotFinite) {
  Sampler sampler;
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const std::vector<float> logits = {1, 2, bad};
    EXPECT_TRUE(absl::IsDataLoss(sampler.Draw(Request({}), logits.data(), 3).status())) << bad;
  }
}

}  // namespace
}  // namespace hearth
