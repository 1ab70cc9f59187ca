// Several prefill ranks in one pass give the bits of the plain forward pass: every logit of every prompt token and every byte of KV, for two and four ranks,
// either exchange of experts, any lengths. And a rank that dies or leaves in mid-pass lets the others go within a second, for the next pass.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/base/time.h"
#include "common/shm/kv_pool.h"
#include "tests/rank_group.h"
#include "tests/synthetic_models.h"

namespace hearth {
namespace {

using ::testing::HasSubstr;

struct Case {
  const char* name;
  const char* model;
  int shards = 1;
  int terms = 2;
  DType kv_dtype = DType::kBF16;
};

class Dslp : public ::testing::TestWithParam<Case> {
 protected:
  static constexpr int64_t kRowsMax = 700;

  HostDeviceOptions DeviceOptions(int num_threads) const {
    return {.num_threads = num_threads,
            .num_pools = std::min(num_threads, GetParam().shards),
            .activation_terms = GetParam().terms,
            .kv_dtype = GetParam().kv_dtype,
            .parallel_work_min = 0};
  }
  std::unique_ptr<ModelHarness> Harness() {
    auto made = ModelHarness::Make(TestModelDir(GetParam().model),
                                   {.device = DeviceOptions(2), .num_shards = GetParam().shards, .max_rows = kRowsMax, .num_pages = 80});
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }
  std::unique_ptr<RankGroup> Group(int ranks, ExpertExchange exchange,
                                   SlpOptions options = {.chunk_rows = 300, .max_rows = 4096, .expert_slots = 3}) {
    options.with_logits = true;
    options.exchange = exchange;
    auto made = RankGroup::Make(TestModelDir(GetParam().model), GetParam().shards, DeviceOptions(1), options, ranks);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }

  using Part = ModelHarness::Part;
  static ForwardBatch BatchOf(const std::vector<Part>& parts) { return ModelHarness::BatchOf(Form::kPrefill, parts, true); }
  static std::vector<float> Pass(ModelHarness& harness, RankGroup& group, const std::vector<Part>& parts) {
    const ForwardBatch batch = BatchOf(parts);
    std::vector<float> logits(batch.token_ids.size() * static_cast<size_t>(harness.vocab()));
    for (const absl::Status& status : group.Run(harness.kv(), batch, logits.data())) EXPECT_TRUE(status.ok()) << status;
    return logits;
  }
};

TEST_P(Dslp, IsThePlainPassWhateverTheRanksTheExchangeAndTheLength) {
  const auto harness = Harness();
  ASSERT_NE(harness, nullptr);
  std::vector<std::unique_ptr<RankGroup>> groups;
  for (const int ranks : {2, 4}) {
    for (const ExpertExchange exchange : {ExpertExchange::kSmallEp, ExpertExchange::kDispatch}) {
      groups.push_back(Group(ranks, exchange));
      ASSERT_NE(groups.back(), nullptr);
    }
  }
  for (const int64_t length : {1, 63, 64, 65, 700, 4096}) {
    const std::vector<int32_t> ids = Ids(length, static_cast<uint32_t>(length), harness->vocab());
    harness->Reset();
    TestStream plain = harness->NewStream(length);
    const auto expected = harness->Feed(Form::kPrefill, plain, ids, length <= kRowsMax ? length : 64, true);
    ASSERT_TRUE(expected.ok()) << expected.status();
    const std::vector<uint8_t> pages = PageBytes(*harness);
    for (size_t g = 0; g < groups.size(); ++g) {
      SCOPED_TRACE(testing::Message() << length << " tokens, " << groups[g]->size() << " ranks, " << (g % 2 == 0 ? "SmallEP" : "dispatch"));
      harness->Reset();
      TestStream stream = harness->NewStream(length);
      EXPECT_TRUE(SameBits(*expected, Pass(*harness, *groups[g], {{&stream, ids}})));
      EXPECT_TRUE(pages == PageBytes(*harness));
      if (!harness->model().has_mtp()) continue;
      for (size_t r = 0; r < groups[g]->size(); ++r) EXPECT_EQ(groups[g]->rank(r).engine->LastHidden(0), plain.hidden) << "rank " << r;
    }
  }
}

// Ragged pairs and more, two of the streams going on behind what a pass before left.
TEST_P(Dslp, PromptsThatShareAPassArePromptsAlone) {
  const auto harness = Harness();
  ASSERT_NE(harness, nullptr);
  const std::vector<std::vector<int64_t>> batches = {{700, 3}, {65, 64}, {63, 400, 1, 65}};
  const int64_t behind[] = {0, 70, 5, 0};
  for (const int ranks : {2, 4}) {
    for (const ExpertExchange exchange : {ExpertExchange::kSmallEp, ExpertExchange::kDispatch}) {
      const auto group = Group(ranks, exchange, {.chunk_rows = 50, .max_rows = 2048, .expert_slots = 2});
      ASSERT_NE(group, nullptr);
      for (const std::vector<int64_t>& lengths : batches) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, " << lengths.size() << " prompts from " << lengths[0]);
        std::vector<float> expected;
        std::vector<uint8_t> pages;
        for (const bool together : {false, true}) {
          harness->Reset();
          std::vector<TestStream> streams;
          std::vector<Part> parts;
          for (size_t i = 0; i < lengths.size(); ++i) streams.push_back(harness->NewStream(behind[i] + lengths[i]));
          for (size_t i = 0; i < lengths.size(); ++i) {
            std::vector<int32_t> ids = Ids(behind[i] + lengths[i], 40 + static_cast<uint32_t>(i), harness->vocab());
            if (behind[i] > 0) {
              ASSERT_TRUE(harness->Step(Form::kPrefill, {{&streams[i], {ids.begin(), ids.begin() + behind[i]}}}, false).ok());
              ids.erase(ids.begin(), ids.begin() + behind[i]);
            }
            parts.push_back({&streams[i], ids});
          }
          if (together) {
            EXPECT_TRUE(SameBits(expected, Pass(*harness, *group, parts)));
            EXPECT_TRUE(pages == PageBytes(*harness));
            continue;
          }
          for (const Part& part : parts) {
            const auto alone = harness->Step(Form::kPrefill, {{part.stream, part.ids}}, true);
            ASSERT_TRUE(alone.ok()) << alone.status();
            expected.insert(expected.end(), alone->begin(), alone->end());
          }
          pages = PageBytes(*harness);
        }
      }
    }
  }
}

// A rank loads all sub-layers and its own experts; nobody else's.
TEST_P(Dslp, ARankLoadsItsOwnExperts) {
  const auto harness = Harness();
  const auto group = Group(4, ExpertExchange::kSmallEp);
  ASSERT_TRUE(harness != nullptr && group != nullptr);
  const uint64_t before = group->rank(0).device->memory().used_bytes;
  TestStream stream = harness->NewStream(700);
  Pass(*harness, *group, {{&stream, Ids(700, 1, harness->vocab())}});
  const ModelConfig& c = harness->model().config();
  int64_t rows = 0, moe_layers = 0;
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) moe_layers += c.IsMoeLayer(layer) ? 1 : 0;
  for (size_t r = 0; r < 4; ++r) {
    const SlpPassStats& stats = group->rank(r).engine->last_pass();
    EXPECT_EQ(stats.experts_loaded + stats.experts_skipped, moe_layers * c.n_routed_experts / 4);
    rows += stats.rows;
  }
  EXPECT_EQ(rows, 700);
  EXPECT_EQ(group->rank(0).device->memory().used_bytes, before) << "a pass allocates nothing";
}

// One rank's hook ends the pass, at a layer or between experts: the others end with it, and the next pass is whole.
TEST_P(Dslp, ACancelledRankEndsThePassForAll) {
  const auto harness = Harness();
  ASSERT_NE(harness, nullptr);
  const std::vector<int32_t> ids = Ids(200, 3, harness->vocab());
  TestStream plain = harness->NewStream(200);
  const auto expected = harness->Feed(Form::kPrefill, plain, ids, 200, true);
  ASSERT_TRUE(expected.ok()) << expected.status();
  for (const ExpertExchange exchange : {ExpertExchange::kSmallEp, ExpertExchange::kDispatch}) {
    const auto group = Group(2, exchange);
    ASSERT_NE(group, nullptr);
    TestStream stream = harness->NewStream(0);
    stream.pages = plain.pages;
    const ForwardBatch batch = BatchOf({{&stream, ids}});
    std::vector<float> logits(expected->size());
    for (const bool at_layer : {false, true}) {
      std::vector<SlpHooks> hooks(2);
      int64_t experts_left = 3;
      if (at_layer) {
        hooks[0].on_layer_done = [](int64_t layer) { return layer < 1; };
      } else {
        hooks[1].wanted = [&] { return experts_left-- > 0; };
      }
      const int64_t begin_ns = MonotonicNowNs();
      for (const absl::Status& status : group->Run(harness->kv(), batch, logits.data(), hooks)) EXPECT_TRUE(absl::IsCancelled(status)) << status;
      EXPECT_LT(MonotonicNowNs() - begin_ns, 5'000'000'000);
    }
    for (const absl::Status& status : group->Run(harness->kv(), batch, logits.data())) EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(SameBits(*expected, logits));
    // A batch that is refused is refused everywhere, and counts as a pass.
    ForwardBatch bad = batch;
    bad.token_ids[0] = -1;
    for (const absl::Status& status : group->Run(harness->kv(), bad, nullptr)) EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    for (const absl::Status& status : group->Run(harness->kv(), batch, logits.data())) EXPECT_TRUE(status.ok()) << status;
  }
}

// Ranks are processes with the pool between them, and experts come from the image or through rings of the rank's own, in which it asks for its own quarters
// and no others.
TEST_P(Dslp, RanksAsProcessesGiveTheSameBits) {
  const std::vector<int64_t> lengths = {1, 65, 700};
  std::vector<std::vector<float>> expected;
  std::vector<std::vector<uint8_t>> pages;
  std::vector<std::vector<int32_t>> ids;
  KvGeometry geometry;
  int64_t vocab = 0, experts = 0;
  {  // one process with one thread again before the ranks are forked
    const auto harness = Harness();
    ASSERT_NE(harness, nullptr);
    geometry = harness->kv().geometry();
    vocab = harness->vocab();
    experts = harness->model().config().n_routed_experts;
    for (const int64_t length : lengths) {
      ids.push_back(Ids(length, static_cast<uint32_t>(length), vocab));
      harness->Reset();
      TestStream stream = harness->NewStream(length);
      const auto logits = harness->Feed(Form::kPrefill, stream, ids.back(), length, true);
      ASSERT_TRUE(logits.ok()) << logits.status();
      expected.push_back(*logits);
      pages.push_back(PageBytes(*harness));
    }
  }
  const RegionPlace place = {testing::TempDir(), absl::StrCat("dslp", getpid())};
  const Hash128 generation{.low = 1, .high = 2};
  const auto kv = KvPool::Create(place, generation, geometry);
  ASSERT_TRUE(kv.ok()) << kv.status();
  EXPECT_EQ(unlink((*kv)->region()->path().c_str()), 0);  // the ranks inherit the mapping
  const uint64_t pool_bytes = geometry.num_pages * geometry.page_bytes();
  const uint64_t logit_bytes = static_cast<uint64_t>(kRowsMax * vocab) * sizeof(float);
  float* const logits = static_cast<float*>(mmap(nullptr, logit_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto child = [&](int rank, int ranks, uint32_t ring_slots, size_t i, void* memory) -> std::string {
    const SlpOptions options{.chunk_rows = 50, .max_rows = 1024, .with_logits = true, .expert_slots = 3};
    const auto made =
        PrefillRank::Make(TestModelDir(GetParam().model), GetParam().shards, DeviceOptions(1), options, rank, ranks, memory, ring_slots);
    if (!made.ok()) return made.status().ToString();
    TestStream stream;
    for (int32_t page = 0; page * kPageTokens < lengths[i]; ++page) stream.pages.push_back(page);
    const absl::Status status = (*made)->engine->RunShared(**kv, BatchOf({{&stream, ids[i]}}), logits, {});
    if (!status.ok()) return status.ToString();
    if (ring_slots == 0) return "";
    const std::set<int64_t> asked = (*made)->rings->asked();
    const bool own =
        !asked.empty() && *asked.begin() >= FirstExpertOf(rank, ranks, experts) && *asked.rbegin() < FirstExpertOf(rank + 1, ranks, experts);
    return own ? "" : "asked for an expert of another rank, or for none";
  };
  for (const int ranks : {2, 4}) {
    for (const uint32_t ring_slots : {0u, 3u}) {
      for (size_t i = 0; i < lengths.size(); ++i) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, rings of " << ring_slots << " slots, " << lengths[i] << " tokens");
        std::memset((*kv)->pages(), 0, pool_bytes);
        std::memset(logits, 0, logit_bytes);
        GroupMemory memory(ranks);
        std::vector<pid_t> children;
        for (int rank = 0; rank < ranks; ++rank) {
          children.push_back(fork());
          ASSERT_GE(children.back(), 0);
          if (children.back() > 0) continue;
          const std::string error = child(rank, ranks, ring_slots, i, memory.data());
          if (!error.empty()) std::fprintf(stderr, "rank %d: %s\n", rank, error.c_str());
          _exit(error.empty() ? 0 : 1);
        }
        for (const pid_t pid : children) {
          int status = 0;
          ASSERT_EQ(waitpid(pid, &status, 0), pid);
          EXPECT_EQ(status, 0);
        }
        EXPECT_TRUE(std::memcmp(logits, expected[i].data(), expected[i].size() * sizeof(float)) == 0);
        EXPECT_TRUE(std::memcmp((*kv)->pages(), pages[i].data(), pool_bytes) == 0);
      }
    }
  }
  munmap(logits, logit_bytes);
}

INSTANTIATE_TEST_SUITE_P(All, Dslp,
                         ::testing::Values(Case{"FableMoe", "fable"}, Case{"FableMoePlainBf16", "fable", 1, 1}, Case{"LatentTwoShards", "synth", 2},
                                           Case{"GroupedKv8", "gqa", 1, 1, DType::kF8E4M3}),
                         [](const auto& info) { return std::string(info.param.name); });

// Bytes, counted: what a group of two sends for the experts with eight choices a row, either way, and what a dispatch without copies would.
TEST(DslpBytes, SmallEpSendsAtMostFiftyFivePercentOfDispatchAtTwoRanksAndTopEight) {
  for (const int terms : {1, 2}) {
    uint64_t sent[2] = {}, dedup = 0;
    for (const ExpertExchange exchange : {ExpertExchange::kSmallEp, ExpertExchange::kDispatch}) {
      const HostDeviceOptions device{.num_threads = 1, .activation_terms = terms};
      const auto group = RankGroup::Make(SyntheticModelDir("top8"), 1, device, {.chunk_rows = 256, .max_rows = 600, .exchange = exchange}, 2);
      ASSERT_TRUE(group.ok()) << group.status();
      KvGeometry geometry = (*group)->rank(0).model->kv_geometry();
      geometry.num_pages = 10;
      const auto kv = KvPool::InMemory(geometry);
      const std::vector<int32_t> pages = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
      ForwardBatch batch{.form = Form::kPrefill, .token_ids = Ids(600, 9, 512), .sequences = {}, .logit_rows = {}, .prior_hidden = {nullptr}};
      batch.sequences = {{.first_row = 0, .num_rows = 600, .pages = pages.data()}};
      for (const absl::Status& status : (*group)->Run(*kv, batch, nullptr)) ASSERT_TRUE(status.ok()) << status;
      sent[static_cast<int>(exchange)] = (*group)->Sent({"rows", "gate", "sums", "counts", "outputs"});
      dedup = (*group)->rank(0).engine->last_pass().dedup_dispatch_bytes + (*group)->rank(1).engine->last_pass().dedup_dispatch_bytes;
      EXPECT_EQ((*group)->Sent({"kv"}), 600 * geometry.layers * geometry.layer_bytes() / kPageTokens - 600 * geometry.layer_bytes() / kPageTokens)
          << "each row of KV to the one other rank, but for the MTP layer's, which nobody attends";
    }
    const double small_ep = static_cast<double>(sent[0]), dispatch = static_cast<double>(sent[1]);
    std::printf("EP 2, top 8, %d term(s): SmallEP %.0f bytes, dispatch %.0f (%.1f%%), dedup dispatch %.0f (%.1f%%)\n", terms, small_ep, dispatch,
                100 * small_ep / dispatch, static_cast<double>(dedup), 100 * small_ep / static_cast<double>(dedup));
    EXPECT_LE(small_ep, 0.55 * dispatch);
    EXPECT_GT(small_ep, 0);
  }
}

// A rank is a process that is killed in mid-pass: the other ends with its name within a second, and computes the pass alone.
TEST(DslpFaults, ARankKilledInMidPassLetsTheOtherGo) {
  const std::string dir = TestModelDir("fable");
  const HostDeviceOptions device{.num_threads = 1};
  const SlpOptions options{.chunk_rows = 64, .max_rows = 256};
  ASSERT_TRUE(ImageOf(dir, 1).ok());  // made before there are two processes
  GroupMemory memory(2);
  int reached[2];
  ASSERT_EQ(pipe(reached), 0);
  const std::vector<int32_t> pages = {0, 1, 2, 3};
  ForwardBatch batch{.form = Form::kPrefill, .token_ids = Ids(256, 2, 512), .sequences = {}, .logit_rows = {}, .prior_hidden = {nullptr}};
  batch.sequences = {{.first_row = 0, .num_rows = 256, .pages = pages.data()}};
  const auto run = [&](PrefillRank& rank, const SlpHooks& hooks) {
    KvGeometry geometry = rank.model->kv_geometry();
    geometry.num_pages = 4;
    return rank.engine->RunShared(*KvPool::InMemory(geometry), batch, nullptr, hooks);
  };
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto rank = PrefillRank::Make(dir, 1, device, options, 1, 2, memory.data());
    if (!rank.ok()) _exit(1);
    const auto in_layer_three = [&](int64_t layer) {
      if (layer == 3 && write(reached[1], "x", 1) == 1) pause();
      return true;
    };
    _exit(run(**rank, {.on_layer_done = in_layer_three}).ok() ? 0 : 1);
  }
  auto rank = PrefillRank::Make(dir, 1, device, options, 0, 2, memory.data());
  ASSERT_TRUE(rank.ok()) << rank.status();
  std::atomic<int64_t> killed_ns{0};
  std::thread killer([&] {
    char byte = 0;
    EXPECT_EQ(read(reached[0], &byte, 1), 1);
    killed_ns = MonotonicNowNs();
    kill(child, SIGKILL);
  });
  const absl::Status status = run(**rank, {});
  const int64_t ended_ns = MonotonicNowNs();
  killer.join();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
  EXPECT_LT(ended_ns - killed_ns, 1'000'000'000);
  waitpid(child, nullptr, 0);
  close(reached[0]);
  close(reached[1]);

  // What is left goes on alone.
  KvGeometry geometry = (*rank)->model->kv_geometry();
  geometry.num_pages = 4;
  EXPECT_TRUE((*rank)->engine->Run(*KvPool::InMemory(geometry), batch, nullptr, {}).ok());
}

}  // namespace
}  // namespace hearth
