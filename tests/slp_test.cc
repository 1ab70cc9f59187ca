// A pass that streams the weights gives the bits of the plain forward pass: every logit of every prompt token, every byte of KV, whatever the ring, the
// chunks, the lengths and who shares the pass. And what ends a pass early leaves an engine that takes the next.
#include "common/slp/slp_engine.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <thread>

#include "tests/model_harness.h"
#include "tests/served_rings.h"
#include "tests/synthetic_models.h"

namespace hearth {
namespace {

struct Case {
  const char* name;
  const char* model;
  int shards = 1;
  int terms = 2;
  DType kv_dtype = DType::kBF16;
};

class Slp : public ::testing::TestWithParam<Case> {
 protected:
  static constexpr int64_t kRowsMax = 700;

  std::unique_ptr<ModelHarness> Make(uint64_t budget_bytes = 0) {
    auto made = ModelHarness::Make(TestModelDir(GetParam().model), {.device = {.num_threads = 2,
                                                                               .num_pools = GetParam().shards,
                                                                               .memory_budget_bytes = budget_bytes,
                                                                               .activation_terms = GetParam().terms,
                                                                               .kv_dtype = GetParam().kv_dtype,
                                                                               .parallel_work_min = 0},
                                                                    .num_shards = GetParam().shards,
                                                                    .max_rows = kRowsMax,
                                                                    .num_pages = 80});
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }

  static std::unique_ptr<SlpEngine> Engine(ModelHarness& harness, SlpOptions options) {
    options.with_logits = true;
    auto engine = SlpEngine::Make(harness.device(), harness.model(), options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }

  // One pass over parts of streams, as ModelHarness::Step has it; logits [rows, vocab] of every row.
  static absl::StatusOr<std::vector<float>> Pass(ModelHarness& harness, SlpEngine& engine, const std::vector<ModelHarness::Part>& parts,
                                                 const SlpHooks& hooks = {}) {
    const ForwardBatch batch = ModelHarness::BatchOf(Form::kPrefill, parts, true);
    std::vector<float> logits(batch.token_ids.size() * static_cast<size_t>(harness.vocab()));
    RETURN_IF_ERROR(engine.Run(harness.kv(), batch, logits.data(), hooks));
    for (size_t i = 0; i < parts.size(); ++i) {
      TestStream& stream = *parts[i].stream;
      stream.length += static_cast<int64_t>(parts[i].ids.size());
      if (!harness.model().has_mtp()) continue;
      stream.hidden = engine.LastHidden(static_cast<int64_t>(i));
      stream.hidden_at = stream.length - 1;
    }
    return logits;
  }
};

TEST_P(Slp, IsThePlainPassWhateverTheLengthAndTheRing) {
  auto harness = Make();
  ASSERT_NE(harness, nullptr);
  // Two slots and chunks that divide nothing; a layer's experts and one chunk for most; a ring that is neither.
  const auto two_slots = Engine(*harness, {.chunk_rows = 96, .max_rows = 4096, .expert_slots = 2});
  const auto layer_ring = Engine(*harness, {.chunk_rows = 1024, .max_rows = 4096});
  const auto five_slots = Engine(*harness, {.chunk_rows = 333, .max_rows = 4096, .expert_slots = 5});
  ASSERT_TRUE(two_slots != nullptr && layer_ring != nullptr && five_slots != nullptr);
  EXPECT_EQ(two_slots->SlotsBeside(1), 2);
  EXPECT_EQ(layer_ring->SlotsBeside(4096), harness->model().config().n_routed_experts);
  for (const int64_t length : {1, 63, 64, 65, 700, 4096}) {
    SCOPED_TRACE(length);
    const std::vector<int32_t> ids = Ids(length, static_cast<uint32_t>(length), harness->vocab());
    harness->Reset();
    TestStream plain = harness->NewStream(length);
    const auto expected = harness->Feed(Form::kPrefill, plain, ids, length <= kRowsMax ? length : 64, true);
    ASSERT_TRUE(expected.ok()) << expected.status();
    const std::vector<uint8_t> pages = PageBytes(*harness);
    for (SlpEngine* engine : {two_slots.get(), layer_ring.get(), five_slots.get()}) {
      harness->Reset();
      TestStream stream = harness->NewStream(length);
      const auto logits = Pass(*harness, *engine, {{&stream, ids}});
      ASSERT_TRUE(logits.ok()) << logits.status();
      EXPECT_TRUE(SameBits(*expected, *logits)) << engine->last_pass().expert_slots << " slots";
      EXPECT_TRUE(pages == PageBytes(*harness)) << engine->last_pass().expert_slots << " slots";
      EXPECT_EQ(stream.hidden, plain.hidden);
    }
  }
}

// Prompts of all lengths in one pass, two of them going on behind what a pass before left, one with its first position queried again.
TEST_P(Slp, PromptsThatShareAPassArePromptsAlone) {
  auto harness = Make();
  ASSERT_NE(harness, nullptr);
  const auto engine = Engine(*harness, {.chunk_rows = 100, .max_rows = 2048, .expert_slots = 3});
  ASSERT_NE(engine, nullptr);
  const int64_t behind[] = {0, 70, 0, 5};
  const int64_t lengths[] = {63, 400, 1, 65};
  std::vector<std::vector<float>> alone;
  std::vector<uint8_t> pages;
  for (const bool together : {false, true}) {
    harness->Reset();
    std::vector<TestStream> streams;
    std::vector<ModelHarness::Part> parts;
    for (int i = 0; i < 4; ++i) streams.push_back(harness->NewStream(behind[i] + lengths[i]));
    for (int i = 0; i < 4; ++i) {
      std::vector<int32_t> ids = Ids(behind[i] + lengths[i], 40 + static_cast<uint32_t>(i), harness->vocab());
      if (behind[i] > 0) {
        const std::vector<int32_t> before(ids.begin(), ids.begin() + behind[i]);
        ASSERT_TRUE(harness->Step(Form::kPrefill, {{&streams[static_cast<size_t>(i)], before}}, false).ok());
        ids.erase(ids.begin(), ids.begin() + behind[i]);
        if (i == 3) {  // whose hidden state was lost: the last position is queried once more
          ids.insert(ids.begin(), before.back());
          streams[3].valid = streams[3].length--;
          streams[3].hidden_at = -1;
        }
      }
      parts.push_back({&streams[static_cast<size_t>(i)], ids});
    }
    if (!together) {
      for (const ModelHarness::Part& part : parts) {
        auto logits = harness->Step(Form::kPrefill, {part}, true);
        ASSERT_TRUE(logits.ok()) << logits.status();
        alone.push_back(*std::move(logits));
      }
      pages = PageBytes(*harness);
      continue;
    }
    const auto logits = Pass(*harness, *engine, parts);
    ASSERT_TRUE(logits.ok()) << logits.status();
    std::vector<float> expected;
    for (const auto& one : alone) expected.insert(expected.end(), one.begin(), one.end());
    EXPECT_TRUE(SameBits(expected, *logits));
    EXPECT_TRUE(pages == PageBytes(*harness));
  }
}

// The device's own account: a pass allocates nothing, whatever it is given, and an engine keeps to a budget that holds a part of the layer's experts.
TEST_P(Slp, ABudgetIsKept) {
  auto measure = Make();
  ASSERT_NE(measure, nullptr);
  const uint64_t before = measure->device().memory().used_bytes;
  const auto small = Engine(*measure, {.chunk_rows = 64, .max_rows = 300, .expert_slots = 2});
  ASSERT_NE(small, nullptr);
  const uint64_t needed = measure->device().memory().used_bytes;

  // Enough for two slots and 300 rows, and for some rows more than are asked for, which become slots.
  auto harness = Make(needed + 200'000);
  ASSERT_NE(harness, nullptr);
  ASSERT_EQ(harness->device().memory().used_bytes, before);
  const auto engine = Engine(*harness, {.chunk_rows = 64, .max_rows = 300});
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->max_rows(), 300);
  EXPECT_GE(engine->SlotsBeside(300), 2);
  EXPECT_LT(engine->SlotsBeside(300), harness->model().config().n_routed_experts);
  EXPECT_GT(engine->SlotsBeside(1), engine->SlotsBeside(300)) << "rows that a short prompt does not need are slots";
  const uint64_t made = harness->device().memory().used_bytes;
  TestStream stream = harness->NewStream(300);
  ASSERT_TRUE(Pass(*harness, *engine, {{&stream, Ids(300, 1, harness->vocab())}}).ok());
  const DeviceMemory memory = harness->device().memory();
  EXPECT_EQ(memory.used_bytes, made);
  EXPECT_LE(memory.peak_bytes, memory.budget_bytes);
  TestStream longer = harness->NewStream(301);
  EXPECT_EQ(Pass(*harness, *engine, {{&longer, Ids(301, 1, harness->vocab())}}).status().code(), absl::StatusCode::kInvalidArgument);

  auto tight = Make(before + 100'000);
  ASSERT_NE(tight, nullptr);
  EXPECT_EQ(SlpEngine::Make(tight->device(), tight->model(), {.chunk_rows = 64}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(tight->device().memory().used_bytes, before) << "nothing is taken before it is known that all fits";

  // The number that an operator is told: with it a pass runs, with little less none.
  const auto told = SlpEngine::BudgetMin(tight->device(), tight->model(), {.chunk_rows = 64, .with_logits = true});
  ASSERT_TRUE(told.ok()) << told.status();
  auto just = Make(*told);
  ASSERT_NE(just, nullptr);
  const auto smallest = Engine(*just, {.chunk_rows = 64});
  ASSERT_NE(smallest, nullptr);
  EXPECT_GE(smallest->SlotsBeside(64), 2);
  TestStream first = just->NewStream(64);
  EXPECT_TRUE(Pass(*just, *smallest, {{&first, Ids(64, 1, just->vocab())}}).ok());
  auto less = Make(*told - 1);
  ASSERT_NE(less, nullptr);
  EXPECT_EQ(SlpEngine::Make(less->device(), less->model(), {.chunk_rows = 64, .with_logits = true}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

// A pass ended at any expert and at any layer; the one after it is whole.
TEST_P(Slp, ACancelledPassLeavesTheRingsUsable) {
  auto harness = Make();
  ASSERT_NE(harness, nullptr);
  const auto engine = Engine(*harness, {.chunk_rows = 64, .max_rows = 128, .expert_slots = 2});
  ASSERT_NE(engine, nullptr);
  const std::vector<int32_t> ids = Ids(100, 3, harness->vocab());
  TestStream plain = harness->NewStream(100);
  const auto expected = harness->Feed(Form::kPrefill, plain, ids, 100, true);
  ASSERT_TRUE(expected.ok()) << expected.status();
  const std::vector<uint8_t> pages = PageBytes(*harness);
  for (const int64_t experts : {0, 1, 2, 7, 11}) {
    int64_t left = experts;
    TestStream stream = harness->NewStream(0);
    stream.pages = plain.pages;
    EXPECT_TRUE(absl::IsCancelled(Pass(*harness, *engine, {{&stream, ids}}, {.wanted = [&] { return left-- > 0; }}).status())) << experts;
    EXPECT_EQ(left, -1) << "it went on after it was told to end";
  }
  for (const int64_t last : {0, 1, 2}) {
    std::vector<int64_t> layers;
    TestStream stream = harness->NewStream(0);
    stream.pages = plain.pages;
    const SlpHooks hooks{.on_layer_done = [&](int64_t layer) {
      layers.push_back(layer);
      return layer < last;
    }};
    EXPECT_TRUE(absl::IsCancelled(Pass(*harness, *engine, {{&stream, ids}}, hooks).status())) << last;
    EXPECT_EQ(layers.size(), static_cast<size_t>(last) + 1);
  }
  harness->Reset();
  TestStream stream = harness->NewStream(100);
  const auto logits = Pass(*harness, *engine, {{&stream, ids}});
  ASSERT_TRUE(logits.ok()) << logits.status();
  EXPECT_TRUE(SameBits(*expected, *logits));
  EXPECT_TRUE(pages == PageBytes(*harness));
}

// One token wakes top_k experts a layer: the others are loaded at most as far as the ring reaches before the gate speaks.
TEST_P(Slp, ExpertsThatNobodyChoseAreNotLoaded) {
  auto harness = Make();
  ASSERT_NE(harness, nullptr);
  const auto engine = Engine(*harness, {.chunk_rows = 64, .max_rows = 64, .expert_slots = 2});
  ASSERT_NE(engine, nullptr);
  TestStream stream = harness->NewStream(1);
  ASSERT_TRUE(Pass(*harness, *engine, {{&stream, {5}}}).ok());
  const ModelConfig& c = harness->model().config();
  int64_t moe_layers = 0;
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) moe_layers += c.IsMoeLayer(layer) ? 1 : 0;
  const SlpPassStats& stats = engine->last_pass();
  EXPECT_GE(stats.experts_loaded, moe_layers * c.num_experts_per_tok);
  EXPECT_LE(stats.experts_loaded, moe_layers * (c.num_experts_per_tok + 2));
  EXPECT_EQ(stats.experts_skipped, moe_layers * c.n_routed_experts - stats.experts_loaded);
}

// The ring of the host shorter or longer than the device's, passes that end early, one that few experts are chosen in: nothing comes from the image.
TEST_P(Slp, ExpertsThroughTheStoresRings) {
  auto harness = Make();
  ASSERT_NE(harness, nullptr);
  ServedRings two(harness->image(), harness->model(), 2), seven(harness->image(), harness->model(), 7);
  const auto layer_ring = Engine(*harness, {.chunk_rows = 256, .max_rows = 700, .experts = two.source()});
  const auto two_slots = Engine(*harness, {.chunk_rows = 256, .max_rows = 700, .expert_slots = 2, .experts = seven.source()});
  ASSERT_TRUE(layer_ring != nullptr && two_slots != nullptr);
  for (const int64_t length : {700, 1, 65}) {
    SCOPED_TRACE(length);
    const std::vector<int32_t> ids = Ids(length, static_cast<uint32_t>(length), harness->vocab());
    harness->Reset();
    TestStream plain = harness->NewStream(length);
    const auto expected = harness->Feed(Form::kPrefill, plain, ids, length, true);
    ASSERT_TRUE(expected.ok()) << expected.status();
    const std::vector<uint8_t> pages = PageBytes(*harness);
    for (SlpEngine* engine : {layer_ring.get(), two_slots.get()}) {
      for (const int64_t experts : {0, 1, 3}) {
        harness->Reset();
        int64_t left = experts;
        TestStream stream = harness->NewStream(length);
        const absl::Status status = Pass(*harness, *engine, {{&stream, ids}}, {.wanted = [&] { return left-- > 0; }}).status();
        EXPECT_TRUE(absl::IsCancelled(status)) << status;
      }
      harness->Reset();
      TestStream stream = harness->NewStream(length);
      const auto logits = Pass(*harness, *engine, {{&stream, ids}});
      ASSERT_TRUE(logits.ok()) << logits.status();
      EXPECT_TRUE(SameBits(*expected, *logits));
      EXPECT_TRUE(pages == PageBytes(*harness));
    }
  }
  // A pass that is told to end waits for the rings no longer, and what it copies then comes from wherever it lies.
  for (ServedRings* rings : {&two, &seven}) {
    EXPECT_GT(rings->source()->counts().from_rings, 20 * rings->source()->counts().from_image) << rings->source()->max_held();
  }
}

INSTANTIATE_TEST_SUITE_P(All, Slp,
                         ::testing::Values(Case{"FableMoe", "fable"}, Case{"FableMoePlainBf16", "fable", 1, 1}, Case{"LatentTwoShards", "synth", 2},
                                           Case{"LatentKv8", "synth", 1, 2, DType::kF8E4M3}, Case{"GroupedTwoShards", "gqa", 2},
                                           Case{"GroupedKv8", "gqa", 2, 1, DType::kF8E4M3}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace hearth
