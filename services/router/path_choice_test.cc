// Predicted times and what is learned for them, without a node. Room: services/router.
#include "services/router/path_choice.h"

#include <gtest/gtest.h>

#include "services/router/path_costs.h"
#include "services/router/planned_costs.h"
#include "services/router/testing/fakes.h"

namespace hearth::router {
namespace {

constexpr PassCost kChunk{.fixed_s = 0.01, .per_token_s = 1e-3, .per_position_s = 1e-7};
// Streamed weights: dear to begin, cheap a token.
constexpr PassCost kStreamed{.fixed_s = 2, .per_token_s = 1e-4, .per_position_s = 1e-8};

TEST(PathChoiceTest, DecodeTakesAStepBehindEachChunkWhileItDecodes) {
  DecodeWay way{.chunk = kChunk, .chunk_tokens = 512, .busy_chunk_tokens = 64, .step_s = 0.02};
  const PromptWork prompt{.tokens = 1024};
  const double idle_s = SecondsByDecode(way, prompt);
  EXPECT_NEAR(idle_s, kChunk.Seconds(WorkOf(0, 1024), 2) + 0.02, 1e-9);
  way.streams = 3;
  EXPECT_NEAR(SecondsByDecode(way, prompt), kChunk.Seconds(WorkOf(0, 1024), 16) + 17 * 0.02, 1e-9);
  way.share = 0.25;
  EXPECT_NEAR(SecondsByDecode(way, prompt), kChunk.Seconds(WorkOf(0, 1024), 16) / 0.25 + 0.02, 1e-9);
  way.share = 0;
  // What is cached costs no token, and attention to it all the same.
  EXPECT_LT(SecondsByDecode(way, {.before = 960, .tokens = 64}), 0.2 * SecondsByDecode(way, prompt));
  EXPECT_GT(SecondsByDecode(way, {.before = 960, .tokens = 64}), SecondsByDecode(way, {.before = 0, .tokens = 64}));
  way.streams = 0;
  way.ahead = {{.tokens = 1024}};
  way.place_s = 5;
  way.extra_s = 0.5;
  EXPECT_NEAR(SecondsByDecode(way, prompt), 2 * idle_s - 0.02 + 5.5, 1e-9);
  way.ahead_for_s = 1e6;  // it should have been through long ago
  EXPECT_NEAR(SecondsByDecode(way, prompt), idle_s + 5.5, 1e-9);
}

TEST(PathChoiceTest, WaitingPromptsShareAPassOrQueueUp) {
  PrefillWay way{.pass = kStreamed, .tokens_at_once = 32768, .shares_passes = true};
  const PromptWork prompt{.tokens = 4000};
  const double alone_s = SecondsByPrefill(way, prompt);
  EXPECT_NEAR(alone_s, kStreamed.Seconds(WorkOf(0, 4000)), 1e-9);
  way.share = 0.5;
  EXPECT_NEAR(SecondsByPrefill(way, prompt), 2 * alone_s, 1e-9);
  way.share = 1;
  way.waiting = {prompt, prompt, prompt};
  // Three more in the same pass: their tokens, not their passes.
  EXPECT_NEAR(SecondsByPrefill(way, prompt), 2 + 4 * (alone_s - 2), 1e-9);
  way.in_pass = {prompt};
  way.in_pass_for_s = 1;
  EXPECT_NEAR(SecondsByPrefill(way, prompt), 2 + 4 * (alone_s - 2) + alone_s - 1, 1e-9);
  way.tokens_at_once = 8000;  // two passes hold them
  EXPECT_NEAR(SecondsByPrefill(way, prompt), 4 + 4 * (alone_s - 2) + alone_s - 1, 1e-9);
  way.shares_passes = false;
  EXPECT_NEAR(SecondsByPrefill(way, prompt), 4 * alone_s + alone_s - 1, 1e-9);
  way.in_pass_for_s = 1e6;
  EXPECT_NEAR(SecondsByPrefill(way, prompt), 4 * alone_s, 1e-9);
}

TEST(PathChoiceTest, TheCrossoverIsWhereStreamingPays) {
  const DecodeWay decode{.chunk = kChunk, .chunk_tokens = 512, .busy_chunk_tokens = 64};
  PrefillWay prefill{.pass = kStreamed, .tokens_at_once = 32768, .shares_passes = true};
  const int64_t from = *Crossover(decode, prefill, /*long_from=*/1 << 20, 1 << 20);
  EXPECT_GT(from, 1500);
  EXPECT_LT(from, 2500);
  const auto sooner = [&](int64_t tokens) { return SecondsByPrefill(prefill, {.tokens = tokens}) < SecondsByDecode(decode, {.tokens = tokens}); };
  EXPECT_TRUE(sooner(from));
  EXPECT_FALSE(sooner(from - 1));
  // A prompt that counts as long goes to prefill a little earlier than it pays, as it is in the others' way.
  EXPECT_LT(*Crossover(decode, prefill, /*long_from=*/512, 1 << 20), from);
  EXPECT_EQ(*Crossover(decode, {.pass = PassCost{}, .tokens_at_once = 512}, 1 << 20, 1 << 20), 1);
  prefill.pass.fixed_s = 1e9;
  EXPECT_FALSE(Crossover(decode, prefill, 1 << 20, 1 << 20).has_value());
}

TEST(PathChoiceTest, OneWorkersLoadSendsAPromptToTheOther) {
  DecodeWay decode{.chunk = kChunk, .chunk_tokens = 512, .busy_chunk_tokens = 64, .step_s = 0.01};
  PrefillWay prefill{.pass = kChunk, .tokens_at_once = 512, .extra_s = 0.005, .step_s = 0.01};
  const PromptWork prompt{.tokens = 400};
  const auto to_prefill = [&] { return ToPrefill(SecondsByDecode(decode, prompt), SecondsByPrefill(prefill, prompt), prompt.tokens, 2048); };
  EXPECT_FALSE(to_prefill());
  decode.ahead = {{.tokens = 3000}};
  EXPECT_TRUE(to_prefill());
  prefill.in_pass = {{.tokens = 20000}};
  EXPECT_FALSE(to_prefill());
}

v1::WorkerStatus StatusWith(const std::string& kind, const std::string& path, int32_t pid, const std::vector<std::pair<int64_t, double>>& passes) {
  v1::WorkerStatus status;
  status.set_kind(kind);
  status.set_pid(pid);
  status.set_generation("weights");
  status.mutable_prompts()->set_path(path);
  uint64_t number = 0;
  for (const auto& [tokens, seconds] : passes) {
    auto* pass = status.mutable_prompts()->add_passes();
    pass->set_number(++number);
    pass->set_tokens(static_cast<int32_t>(tokens));
    pass->set_positions(WorkOf(0, tokens).positions);
    pass->set_seconds(seconds);
  }
  return status;
}

TEST(PathCostsTest, CountsEachPassOnceAndKnowsARestartedWorker) {
  PathCosts costs;
  costs.OnWorkerStatus("prefill.0", v1::WorkerStatus());  // an older worker says nothing of it
  EXPECT_EQ(costs.WayOf("prefill.0"), "");
  EXPECT_FALSE(costs.CostOf("prefill.0").has_value());
  const v1::WorkerStatus three = StatusWith("prefill", "slp", 7, {{1000, 1}, {2000, 1.5}, {4000, 2.5}});
  for (int i = 0; i < 5; ++i) costs.OnWorkerStatus("prefill.0", three);
  EXPECT_EQ(costs.WayOf("prefill.0"), "prefill slp");
  EXPECT_EQ(costs.lines()[0].passes, 3);
  EXPECT_NEAR(costs.CostOf("prefill.0")->Seconds(WorkOf(0, 2000)), 1.5, 0.1);
  costs.OnWorkerStatus("prefill.0", StatusWith("prefill", "slp", 8, {{8000, 4.5}}));  // another process counts from one again
  EXPECT_EQ(costs.lines()[0].passes, 4);
  costs.OnWorkerStatus("prefill.0", StatusWith("prefill", "chunked", 9, {{512, 0.1}}));
  EXPECT_EQ(costs.WayOf("prefill.0"), "prefill chunked");
  EXPECT_EQ(costs.lines()[0].passes, 1);
  v1::WorkerStatus other = StatusWith("prefill", "chunked", 9, {});
  other.set_generation("other weights");
  costs.OnWorkerStatus("prefill.0", other);
  EXPECT_FALSE(costs.CostOf("prefill.0").has_value());
}

TEST(PathCostsTest, StartsFromARooflineBeforeOrAfterTheWorkerIsSeen) {
  PathCosts costs;
  costs.OnWorkerStatus("decode.0", StatusWith("decode", "chunked", 7, {}));
  costs.StartFrom("decode chunked", kChunk, false);
  costs.StartFrom("prefill slp", kStreamed, true);
  costs.OnWorkerStatus("prefill.0", StatusWith("prefill", "slp", 8, {}));
  EXPECT_EQ(costs.CostOf("decode.0")->per_token_s, kChunk.per_token_s);
  EXPECT_FALSE(costs.CostOf("prefill.0").has_value());  // of another machine: waits for a pass
  costs.OnWorkerStatus("prefill.0", StatusWith("prefill", "slp", 8, {{1000, 10 * kStreamed.Seconds(WorkOf(0, 1000))}}));
  EXPECT_NEAR(costs.CostOf("prefill.0")->Seconds(WorkOf(0, 30000)) / kStreamed.Seconds(WorkOf(0, 30000)), 10, 0.5);
}

TEST(PathCostsTest, LearnsWhatFirstTokensTakeBesidePassesAndHowFarItIsOff) {
  PathCosts costs;
  EXPECT_EQ(costs.ExtraSeconds("decode chunked"), 0);
  for (int i = 0; i < 20; ++i) {
    const double extra_s = costs.ExtraSeconds("decode chunked");
    costs.OnFirstToken("decode chunked", 1.0 + extra_s, extra_s, i % 7 == 3 ? 9.0 : 1.03);
  }
  EXPECT_NEAR(costs.ExtraSeconds("decode chunked"), 0.03, 1e-9);
  const PathCosts::Trust trust = costs.trust()[0];
  EXPECT_EQ(trust.count, 20U);
  EXPECT_NEAR(trust.ratio_p50, 1, 0.05);
  EXPECT_LT(trust.error_p50, 0.05);
  EXPECT_GT(trust.error_p90, 0.5);
  for (int i = 0; i < 16; ++i) costs.OnFirstToken("prefill slp", 30, 0, 36);  // proportional: the passes' own affair
  EXPECT_EQ(costs.ExtraSeconds("prefill slp"), 0.1);
}

TEST(PlannedCostsTest, ComeFromThisModelsOps) {
  NodeConfig config;
  const auto planned = PlanCosts(config, testing::ModelDir());
  ASSERT_TRUE(planned.ok()) << planned.status();
  ASSERT_EQ(planned->size(), 2U);
  EXPECT_EQ((*planned)[0].way, "decode chunked");
  EXPECT_TRUE((*planned)[0].shape_only);
  EXPECT_GT((*planned)[0].cost.per_token_s, 0);
  EXPECT_GT((*planned)[0].cost.per_position_s, 0);
  config.hardware = "/nonexistent/profile.toml";
  EXPECT_TRUE(absl::IsNotFound(CheckHardware(config))) << CheckHardware(config);
}

}  // namespace
}  // namespace hearth::router
