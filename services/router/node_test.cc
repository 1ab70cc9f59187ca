// The scheduler against workers that come, go, hang and refuse; health; drain; the gRPC door. Room: services/router.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/formats/synth.h"
#include "common/rpc/rpc.h"
#include "hearth/v1/inference.grpc.pb.h"
#include "hearth/v1/node.grpc.pb.h"
#include "services/router/testing/fakes.h"

namespace hearth::router::testing {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Json PromptBody(Json extra = Json::object()) {
  Json body = {{"prompt", "hi"}, {"temperature", 0}};
  for (const auto& [name, value] : extra.items()) body[name] = value;
  return body;
}
std::vector<int32_t> LongPrompt(int tokens) { return std::vector<int32_t>(static_cast<size_t>(tokens), 60); }

TEST(SchedulerTest, PathFollowsTheUncachedLength) {
  TestNode node([](NodeConfig* config) { config->chunked_prefill_max_tokens = 200; });
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(201)}})).status, 200);
  EXPECT_EQ(node.prefill->calls().size(), 0U);
  const Json answer = node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(500)}})).json();
  ASSERT_EQ(node.prefill->calls().size(), 1U);
  EXPECT_EQ(answer["choices"][0]["text"], "Once upon a time");
  const v1::Stream prefilled = node.prefill->calls()[0], decoded = node.decode->calls().back();
  EXPECT_EQ(prefilled.request_id(), decoded.request_id());
  EXPECT_EQ(prefilled.prefill_until(), 499);
  EXPECT_EQ(prefilled.epoch() + 1, decoded.epoch());
  EXPECT_EQ(decoded.generation(), node.decode->generation());
  node.store.peek = 448;  // the pages have most of it
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(500)}})).status, 200);
  EXPECT_EQ(node.prefill->calls().size(), 1U);
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", {5}}})).status, 200);  // one token: decode
  EXPECT_EQ(node.prefill->calls().size(), 1U);
}

v1::RouterStatus StatusOf(const TestNode& node) {
  auto stub = v1::Router::NewStub(UnixChannel(node.config.RouterAdminSocket()));
  grpc::ClientContext context;
  v1::RouterStatus status;
  HEARTH_CHECK(stub->Status(&context, {}, &status).ok());
  return status;
}

// Decode: 10 ms and 1 ms a token. Prefill streams weights: half a second and 0.1 ms a token. They meet at about 550 tokens.
void SetCosts(TestNode* node) {
  node->decode->SetPasses("chunked", {{64, 0.074}, {256, 0.266}, {512, 0.522}});
  node->prefill->SetPasses("slp", {{100, 0.51}, {1000, 0.6}, {8000, 1.3}});
}

TEST(SchedulerTest, PathFollowsThePredictedTimeOnceBothWaysAreMeasured) {
  TestNode node([](NodeConfig* config) { config->chunked_prefill_max_tokens = 100; });
  EXPECT_FALSE(StatusOf(node).paths().by_time());
  EXPECT_EQ(StatusOf(node).paths().prefill_from_tokens(), 101);
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(200)}})).status, 200);
  EXPECT_EQ(node.prefill->calls().size(), 1U);  // by length
  SetCosts(&node);
  ASSERT_TRUE(WaitFor([&] { return StatusOf(node).paths().by_time(); }));
  const v1::RouterStatus::Paths paths = StatusOf(node).paths();
  EXPECT_GT(paths.prefill_from_tokens(), 250);
  EXPECT_LT(paths.prefill_from_tokens(), 700);
  EXPECT_EQ(paths.costs_size(), 2);
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(200)}})).status, 200);
  EXPECT_EQ(node.prefill->calls().size(), 1U);
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(900)}})).status, 200);
  EXPECT_EQ(node.prefill->calls().size(), 2U);
  // While decode has a long prompt's worth of others before it, prefill has the shorter time.
  node.decode->hold_at = 0;
  TestClient other(node.address());
  other.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(240)}, {"n", 8}}).dump());
  TestClient second(node.address());
  second.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(240)}}).dump());
  TestClient third(node.address());
  ASSERT_TRUE(node.decode->WaitRunning(2, absl::Seconds(2)));
  third.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(240)}}).dump());
  ASSERT_TRUE(WaitFor([&] { return node.prefill->calls().size() == 3U; }));
  node.decode->Release();
  for (TestClient* client : {&other, &second, &third}) EXPECT_EQ(client->Read().status, 200);
  EXPECT_EQ(node.Metric("hearth_paths_chosen_total{by=\"length\",path=\"prefill\"}"), 1);
  EXPECT_GE(node.Metric("hearth_paths_chosen_total{by=\"time\",path=\"prefill\"}"), 2);
  EXPECT_GE(StatusOf(node).paths().predictions_size(), 2);
  EXPECT_GE(node.Metric("hearth_ttft_real_over_predicted_count{path=\"decode chunked\"}"), 1);
}

TEST(SchedulerTest, APinnedPathFollowsTheLengthWhateverWasMeasured) {
  TestNode node([](NodeConfig* config) {
    config->chunked_prefill_max_tokens = 100;
    config->path_choice = "length";
  });
  SetCosts(&node);
  ASSERT_TRUE(WaitFor([&] { return StatusOf(node).paths().costs_size() == 2; }));
  EXPECT_TRUE(StatusOf(node).paths().pinned());
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(200)}})).status, 200);
  EXPECT_EQ(node.prefill->calls().size(), 1U);
}

TEST(SchedulerTest, WhatBreaksThePromiseIsRefusedAtOnceOrWaitsAsTheClientChose) {
  TestNode node([](NodeConfig* config) { config->ttft_slo_ms = 2000; });
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(3000)}})).status, 200);  // nothing was measured: nothing is refused
  node.decode->SetPasses("chunked", {{64, 0.74}, {256, 2.66}, {512, 5.22}});
  ASSERT_TRUE(WaitFor([&] { return StatusOf(node).paths().costs_size() == 1; }));
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(60)}})).status, 200);
  const auto refused = node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(1000)}}));
  EXPECT_EQ(refused.status, 429) << refused.body;
  EXPECT_EQ(refused.json()["error"]["code"], "ttft_slo");
  EXPECT_THAT(refused.body, AllOf(HasSubstr("router.ttft_slo_ms"), HasSubstr("wait_in_queue"), HasSubstr("idle node")));
  const int retry_after = std::stoi(refused.headers.at("retry-after"));
  EXPECT_GE(retry_after, 6);
  EXPECT_LE(retry_after, 14);
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(1000)}, {"wait_in_queue", true}})).status, 200);
  EXPECT_EQ(node.Metric("hearth_requests_refused_total{reason=\"ttft_slo\"}"), 1);
  // Over gRPC the same, with the time in the trailer.
  auto stub = v1::Inference::NewStub(grpc::CreateChannel(node.router->grpc_addresses().front(), grpc::InsecureChannelCredentials()));
  for (const bool waits : {false, true}) {
    grpc::ClientContext context;
    v1::GenerateRequest request;
    for (const int32_t id : LongPrompt(1000)) request.mutable_token_ids()->add_ids(id);
    request.mutable_options()->set_wait_in_queue(waits);
    auto reader = stub->Generate(&context, request);
    v1::GenerateEvent event;
    while (reader->Read(&event)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), waits ? grpc::StatusCode::OK : grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(context.GetServerTrailingMetadata().count("retry-after-ms"), waits ? 0U : 1U);
  }
}

// Two prefill workers that are one group.
class GroupNode {
 public:
  GroupNode()
      : node(
            [](NodeConfig* config) {
              config->chunked_prefill_max_tokens = 100;
              config->group_prefill_min_tokens = 1000;
              config->prefill_instances = 2;
            },
            [this](TestNode* made) {
              second = std::make_unique<FakeWorker>(made->config.WorkerSocket("prefill", 1), "prefill");
              made->decode->Start();
              made->prefill->Start();
              second->Start();
              made->prefill->SetGroup(7, 0, 2);
              second->SetGroup(7, 1, 2);
            }) {
    EXPECT_TRUE(WaitFor([&] {
      const v1::RouterStatus status = StatusOf(node);
      return std::all_of(status.workers().begin(), status.workers().end(), [](const auto& worker) { return worker.state() == "ready"; });
    }));
  }
  size_t calls() const { return node.prefill->calls().size() + second->calls().size(); }

  std::unique_ptr<FakeWorker> second;  // outlives the router
  TestNode node;
};

TEST(SchedulerTest, ALongPromptGoesToTheRankThatLeadsAnIdleGroup) {
  GroupNode group;
  EXPECT_EQ(group.node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(1500)}})).status, 200);
  ASSERT_EQ(group.node.prefill->calls().size(), 1U);
  EXPECT_TRUE(group.node.prefill->calls()[0].shared_pass());
  EXPECT_EQ(group.node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(500)}})).status, 200);
  ASSERT_EQ(group.calls(), 2U);
  EXPECT_FALSE((group.second->calls().empty() ? group.node.prefill->calls()[1] : group.second->calls()[0]).shared_pass());
  EXPECT_TRUE(group.node.decode->calls()[0].prompt_ids_size() == 1500 && !group.node.decode->calls()[0].shared_pass());
}

TEST(SchedulerTest, WhileAGroupComputesItsRanksGetNothingOfTheirOwn) {
  GroupNode group;
  group.node.prefill->hold_at = 0;
  std::vector<std::unique_ptr<TestClient>> clients;
  for (const int length : {1500, 1600, 500}) {
    clients.push_back(std::make_unique<TestClient>(group.node.address()));
    clients.back()->Post("/v1/completions", PromptBody({{"prompt", LongPrompt(length)}}).dump());
    ASSERT_TRUE(WaitFor([&] { return group.calls() == clients.size(); }));
  }
  EXPECT_EQ(group.second->calls().size(), 0U);
  EXPECT_TRUE(group.node.prefill->calls()[1].shared_pass()) << "shares the next pass";
  EXPECT_FALSE(group.node.prefill->calls()[2].shared_pass());
  group.node.prefill->Release();
  for (const auto& client : clients) EXPECT_EQ(client->Read().status, 200);
}

TEST(SchedulerTest, WhatAGroupFailedWithGoesOnAlone) {
  GroupNode group;
  group.node.prefill->fail_at = 0;
  TestClient client(group.node.address());
  client.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(1500)}}).dump());
  EXPECT_EQ(client.Read().status, 200);
  EXPECT_TRUE(group.node.prefill->calls()[0].shared_pass());
  ASSERT_EQ(group.calls(), 2U);
  EXPECT_FALSE((group.second->calls().empty() ? group.node.prefill->calls()[1] : group.second->calls()[0]).shared_pass());
}

TEST(SchedulerTest, AGroupWithARankThatHangsIsNotWaitedFor) {
  GroupNode group;
  group.node.prefill->hold_at = 0;
  TestClient client(group.node.address());
  client.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(1500)}}).dump());
  ASSERT_TRUE(WaitFor([&] { return group.calls() == 1; }));
  group.second->status_hangs = true;
  ASSERT_TRUE(WaitFor([&] { return group.calls() == 2; }));
  EXPECT_FALSE(group.node.prefill->calls()[1].shared_pass());
  group.node.prefill->Release();
  EXPECT_EQ(client.Read().status, 200);
  // Without it there is no group.
  EXPECT_EQ(group.node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(1700)}})).status, 200);
  EXPECT_FALSE(group.node.prefill->calls().back().shared_pass());
  group.second->status_hangs = false;
}

TEST(SchedulerTest, AGroupComputesWhatItIsExpectedToComputeSooner) {
  for (const bool sooner : {true, false}) {
    GroupNode group;
    group.node.prefill->SetPasses("slp", {{100, 0.1}, {1000, 1.0}, {4000, 4.0}});
    const double slower = sooner ? 0.5 : 2;
    group.node.prefill->SetPasses("slp", {{100, 0.1 * slower}, {1000, slower}, {4000, 4 * slower}}, /*ranks=*/2);
    ASSERT_TRUE(WaitFor([&] { return StatusOf(group.node).paths().costs_size() == 2; }));
    // One that is shorter and one that is longer than group_prefill_min_tokens, which decides no more.
    for (const int length : {600, 1600}) {
      const size_t calls = group.node.prefill->calls().size();
      EXPECT_EQ(group.node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(length)}})).status, 200);
      ASSERT_GE(group.calls(), calls + 1);
      const std::vector<v1::Stream> given = group.node.prefill->calls();
      EXPECT_EQ(given.size() > calls && given.back().shared_pass(), sooner) << length;
    }
  }
}

TEST(SchedulerTest, LostDecodeWorkerIsAPauseWithoutRepeatedTokens) {
  TestNode node;
  node.decode->stale_events = true;  // what an old worker might still say is dropped
  for (const bool kill : {false, true}) {
    if (kill) {
      node.decode->hold_at = 3;
    } else {
      node.decode->fail_at = 2;
    }
    const size_t calls_before = node.decode->calls().size();
    TestClient client(node.address());
    client.Post("/v1/completions", PromptBody({{"stream", true}, {"return_token_ids", true}, {"seed", 9}}).dump());
    if (kill) {
      ASSERT_TRUE(node.decode->WaitRunning(1, absl::Seconds(2)));
      absl::SleepFor(absl::Milliseconds(50));
      node.decode->Kill();
      node.decode->Release();
      absl::SleepFor(absl::Milliseconds(100));
      node.decode->Start();
    }
    const auto answer = client.Read();
    EXPECT_TRUE(answer.done()) << answer.body;
    EXPECT_EQ(answer.text(), "Once upon a time");
    std::vector<int32_t> ids;
    for (const auto& event : answer.events()) {
      for (const auto& id : event["choices"][0]["token_ids"]) ids.push_back(id);
    }
    std::vector<int32_t> expected = Ids("Once upon a time");
    expected.push_back(1);
    EXPECT_EQ(ids, expected);
    const auto calls = node.decode->calls();
    ASSERT_GE(calls.size(), calls_before + 2);
    const v1::Stream& first = calls[calls_before];
    const v1::Stream& last = calls.back();
    EXPECT_EQ(first.request_id(), last.request_id());
    EXPECT_EQ(first.seed(), last.seed());
    EXPECT_EQ(last.output_ids_size(), kill ? 3 : 2);
    EXPECT_GT(last.epoch(), first.epoch());
    EXPECT_EQ(last.generation(), node.decode->generation());
  }
  EXPECT_GE(node.Metric("hearth_resumes_total"), 2);
}

TEST(SchedulerTest, PreemptedRefusedAndLostPrefillGoOn) {
  TestNode node([](NodeConfig* config) { config->chunked_prefill_max_tokens = 200; });
  node.decode->preempt_at = 2;
  node.decode->refuse = 2;
  EXPECT_EQ(node.Post("/v1/completions", PromptBody()).json()["choices"][0]["text"], "Once upon a time");
  node.prefill->fail_at = 0;
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(500)}})).json()["choices"][0]["text"], "Once upon a time");
  // No prefill worker at all: decode takes long prompts too.
  node.prefill->Kill();
  EXPECT_EQ(node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(500)}})).status, 200);
}

TEST(SchedulerTest, AStreamThatLosesEveryWorkerIsGivenUpAndItsPagesFreed) {
  TestNode node;
  node.decode->fails_always = true;
  const auto answer = node.Post("/v1/completions", PromptBody());
  EXPECT_EQ(answer.status, 500);
  EXPECT_THAT(answer.body, HasSubstr("in a row"));
  EXPECT_EQ(node.decode->calls().size(), 5U);
  EXPECT_TRUE(WaitFor([&] { return !node.store.freed().empty(); }));
  EXPECT_EQ(node.store.freed()[0], node.decode->calls()[0].request_id());
}

TEST(SchedulerTest, WithoutAWorkerAcceptedStreamsEndWithAnErrorEventInTime) {
  TestNode node;
  node.decode->hold_at = 1;
  TestClient client(node.address());
  client.Post("/v1/completions", PromptBody({{"stream", true}}).dump());
  ASSERT_TRUE(node.decode->WaitRunning(1, absl::Seconds(2)));
  node.decode->Kill();
  const absl::Time start = absl::Now();
  const auto answer = client.Read();
  EXPECT_THAT(answer.body, HasSubstr("\"error\""));
  EXPECT_THAT(answer.body, HasSubstr("no worker has taken this request"));
  EXPECT_TRUE(answer.done());
  EXPECT_GT(absl::Now() - start, absl::Seconds(1.5));
  EXPECT_LT(absl::Now() - start, absl::Seconds(6));
}

TEST(SchedulerTest, FairBetweenKeysAndFifoWithin) {
  const std::string path = ::testing::TempDir() + "/hearth_fair_keys";
  {
    std::FILE* file = std::fopen(path.c_str(), "w");
    std::fputs("a\nb\n", file);
    std::fclose(file);
  }
  TestNode node([&](NodeConfig* config) { config->api_key_file = path; });
  node.decode->max_batch = 1;
  absl::SleepFor(absl::Milliseconds(150));
  node.decode->hold_at = 0;
  std::vector<std::unique_ptr<TestClient>> clients;
  const auto send = [&](const char* key, int marker) {
    clients.push_back(std::make_unique<TestClient>(node.address()));
    clients.back()->Post("/v1/completions", PromptBody({{"prompt", {marker, marker}}}).dump(),
                         absl::StrCat("Content-Type: application/json\r\nAuthorization: Bearer ", key, "\r\n"));
    const double queued = static_cast<double>(clients.size()) - 1;
    EXPECT_TRUE(WaitFor([&] { return node.Metric("hearth_streams{state=\"queued\"}") == queued && node.decode->running() == 1; }));
  };
  for (const int marker : {10, 11, 12, 13}) send("a", marker);
  send("b", 20);
  node.decode->Release();
  for (auto& client : clients) EXPECT_EQ(client->Read().status, 200);
  std::vector<int> order;
  for (const auto& call : node.decode->calls()) order.push_back(call.prompt_ids(0));
  EXPECT_THAT(order, ::testing::ElementsAre(10, 20, 11, 12, 13));
}

TEST(HealthTest, FromLoadingToReadyToHungAndBack) {
  TestNode node({}, [](TestNode* self) {
    StoreView view;
    view.attached = true;
    view.phase = "loading";
    view.load_fraction = 0.42;
    view.load_eta_seconds = 12;
    self->store.SetView(view);
    self->decode->Start();
    self->prefill->Start();
  });
  const auto loading = node.Get("/health");
  EXPECT_EQ(loading.status, 503);
  EXPECT_EQ(loading.json()["status"], "loading");
  EXPECT_EQ(loading.json()["progress_percent"], 42);
  EXPECT_EQ(loading.json()["eta_seconds"], 12);
  EXPECT_TRUE(loading.json()["error"]["message"].is_string());
  EXPECT_EQ(node.Get("/livez").status, 200);
  EXPECT_EQ(node.Get("/v1/models").status, 200);
  const auto early = node.Post("/v1/completions", PromptBody());
  EXPECT_EQ(early.status, 503);
  EXPECT_TRUE(early.headers.count("retry-after"));

  StoreView ready;
  ready.attached = true;
  ready.generation = Hash128{1, 2};
  node.store.SetView(ready);
  node.WaitReady();
  EXPECT_EQ(node.Post("/v1/completions", PromptBody()).status, 200);

  node.decode->status_hangs = true;  // as under SIGSTOP
  ASSERT_TRUE(WaitFor([&] { return node.Get("/health").status == 503; }, absl::Seconds(2)));
  EXPECT_THAT(node.Get("/health").body, HasSubstr("does not answer"));
  node.decode->status_hangs = false;
  ASSERT_TRUE(WaitFor([&] { return node.Get("/health").status == 200; }, absl::Seconds(2)));

  StoreView away;
  away.away_reason = "connection refused";
  node.store.SetView(away);
  ASSERT_TRUE(WaitFor([&] { return node.Get("/health").status == 503; }, absl::Seconds(2)));
  EXPECT_THAT(node.Get("/health").body, AllOf(HasSubstr("the weight store is away"), Not(HasSubstr("connection refused"))));
}

// A folder that has what the router reads of a model, with a byte-level tokenizer of 259 ids.
std::string OtherModelDir() {
  static const std::string& dir = *new std::string([] {
    const std::string path = absl::StrCat(::testing::TempDir(), "/hearth_other_model_", getpid());
    std::filesystem::remove_all(path);
    std::ifstream in(ModelDir() + "/config.json");
    Json config = Json::parse(in);
    config["vocab_size"] = 300;
    config["max_position_embeddings"] = 512;
    SynthOptions options;
    options.out_dir = path;
    HEARTH_CHECK(WriteSynthCheckpoint(config.dump(), options).ok());
    return path;
  }());
  return dir;
}
constexpr Hash128 kOldModel{7, 7}, kNewModel{8, 8}, kOldGeneration{1, 2}, kNewGeneration{3, 4};

TEST(ModelTest, EachGenerationHasItsOwnTokenizerNameAndContext) {
  TestNode node;
  node.store.SetView(FakeStore::ReadyView(kOldGeneration, kOldModel, ModelDir()));
  node.WaitReady();
  const Json before = node.Post("/tokenize", {{"content", "Once"}}).json()["tokens"];
  EXPECT_EQ(before, Json(Ids("Once")));
  node.store.SetView(FakeStore::ReadyView(kNewGeneration, kNewModel, OtherModelDir(), 256));
  node.decode->SetGeneration(kNewGeneration);
  node.prefill->SetGeneration(kNewGeneration);
  node.decode->SetScript({3 + 'h', 3 + 'o'});
  // What comes while the files are read waits for them: nothing is ever encoded with the old tokenizer again.
  const Json bytes = {3 + 'O', 3 + 'n', 3 + 'c', 3 + 'e'};
  EXPECT_EQ(node.Post("/tokenize", {{"content", "Once"}}).json()["tokens"], bytes);
  node.WaitReady();
  const Json model = node.Get("/v1/models").json()["data"][0];
  EXPECT_EQ(model["id"], OtherModelDir().substr(OtherModelDir().rfind('/') + 1));
  EXPECT_EQ(model["max_model_len"], 256);
  absl::SleepFor(absl::Milliseconds(150));  // the link learns of the worker's new weights with its next question
  const auto answer = node.Post("/v1/completions", {{"prompt", "Once"}, {"max_tokens", 2}});
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.json()["choices"][0]["text"], "ho");
  EXPECT_EQ(node.decode->calls().back().prompt_ids_size(), 4 + (node.decode->calls().back().prompt_ids(0) != 3 + 'O' ? 1 : 0));
  EXPECT_EQ(node.Post("/v1/completions", {{"model", "fable-moe"}, {"prompt", "x"}}).status, 404);
}

TEST(ModelTest, ANameOfTheConfigurationStays) {
  TestNode node([](NodeConfig* config) {
    config->model_name = "mine";
    config->model_name_is_default = false;
  });
  node.store.SetView(FakeStore::ReadyView(kNewGeneration, kNewModel, OtherModelDir()));
  node.WaitReady();
  EXPECT_EQ(node.Get("/v1/models").json()["data"][0]["id"], "mine");
}

TEST(ModelTest, AModelWhoseFilesCannotBeReadIsNotServedAndTheReasonIsSaid) {
  TestNode node;
  node.store.SetView(FakeStore::ReadyView(kNewGeneration, kNewModel, "/nowhere/model"));
  ASSERT_TRUE(WaitFor([&] { return node.Get("/health").status == 503; }));
  ASSERT_TRUE(WaitFor([&] { return node.Get("/health").body.find("/nowhere/model") != std::string::npos; }));
  const auto refused = node.Post("/v1/completions", PromptBody());
  EXPECT_EQ(refused.status, 503);
  EXPECT_THAT(refused.body, HasSubstr("/nowhere/model"));
  EXPECT_TRUE(node.Get("/v1/models").json()["data"].empty());
  node.store.SetView(FakeStore::ReadyView(kOldGeneration, kOldModel, ModelDir()));
  node.WaitReady();
}

TEST(ModelTest, RequestsOfAModelThatWasReplacedEndBeforeATokenAndRunningOnesEndUndisturbed) {
  TestNode node;
  node.store.SetView(FakeStore::ReadyView(kOldGeneration, kOldModel, ModelDir()));
  node.WaitReady();
  node.decode->max_batch = 1;
  absl::SleepFor(absl::Milliseconds(150));
  node.decode->hold_at = 1;
  TestClient running(node.address()), queued(node.address());
  running.Post("/v1/completions", PromptBody({{"stream", true}}).dump());
  ASSERT_TRUE(node.decode->WaitRunning(1, absl::Seconds(2)));
  queued.Post("/v1/completions", PromptBody({{"stream", true}}).dump());
  ASSERT_TRUE(WaitFor([&] { return node.Metric("hearth_streams{state=\"queued\"}") == 1; }));
  node.store.SetView(FakeStore::ReadyView(kNewGeneration, kNewModel, OtherModelDir()));
  node.decode->draining = true;
  const auto replaced = queued.Read();
  EXPECT_EQ(replaced.text(), "");
  EXPECT_THAT(replaced.body, HasSubstr("the model was replaced while this request was waiting: send it again"));
  node.decode->Release();
  EXPECT_EQ(running.Read().text(), "Once upon a time");
}

// The router hears of the switch before a worker does: what is for the new weights waits for it, and never runs on the old ones.
TEST(ModelTest, RequestsOfTheNewModelWaitForAWorkerThatHasIt) {
  TestNode node;
  node.store.SetView(FakeStore::ReadyView(kOldGeneration, kOldModel, ModelDir()));
  node.WaitReady();
  node.store.SetView(FakeStore::ReadyView(kNewGeneration, kNewModel, OtherModelDir()));
  TestClient client(node.address());
  client.Post("/v1/completions", Json{{"prompt", "Once"}, {"max_tokens", 2}}.dump());
  ASSERT_TRUE(WaitFor([&] { return node.Metric("hearth_streams{state=\"queued\"}") == 1; }));
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_TRUE(node.decode->calls().empty());
  node.decode->SetScript({3 + 'h', 3 + 'o'});
  node.decode->SetGeneration(kNewGeneration);
  EXPECT_EQ(client.Read().json()["choices"][0]["text"], "ho");
}

// The worker has newer weights than the router knows of when it sends the stream: `started` tells.
TEST(ModelTest, WhatRunsOnOtherWeightsThanItsTokensAreForIsEnded) {
  TestNode node;
  node.store.SetView(FakeStore::ReadyView(kOldGeneration, kOldModel, ModelDir()));
  node.WaitReady();
  node.decode->before_started = [&] {
    node.decode->SetGeneration(kNewGeneration);
    node.store.SetView(FakeStore::ReadyView(kNewGeneration, kNewModel, OtherModelDir()));
  };
  const auto answer = node.Post("/v1/completions", PromptBody());
  EXPECT_EQ(answer.status, 503) << answer.body;
  EXPECT_THAT(answer.body, HasSubstr("the model was replaced"));
}

TEST(SchedulerTest, WhileTheOnlyWorkerDrainsForASwitchRequestsQueue) {
  TestNode node([](NodeConfig* config) { config->max_queue = 2; });
  node.decode->draining = true;
  ASSERT_TRUE(WaitFor([&] { return node.Get("/health").status == 503; }));
  EXPECT_THAT(node.Get("/health").body, HasSubstr("draining"));
  absl::SleepFor(absl::Milliseconds(800));  // longer than admit_grace
  TestClient first(node.address()), second(node.address());
  first.Post("/v1/completions", PromptBody().dump());
  second.Post("/v1/completions", PromptBody().dump());
  ASSERT_TRUE(WaitFor([&] { return node.Metric("hearth_streams{state=\"queued\"}") == 2; }));
  EXPECT_EQ(node.Post("/v1/completions", PromptBody()).status, 429);
  absl::SleepFor(absl::Seconds(3));  // longer than give_up
  EXPECT_EQ(node.Metric("hearth_streams{state=\"queued\"}"), 2);
  node.decode->Kill();
  node.decode->draining = false;
  absl::SleepFor(absl::Milliseconds(200));
  node.decode->Start();
  EXPECT_EQ(first.Read().status, 200);
  EXPECT_EQ(second.Read().status, 200);
  // Drained and not come back: the grace time counts from then.
  node.decode->draining = true;
  ASSERT_TRUE(WaitFor([&] { return node.Get("/health").status == 503; }));
  node.decode->Kill();
  absl::SleepFor(absl::Milliseconds(900));
  const auto refused = node.Post("/v1/completions", PromptBody());
  EXPECT_EQ(refused.status, 503);
  EXPECT_THAT(refused.body, HasSubstr("no decode worker is ready"));
}

TEST(SchedulerTest, AStreamThatLostALongPromptsPagesGoesToPrefillAgain) {
  TestNode node([](NodeConfig* config) { config->chunked_prefill_max_tokens = 200; });
  for (const bool preempted : {true, false}) {
    const size_t calls_before = node.prefill->calls().size();
    node.store.peek = 0;
    (preempted ? node.decode->preempt_at : node.decode->fail_at) = 2;
    const Json answer = node.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(500)}})).json();
    EXPECT_EQ(answer["choices"][0]["text"], "Once upon a time");
    const auto calls = node.prefill->calls();
    ASSERT_EQ(calls.size(), calls_before + 2) << preempted;
    // The prefill form ends before the last prompt token, whatever the stream has output; decode recomputes the rest in its own form.
    EXPECT_EQ(calls.back().output_ids_size(), 2);
    EXPECT_EQ(calls.back().prefill_until(), 499);
    EXPECT_EQ(calls.back().request_id(), calls[calls.size() - 2].request_id());
    EXPECT_EQ(node.decode->calls().back().output_ids_size(), 2);
  }
  // Its pages are published: decode goes on by itself.
  const size_t calls_before = node.prefill->calls().size();
  node.decode->hold_at = 2;
  TestClient client(node.address());
  client.Post("/v1/completions", PromptBody({{"prompt", LongPrompt(500)}, {"stream", true}}).dump());
  ASSERT_TRUE(node.decode->WaitRunning(1, absl::Seconds(2)));
  node.store.peek = 448;
  node.decode->fail_at = 2;
  node.decode->Release();
  EXPECT_EQ(client.Read().text(), "Once upon a time");
  EXPECT_EQ(node.prefill->calls().size(), calls_before + 1);
}

TEST(DrainTest, NewRequestsAreRefusedAndRunningOnesEndOrAreToldSo) {
  for (const bool finishes : {true, false}) {
    TestNode node;
    node.decode->hold_at = 1;
    TestClient client(node.address()), idle(node.address());
    client.Post("/v1/completions", PromptBody({{"stream", true}}).dump());
    ASSERT_TRUE(node.decode->WaitRunning(1, absl::Seconds(2)));
    std::thread drain([&] { node.router->Drain(); });
    EXPECT_TRUE(idle.ClosedByServer(absl::Seconds(1)));
    const auto refused = node.Post("/v1/completions", PromptBody());
    EXPECT_EQ(refused.status, 503);
    EXPECT_EQ(refused.headers.at("connection"), "close");
    EXPECT_EQ(node.Get("/health").status, 503);
    if (finishes) node.decode->Release();
    const auto answer = client.Read();
    EXPECT_TRUE(answer.done());
    if (finishes) {
      EXPECT_EQ(answer.text(), "Once upon a time");
    } else {
      EXPECT_THAT(answer.body, HasSubstr("drain time is over"));
    }
    drain.join();
  }
}

class GrpcTest : public ::testing::Test {
 protected:
  GrpcTest() : stub_(v1::Inference::NewStub(grpc::CreateChannel(node_.router->grpc_addresses()[0], grpc::InsecureChannelCredentials()))) {}
  TestNode node_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

TEST_F(GrpcTest, GenerateAndChat) {
  grpc::ClientContext context;
  v1::GenerateRequest request;
  request.set_text("hi");
  request.mutable_options()->set_logprobs(true);
  request.mutable_options()->set_top_logprobs(2);
  request.mutable_options()->set_n(2);
  request.set_request_id("two\nlines");
  EXPECT_FALSE(stub_->Generate(std::make_unique<grpc::ClientContext>().get(), request)->Finish().ok()) << "ids go into log lines";
  request.set_request_id("mine");
  auto reader = stub_->Generate(&context, request);
  v1::GenerateEvent event;
  std::map<int, std::string> text;
  int finished = 0, usages = 0;
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_EQ(event.accepted().request_id(), "mine");
  while (reader->Read(&event)) {
    if (event.has_delta()) {
      text[event.choice()] += event.delta().text();
      if (event.delta().token_ids_size() > 0) {
        EXPECT_EQ(event.delta().top_logprobs(0).entries_size(), 2);
      }
    }
    if (event.has_finished()) {
      ++finished;
      EXPECT_EQ(event.finished().reason(), "stop");
      usages += event.finished().has_usage() ? 1 : 0;
    }
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(text, (std::map<int, std::string>{{0, "Once upon a time"}, {1, "Once upon a time"}}));
  EXPECT_EQ(finished, 2);
  EXPECT_EQ(usages, 1);

  grpc::ClientContext chat_context;
  v1::ChatRequest chat;
  auto* message = chat.add_messages();
  message->set_role("user");
  message->set_content("hi");
  auto chat_reader = stub_->Chat(&chat_context, chat);
  std::string answer;
  while (chat_reader->Read(&event)) answer += event.delta().text();
  EXPECT_TRUE(chat_reader->Finish().ok());
  EXPECT_EQ(answer, "Once upon a time");
  EXPECT_EQ(node_.decode->calls().back().prompt_ids(0), 0);
}

TEST_F(GrpcTest, ErrorsCancelAndDeadline) {
  {
    grpc::ClientContext context;
    v1::GenerateRequest request;
    request.set_text("hi");
    request.mutable_options()->mutable_sampling()->set_temperature(-1);
    auto reader = stub_->Generate(&context, request);
    v1::GenerateEvent event;
    EXPECT_FALSE(reader->Read(&event));
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  node_.decode->hold_at = 1;
  for (const std::string how : {"cancel", "deadline", "id"}) {
    grpc::ClientContext context;
    if (how == "deadline") context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
    v1::GenerateRequest request;
    request.set_text("hi");
    request.set_request_id(how);
    auto reader = stub_->Generate(&context, request);
    v1::GenerateEvent event;
    ASSERT_TRUE(reader->Read(&event));
    ASSERT_TRUE(node_.decode->WaitRunning(1, absl::Seconds(2)));
    if (how == "cancel") context.TryCancel();
    if (how == "id") {
      grpc::ClientContext other;
      v1::CancelRequest cancel;
      cancel.set_request_id(how);
      v1::CancelResponse response;
      ASSERT_TRUE(stub_->Cancel(&other, cancel, &response).ok());
      EXPECT_TRUE(response.was_running());
    }
    EXPECT_TRUE(node_.decode->WaitRunning(0, absl::Seconds(1))) << how;
    std::string reason;
    while (reader->Read(&event)) reason = event.finished().reason();
    EXPECT_EQ(reader->Finish().ok(), how == "id");
    if (how == "id") {
      EXPECT_EQ(reason, "cancelled");
    }
  }
  grpc::ClientContext context;
  v1::CancelRequest cancel;
  cancel.set_request_id("never");
  v1::CancelResponse response;
  EXPECT_EQ(stub_->Cancel(&context, cancel, &response).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(GrpcTest, StatusTellsWhatRan) {
  EXPECT_EQ(node_.Post("/v1/completions", PromptBody()).status, 200);
  auto stub = v1::Router::NewStub(UnixChannel(node_.config.RouterAdminSocket()));
  grpc::ClientContext context;
  v1::RouterStatus status;
  ASSERT_TRUE(stub->Status(&context, {}, &status).ok());
  EXPECT_TRUE(status.ready());
  EXPECT_EQ(status.requests_total(), 1U);
  EXPECT_EQ(status.completion_tokens_total(), Ids("Once upon a time").size() + 1);
  EXPECT_EQ(status.ttft().count(), 1U);
  EXPECT_GT(status.ttft().p50_ms(), 0);
  ASSERT_EQ(status.workers_size(), 2);
  EXPECT_EQ(status.workers(0).state(), "ready");
}

}  // namespace
}  // namespace hearth::router::testing
