// The same bits whatever the chunks, the batch-mates and the threads (DESIGN section 7), on every instruction-set path, with one and two shards:
// fable-moe, and synthetic models whose experts cut into unequal shards (384 rows: 128 and 256, or the other way round), with latent and with
// grouped-query attention.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "tests/model_harness.h"
#include "tests/synthetic_models.h"

namespace hearth {
namespace {

struct Case {
  const char* model;
  Isa isa;
  int shards;
  int terms;
  DType kv_dtype = DType::kBF16;
};

class Determinism : public ::testing::TestWithParam<Case> {
 protected:
  // parallel_work_min = 0: even this small a model goes through all threads.
  std::unique_ptr<ModelHarness> Make(int threads, std::optional<StepOrder> order = StepOrder::kJoint) {
    auto made = ModelHarness::Make(TestModelDir(GetParam().model), {.device = {.isa = GetParam().isa,
                                                                               .num_threads = threads,
                                                                               .num_pools = GetParam().shards,
                                                                               .activation_terms = GetParam().terms,
                                                                               .kv_dtype = GetParam().kv_dtype,
                                                                               .parallel_work_min = 0},
                                                                    .num_shards = GetParam().shards,
                                                                    .order = order});
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }
};

// A run that computed nothing would be deterministic too.
bool IsAlive(const std::vector<float>& logits, int64_t vocab) {
  return logits.size() >= 2 * static_cast<size_t>(vocab) && std::memcmp(logits.data(), logits.data() + vocab, static_cast<size_t>(vocab) * 4) != 0 &&
         std::abs(logits[0]) + std::abs(logits[1]) > 1e-6f;
}

TEST_P(Determinism, APromptInChunksOfSevenIsThePromptWhole) {
  auto harness = Make(2);
  ASSERT_NE(harness, nullptr);
  const std::vector<int32_t> ids = Ids(100, 1, harness->vocab());
  std::vector<float> first;
  std::vector<uint8_t> first_pages;
  for (const Form form : {Form::kPrefill, Form::kDecode}) {
    for (const int64_t chunk : {100, 7}) {
      harness->Reset();
      TestStream stream = harness->NewStream(100);
      auto logits = harness->Feed(form, stream, ids, chunk, true);
      ASSERT_TRUE(logits.ok()) << logits.status();
      if (chunk == 100) {
        first = *std::move(logits);
        first_pages = PageBytes(*harness);
        EXPECT_TRUE(IsAlive(first, harness->vocab()));
      } else {
        EXPECT_TRUE(SameBits(first, *logits));
        EXPECT_TRUE(first_pages == PageBytes(*harness));
      }
    }
  }
}

// Batches of 1 to 6 streams behind contexts of all lengths, in each order of a step's work and in the order that is found best: what each is alone.
TEST_P(Determinism, StreamsTogetherInAnyOrderAreStreamsAlone) {
  auto harness = Make(2);
  ASSERT_NE(harness, nullptr);
  constexpr int kStreams = 6;
  constexpr int kSteps = 5;
  const int64_t lengths[kStreams] = {1, 3, 63, 64, 65, 90};
  auto prompt = [&](int i) { return Ids(lengths[i], 10 + static_cast<uint32_t>(i), harness->vocab()); };
  auto steps = [&](int i) { return Ids(kSteps, 20 + static_cast<uint32_t>(i), harness->vocab()); };

  std::vector<std::vector<float>> alone(kStreams);
  for (int i = 0; i < kStreams; ++i) {
    harness->Reset();
    TestStream stream = harness->NewStream(lengths[i] + kSteps);
    ASSERT_TRUE(harness->Feed(Form::kPrefill, stream, prompt(i), 128, false).ok());
    auto logits = harness->Feed(Form::kDecode, stream, steps(i), 1, true);
    ASSERT_TRUE(logits.ok()) << logits.status();
    alone[static_cast<size_t>(i)] = *std::move(logits);
    EXPECT_TRUE(IsAlive(alone[static_cast<size_t>(i)], harness->vocab()));
  }

  const size_t vocab = static_cast<size_t>(harness->vocab());
  std::vector<uint8_t> pages_of_six;
  for (const std::optional<StepOrder> order :
       {std::optional(StepOrder::kJoint), std::optional(StepOrder::kPlain), std::optional(StepOrder::kAlternate), std::optional<StepOrder>()}) {
    harness = Make(2, order);
    ASSERT_NE(harness, nullptr);
    for (int count = 1; count <= kStreams; ++count) {
      if (order == StepOrder::kJoint && count < kStreams) continue;
      harness->Reset();
      std::vector<TestStream> streams;
      for (int i = 0; i < count; ++i) streams.push_back(harness->NewStream(lengths[i] + kSteps));
      for (int i = 0; i < count; ++i) {
        ASSERT_TRUE(harness->Feed(Form::kPrefill, streams[static_cast<size_t>(i)], prompt(i), 128, false).ok());
      }
      for (int step = 0; step < kSteps; ++step) {
        std::vector<ModelHarness::Part> parts;
        for (int i = 0; i < count; ++i) parts.push_back({&streams[static_cast<size_t>(i)], {steps(i)[static_cast<size_t>(step)]}});
        auto logits = harness->Step(Form::kDecode, parts, false);
        ASSERT_TRUE(logits.ok()) << logits.status();
        for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
          EXPECT_EQ(std::memcmp(logits->data() + i * vocab, alone[i].data() + static_cast<size_t>(step) * vocab, vocab * sizeof(float)), 0)
              << (order.has_value() ? StepOrderName(*order) : "measured") << ", stream " << i << " of " << count << ", step " << step;
        }
      }
    }
    if (pages_of_six.empty()) pages_of_six = PageBytes(*harness);
    EXPECT_TRUE(pages_of_six == PageBytes(*harness));
  }
}

TEST_P(Determinism, OneTwoAndThreeThreadsAgree) {
  std::vector<float> first;
  std::vector<uint8_t> first_pages;
  for (const int threads : {1, 2, 3}) {
    auto harness = Make(threads);
    ASSERT_NE(harness, nullptr);
    const std::vector<int32_t> ids = Ids(80, 3, harness->vocab());
    TestStream stream = harness->NewStream(90);
    ASSERT_TRUE(harness->Feed(Form::kPrefill, stream, ids, 128, true).ok());
    auto logits = harness->Feed(Form::kDecode, stream, Ids(10, 4, harness->vocab()), 5, true);
    ASSERT_TRUE(logits.ok()) << logits.status();
    if (threads == 1) {
      first = *std::move(logits);
      first_pages = PageBytes(*harness);
    } else {
      EXPECT_TRUE(SameBits(first, *logits)) << threads << " threads";
      EXPECT_TRUE(first_pages == PageBytes(*harness)) << threads << " threads";
    }
  }
}

// A position already valid is queried and never rewritten, and the answer is the one that computing it would have given.
TEST_P(Determinism, QueryingValidPositionsLeavesThePages) {
  auto harness = Make(2);
  ASSERT_NE(harness, nullptr);
  const std::vector<int32_t> ids = Ids(70, 5, harness->vocab());
  TestStream stream = harness->NewStream(70);
  auto computed = harness->Feed(Form::kPrefill, stream, ids, 128, true);
  ASSERT_TRUE(computed.ok()) << computed.status();
  const std::vector<uint8_t> pages = PageBytes(*harness);
  stream.length = 60;
  stream.valid = 70;
  auto queried = harness->Step(Form::kPrefill, {{&stream, {ids.begin() + 60, ids.end()}}}, true);
  ASSERT_TRUE(queried.ok()) << queried.status();
  EXPECT_TRUE(SameBits(std::vector<float>(computed->begin() + 60 * harness->vocab(), computed->end()), *queried));
  EXPECT_TRUE(pages == PageBytes(*harness));
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const char* model : {"fable", "synth", "gqa"}) {
    for (const Isa isa : SupportedIsas()) {
      for (const int shards : {1, 2}) {
        cases.push_back({model, isa, shards, 1});
        if (isa != Isa::kScalar) cases.push_back({model, isa, shards, 2});  // slow, and the same code
        if (shards == 1) cases.push_back({model, isa, 1, isa == Isa::kScalar ? 1 : 2, DType::kF8E4M3});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, Determinism, ::testing::ValuesIn(Cases()), [](const auto& info) {
  return std::string(info.param.model) + "_" + std::string(IsaName(info.param.isa)) + "_" + std::to_string(info.param.shards) + "shards" +
         (info.param.terms == 1 ? "" : "_2terms") + (info.param.kv_dtype == DType::kF8E4M3 ? "_kv8" : "");
});

}  // namespace
}  // namespace hearth
