// Speculation through the workers' loops on the host device: drafts change when a token comes, and nothing else. Tokens, log-probabilities and the KV of every
// layer, the MTP module's included, are equal at each depth, greedy and sampled, in a batch, across a hand-off from prefill and a resume in another worker,
// up to the context's end, with a cache of BF16 and of FP8.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <thread>

#include "services/decode/decode_loop.h"
#include "services/prefill/prefill_loop.h"
#include "tests/keeping_page_store.h"
#include "tests/model_harness.h"

namespace hearth {
namespace {

struct Sink : StreamSink {
  void OnStarted(int64_t) override {}
  void OnPrefilled(int64_t) override { ended = true; }
  void OnToken(const TokenEvent& token) override { tokens.push_back(token); }
  void OnFinished(FinishReason why) override {
    reason = why;
    ended = true;
  }
  void OnError(const absl::Status& status) override {
    ADD_FAILURE() << status;
    ended = true;
  }
  std::vector<TokenEvent> tokens;
  FinishReason reason = FinishReason::kLength;
  bool ended = false;
};

// What must not depend on the depth.
struct Answer {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;  // the chosen ones', then the best ones' by id and value
  std::vector<uint8_t> kv;      // of all positions but the last token's, layer by layer
  bool operator==(const Answer&) const = default;
};

struct Plan {
  std::optional<int64_t> depth = 0;
  bool hand_off = false;            // the prompt is computed by a prefill loop
  std::vector<size_t> stops;        // another worker goes on after so many tokens
  std::optional<int64_t> then = 0;  // at this depth
};

class Speculation : public ::testing::TestWithParam<DType> {
 protected:
  static ModelHarness& harness() {
    static std::map<DType, std::unique_ptr<ModelHarness>> harnesses;
    std::unique_ptr<ModelHarness>& harness = harnesses[GetParam()];
    if (harness == nullptr) {
      auto made =
          ModelHarness::Make(SourceDir() + "/deploy/models/fable-moe", {.device = {.num_threads = 2, .kv_dtype = GetParam()}, .num_pages = 256});
      EXPECT_TRUE(made.ok()) << made.status();
      harness = *std::move(made);
    }
    return *harness;
  }

  // Prompts that end beside page borders, each with its own way of drawing.
  static std::vector<StreamRequest> Requests() {
    std::vector<StreamRequest> requests;
    const auto add = [&](int64_t prompt, int64_t tokens, SamplingParams sampling) -> StreamRequest& {
      StreamRequest request;
      request.id = {requests.size() + 1, 0};
      uint32_t seed = static_cast<uint32_t>(requests.size());
      for (int64_t i = 0; i < prompt; ++i) request.tokens.push_back(static_cast<int32_t>((seed = seed * 1664525u + 1013904223u) >> 8) % 4096);
      request.prompt_size = prompt;
      request.max_new_tokens = tokens;
      request.ignore_eos = true;
      request.eos_ids = {1};
      request.seed = 77 + requests.size();
      request.num_logprobs = 3;
      request.sampling = sampling;
      return requests.emplace_back(std::move(request));
    };
    add(1, 90, {.temperature = 0});
    add(65, 70, {.temperature = 0});
    add(64, 70, {.temperature = 0.7f, .top_p = 0.9f});
    add(63, 70, {.temperature = 0.9f, .presence_penalty = 0.5f, .frequency_penalty = 0.2f, .repetition_penalty = 1.1f});
    add(130, 40, {.temperature = 0.6f, .top_k = 20, .min_p = 0.02f, .logit_bias = {{14, 2.0f}, {262, -1.0f}}});
    StreamRequest& ends = add(40, 60, {.temperature = 0});
    ends.ignore_eos = false;
    ends.min_tokens = 5;
    ends.eos_ids = {16, 14, 262};  // full stop, comma, "the": it ends early, but not before min_tokens
    return requests;
  }

  static void Drive(StreamLoop& loop, const std::function<bool()>& done) {
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(100); !done();) {
      ASSERT_LT(std::chrono::steady_clock::now(), end);
      if (!loop.Step()) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  // All requests in one batch of `places`.
  std::vector<Answer> Answers(const Plan& plan, int64_t places, LoopStats::View* stats = nullptr) { return Answers(Requests(), plan, places, stats); }
  std::vector<Answer> Answers(std::vector<StreamRequest> requests, const Plan& plan, int64_t places, LoopStats::View* stats = nullptr) {
    harness().Reset();
    KeepingPageStore store;
    const Model& model = harness().model();
    if (plan.hand_off) {
      PrefillLoop loop(harness().device(), model, harness().kv(), store, {.max_streams = 2, .busy_chunk_tokens = 48, .idle_chunk_tokens = 48});
      std::vector<std::shared_ptr<Sink>> sinks;
      for (const StreamRequest& request : requests) {
        if (request.prompt_size == 1) continue;  // goes to decode at once
        EXPECT_TRUE(loop.Submit(request, sinks.emplace_back(std::make_shared<Sink>()), nullptr).ok());
      }
      Drive(loop, [&] { return std::all_of(sinks.begin(), sinks.end(), [](const auto& s) { return s->ended; }); });
    }
    std::vector<std::vector<TokenEvent>> tokens(requests.size());
    std::vector<bool> finished(requests.size());
    for (size_t part = 0; part <= plan.stops.size(); ++part) {
      DecodeLoop loop(harness().device(), model, harness().kv(), store,
                      {.max_streams = places, .busy_chunk_tokens = 32, .idle_chunk_tokens = 64, .drafts = part == 0 ? plan.depth : plan.then});
      std::vector<std::shared_ptr<Sink>> sinks(requests.size());
      for (size_t i = 0; i < requests.size(); ++i) {
        if (finished[i]) continue;
        EXPECT_TRUE(loop.Submit(requests[i], sinks[i] = std::make_shared<Sink>(), nullptr).ok());
      }
      const bool last = part == plan.stops.size();
      Drive(loop, [&] {
        for (size_t i = 0; i < sinks.size(); ++i) {
          if (sinks[i] != nullptr && !sinks[i]->ended && (last || tokens[i].size() + sinks[i]->tokens.size() < plan.stops[part])) return false;
        }
        return true;
      });
      if (stats != nullptr) *stats = loop.Stats();
      for (size_t i = 0; i < sinks.size(); ++i) {
        if (sinks[i] == nullptr) continue;
        finished[i] = sinks[i]->ended;
        for (const TokenEvent& token : sinks[i]->tokens) {
          EXPECT_EQ(token.index, requests[i].output_size());
          requests[i].tokens.push_back(token.id);
          tokens[i].push_back(token);
        }
      }
      // The worker is gone without a word: what it had in hand beyond what it published is lost.
    }
    std::vector<Answer> answers;
    for (size_t i = 0; i < requests.size(); ++i) answers.push_back(Look(requests[i], tokens[i], store));
    return answers;
  }

  static Answer Look(const StreamRequest& request, const std::vector<TokenEvent>& tokens, KeepingPageStore& store) {
    Answer answer;
    for (const TokenEvent& token : tokens) {
      answer.ids.push_back(token.id);
      answer.logprobs.push_back(token.logprob);
      for (const TokenScore& score : token.top) {
        answer.logprobs.push_back(static_cast<float>(score.id));
        answer.logprobs.push_back(score.logprob);
      }
    }
    const std::vector<PageRef> rows = store.Rows(request.id);
    const KvPool& kv = harness().kv();
    const KvGeometry& geometry = kv.geometry();
    const int64_t until = static_cast<int64_t>(request.tokens.size()) - 1;
    for (int64_t position = 0; position < until; ++position) {
      const int32_t page = rows[static_cast<size_t>(position / kPageTokens)].page;
      EXPECT_GT(static_cast<int64_t>(kv.header(page).tokens_valid.load()), position % kPageTokens) << "position " << position;
      EXPECT_EQ(kv.header(page).token_ids[position % kPageTokens], request.tokens[static_cast<size_t>(position)]);
      for (int64_t layer = 0; layer < geometry.layers; ++layer) {
        const auto keep = [&](int64_t at, int64_t bytes) {
          const uint8_t* from = kv.layer(page, layer) + at;
          answer.kv.insert(answer.kv.end(), from, from + bytes);
        };
        const int64_t slot = position % kPageTokens, row = geometry.row_elements;
        if (geometry.dtype == DType::kBF16) {
          keep(2 * slot * row, 2 * row);
        } else {  // latents, rotary keys in BF16, scales (kv_rows.h)
          const int64_t rank = harness().model().config().kv_lora_rank, rope = 2 * harness().model().config().qk_rope_head_dim;
          keep(slot * rank, rank);
          keep(kPageTokens * rank + slot * rope, rope);
          keep(kPageTokens * (rank + rope) + 4 * slot, 4);
        }
      }
    }
    return answer;
  }

  void ExpectEqual(const std::vector<Answer>& expected, const std::vector<Answer>& found, const std::string& how) {
    ASSERT_EQ(expected.size(), found.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(expected[i].ids, found[i].ids) << how << ", stream " << i;
      EXPECT_TRUE(expected[i].logprobs.size() == found[i].logprobs.size() &&
                  std::memcmp(expected[i].logprobs.data(), found[i].logprobs.data(), found[i].logprobs.size() * sizeof(float)) == 0)
          << how << ", stream " << i;
      EXPECT_TRUE(expected[i].kv == found[i].kv) << how << ", KV of stream " << i;
    }
  }
};

TEST_P(Speculation, EveryDepthGivesTheSameTokensLogprobsAndKv) {
  const std::vector<Answer> plain = Answers({.depth = 0}, 6);
  ASSERT_EQ(plain.size(), 6u);
  EXPECT_EQ(plain[0].ids.size(), 90u);
  EXPECT_LT(plain[5].ids.size(), 60u) << "an end token was drawn";
  EXPECT_GE(plain[5].ids.size(), 6u) << "but not before min_tokens";
  for (const std::optional<int64_t> depth :
       {std::optional<int64_t>(1), std::optional<int64_t>(2), std::optional<int64_t>(3), std::optional<int64_t>()}) {
    for (const int64_t places : {6, 2}) {
      LoopStats::View stats;
      const std::string how = (depth.has_value() ? "depth " + std::to_string(*depth) : "auto") + ", " + std::to_string(places) + " places";
      ExpectEqual(plain, Answers({.depth = depth}, places, &stats), how);
      std::printf("[ measured ] %-18s %lu drafts, %lu accepted, %.2f tokens a step\n", how.c_str(), static_cast<unsigned long>(stats.drafts_total),
                  static_cast<unsigned long>(stats.drafts_accepted_total),
                  static_cast<double>(stats.tokens_total) / static_cast<double>(stats.stream_steps_total));
      EXPECT_GT(stats.drafts_accepted_total, stats.drafts_total / 10) << how << ": drafts of a trained module hold often";
      EXPECT_LT(stats.drafts_accepted_total, stats.drafts_total) << how << ": and not always";
      EXPECT_EQ(stats.tokens_total, stats.stream_steps_total + stats.drafts_accepted_total) << how;
    }
  }
}

TEST_P(Speculation, HandedOffPromptsGoOnAlike) {
  const std::vector<Answer> plain = Answers({.depth = 0}, 6);
  ExpectEqual(plain, Answers({.depth = 0, .hand_off = true}, 6), "handed off, no drafts");
  ExpectEqual(plain, Answers({.depth = 2, .hand_off = true}, 6), "handed off, two drafts");
}

TEST_P(Speculation, AnotherWorkerGoesOnAlikeWhereverTheFirstOneStopped) {
  const std::vector<Answer> plain = Answers({.depth = 0}, 6);
  for (const size_t stop : {1, 2, 17, 33}) {
    const std::string how = "stopped after " + std::to_string(stop);
    ExpectEqual(plain, Answers({.depth = 3, .stops = {stop, stop + 7, stop + 8}, .then = 2}, 6), how);
    ExpectEqual(plain, Answers({.depth = 2, .stops = {stop}, .then = 0}, 6), how + ", then no drafts");
    ExpectEqual(plain, Answers({.depth = 0, .stops = {stop}, .then = 3}, 6), how + ", then three");
  }
}

TEST_P(Speculation, AnswersThatReachTheContextsEndEndThere) {
  const int64_t context = harness().model().config().max_position_embeddings;
  std::vector<StreamRequest> requests = Requests();
  requests.resize(1);
  for (StreamRequest& request : requests) {
    request.prompt_size = context - 20;
    request.tokens.resize(static_cast<size_t>(request.prompt_size), 300);
    request.max_new_tokens = 100;
  }
  const std::vector<Answer> plain = Answers(requests, {.depth = 0}, 2);
  for (const Answer& answer : plain) EXPECT_EQ(answer.ids.size(), 20u);
  for (const int64_t depth : {1, 3}) ExpectEqual(plain, Answers(requests, {.depth = depth}, 2), "depth " + std::to_string(depth));
}

INSTANTIATE_TEST_SUITE_P(Kv, Speculation, ::testing::Values(DType::kBF16, DType::kF8E4M3),
                         [](const auto& info) { return std::string(info.param == DType::kBF16 ? "bf16" : "f8"); });

}  // namespace
}  // namespace hearth
