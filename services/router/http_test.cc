// The HTTP door end to end, through real sockets: shapes, streams, errors, connections. Room: services/router.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "services/router/http/http_server.h"
#include "services/router/testing/fakes.h"

namespace hearth::router::testing {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

Json ChatBody(Json extra = Json::object()) {
  Json body = {{"model", "fable-moe"}, {"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"temperature", 0}};
  for (const auto& [name, value] : extra.items()) body[name] = value;
  return body;
}
Json PromptBody(Json extra = Json::object()) {
  Json body = {{"model", "fable-moe"}, {"prompt", "hi"}, {"temperature", 0}};
  for (const auto& [name, value] : extra.items()) body[name] = value;
  return body;
}

TEST(HttpTest, ChatAndCompletionAnswers) {
  TestNode node;
  const auto chat = node.Post("/v1/chat/completions", ChatBody());
  ASSERT_EQ(chat.status, 200) << chat.body;
  EXPECT_EQ(chat.headers.at("content-type"), "application/json");
  const Json body = chat.json();
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(body["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(body["choices"][0]["message"]["content"], "Once upon a time");  // the end token's text is not in it
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  const auto output = static_cast<int>(Ids("Once upon a time").size());
  EXPECT_EQ(body["usage"]["completion_tokens"], output + 1);
  EXPECT_EQ(body["usage"]["prompt_tokens"], node.decode->calls()[0].prompt_ids_size());
  EXPECT_TRUE(body["usage"]["prompt_tokens_details"].contains("cached_tokens"));

  const Json text = node.Post("/completions/", PromptBody({{"max_tokens", 2}})).json();
  EXPECT_EQ(text["object"], "text_completion");
  EXPECT_EQ(text["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(text["usage"]["completion_tokens"], 2);
  EXPECT_EQ(node.decode->calls()[1].max_new_tokens(), 2);
}

TEST(HttpTest, StreamsEqualAnswersAndUsageComesOnce) {
  TestNode node;
  for (const bool chat : {true, false}) {
    const std::string path = chat ? "/v1/chat/completions" : "/v1/completions";
    const Json extra = {{"stream", true}, {"stream_options", {{"include_usage", true}}}};
    const auto stream = node.Post(path, chat ? ChatBody(extra) : PromptBody(extra));
    EXPECT_EQ(stream.status, 200);
    EXPECT_EQ(stream.headers.at("content-type"), "text/event-stream; charset=utf-8");
    EXPECT_TRUE(stream.done()) << stream.body;
    EXPECT_EQ(stream.text(), "Once upon a time");
    const auto events = stream.events();
    for (size_t i = 0; i + 1 < events.size(); ++i) {
      EXPECT_EQ(events[i]["choices"].size(), 1U);
      EXPECT_TRUE(events[i]["usage"].is_null());
      EXPECT_EQ(events[i]["id"], events[0]["id"]);
    }
    EXPECT_TRUE(events.back()["choices"].empty());
    EXPECT_GT(events.back()["usage"]["completion_tokens"], 1);
    EXPECT_EQ(events[events.size() - 2]["choices"][0]["finish_reason"], "stop");
    if (chat) {
      EXPECT_EQ(events[0]["choices"][0]["delta"]["role"], "assistant");
      EXPECT_FALSE(events[1]["choices"][0]["delta"].contains("role"));
    }
  }
  const auto plain = node.Post("/v1/chat/completions", ChatBody({{"stream", true}, {"stream_options", nullptr}}));
  for (const auto& event : plain.events()) EXPECT_FALSE(event.contains("usage"));
  EXPECT_EQ(node.Post("/v1/chat/completions", ChatBody({{"stream_options", {{"include_usage", true}}}})).status, 200);
}

TEST(HttpTest, StopStringEndsTheWorkersCallToo) {
  TestNode node;
  node.decode->token_delay_us = 2000;
  std::vector<int32_t> letters;
  for (const char c : std::string("abcDEFGHIJxyz")) letters.push_back(Ids(std::string(1, c))[0]);
  node.decode->SetScript(letters);
  for (const bool stream : {false, true}) {
    const auto answer = node.Post("/v1/completions", PromptBody({{"stop", {"HIJ", "EFX"}}, {"stream", stream}}));
    EXPECT_EQ(stream ? answer.text() : answer.json()["choices"][0]["text"].get<std::string>(), "abcDEFG");
    if (!stream) {
      EXPECT_EQ(answer.json()["choices"][0]["finish_reason"], "stop");
    }
    EXPECT_TRUE(node.decode->WaitRunning(0, absl::Seconds(1)));
  }
}

TEST(HttpTest, ChoicesAreStreamsWithTheirOwnSeeds) {
  TestNode node;
  const auto answer = node.Post("/v1/completions", PromptBody({{"prompt", {"a", "b", "c"}}, {"n", 2}, {"seed", 5}, {"max_tokens", 3}})).json();
  ASSERT_EQ(answer["choices"].size(), 6U);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(answer["choices"][static_cast<size_t>(i)]["index"], i);
  const auto calls = node.decode->calls();
  ASSERT_EQ(calls.size(), 6U);
  std::map<std::string, std::set<uint64_t>> seeds;
  std::set<std::string> ids;
  int prompt_tokens = 0;
  for (const auto& call : calls) {
    seeds[std::string(call.prompt_ids().begin(), call.prompt_ids().end())].insert(call.seed());
    ids.insert(call.request_id());
    prompt_tokens += call.prompt_ids_size();
  }
  EXPECT_EQ(ids.size(), 6U);
  EXPECT_EQ(seeds.size(), 3U);
  for (const auto& [prompt, own] : seeds) EXPECT_EQ(own.size(), 2U);
  EXPECT_EQ(answer["usage"]["prompt_tokens"], prompt_tokens / 2);  // each prompt once
  EXPECT_EQ(answer["usage"]["completion_tokens"], 18);
  const auto stream = node.Post("/v1/chat/completions", ChatBody({{"n", 2}, {"stream", true}}));
  std::set<int> finished;
  for (const auto& event : stream.events()) {
    if (!event["choices"][0]["finish_reason"].is_null()) finished.insert(event["choices"][0]["index"].get<int>());
  }
  EXPECT_EQ(finished, (std::set<int>{0, 1}));
  EXPECT_TRUE(stream.done());
}

TEST(HttpTest, LogprobsAndTokenIds) {
  TestNode node;
  const Json chat = node.Post("/v1/chat/completions", ChatBody({{"logprobs", true}, {"top_logprobs", 5}})).json();
  const Json& content = chat["choices"][0]["logprobs"]["content"];
  EXPECT_EQ(content.size(), chat["usage"]["completion_tokens"]);
  for (const Json& entry : content) {
    EXPECT_EQ(entry["top_logprobs"].size(), 5U);
    EXPECT_LE(entry["logprob"], 0.0);
  }
  const Json completion =
      node.Post("/v1/completions", PromptBody({{"logprobs", 2}, {"return_token_ids", true}, {"return_tokens_as_token_ids", true}})).json();
  const Json& choice = completion["choices"][0];
  std::vector<int32_t> expected = Ids("Once upon a time");
  expected.push_back(1);
  EXPECT_EQ(choice["token_ids"], Json(expected));
  EXPECT_EQ(choice["logprobs"]["tokens"][0], absl::StrCat("token_id:", expected[0]));
  EXPECT_EQ(choice["prompt_token_ids"][0], 0);
  const Json offsets = node.Post("/v1/completions", PromptBody({{"logprobs", 0}})).json()["choices"][0];
  const std::string text = offsets["text"];
  for (size_t i = 0; i < offsets["logprobs"]["tokens"].size(); ++i) {
    const std::string token = offsets["logprobs"]["tokens"][i];
    EXPECT_EQ(text.substr(offsets["logprobs"]["text_offset"][i].get<size_t>(), token.size()), token);
  }
}

TEST(HttpTest, OneErrorShapeWithRealStatuses) {
  TestNode node([](NodeConfig* config) { config->max_body_bytes = 2000; });
  struct Case {
    std::string method, path, headers, body;
    int status;
  };
  const std::string json = "Content-Type: application/json\r\n";
  const std::vector<Case> cases = {
      {"POST", "/v1/chat/completions", json, "{", 400},
      {"POST", "/v1/chat/completions", json, "[1]", 400},
      {"POST", "/v1/completions", json, "", 400},
      {"POST", "/v1/completions", json, R"({"model":"other","prompt":"x"})", 404},
      {"POST", "/v1/completions", "Content-Type: text/plain\r\n", R"({"prompt":"x"})", 415},
      {"POST", "/nowhere", json, "{}", 404},
      {"GET", "/v1/chat/completions", "", "", 405},
      {"POST", "/v1/models", json, "{}", 405},
      {"GET", "/v1/models/none", "", "", 404},
      {"POST", "/v1/completions", json, std::string(3000, ' '), 413},
      {"POST", "/v1/completions", json, R"({"prompt":"x","stream":true,"n":0})", 400},
  };
  for (const Case& c : cases) {
    TestClient client(node.address());
    client.Send(absl::StrCat(c.method, " ", c.path, " HTTP/1.1\r\nHost: t\r\n", c.headers, "Content-Length: ", c.body.size(), "\r\n\r\n", c.body));
    const auto answer = client.Read();
    EXPECT_EQ(answer.status, c.status) << c.method << " " << c.path << " " << answer.body;
    EXPECT_EQ(answer.headers.at("content-type"), "application/json");
    const Json error = answer.json()["error"];
    EXPECT_TRUE(error["message"].is_string());
    EXPECT_TRUE(error["type"].is_string());
    EXPECT_TRUE(error.contains("param"));
    EXPECT_TRUE(error["code"].is_string() || error["code"].is_null());
    if (c.status == 405) {
      EXPECT_TRUE(answer.headers.count("allow"));
    }
  }
  TestClient garbage(node.address());
  garbage.Send("HELLO\r\n\r\n");
  EXPECT_EQ(garbage.Read().status, 400);
}

TEST(HttpTest, ContextLimits) {
  TestNode node;
  const int32_t context = DemoModel().context_tokens;
  node.prefill->Kill();
  EXPECT_TRUE(WaitFor([&] { return node.Get("/health").status == 200; }));
  const auto with_prompt = [&](int32_t tokens) {
    return node.Post("/v1/completions", PromptBody({{"prompt", std::vector<int32_t>(static_cast<size_t>(tokens), 50)}, {"ignore_eos", true}}));
  };
  for (const int32_t tokens : {context, context + 1}) {
    const auto answer = with_prompt(tokens);
    EXPECT_EQ(answer.status, 400);
    EXPECT_EQ(answer.json()["error"]["code"], "context_length_exceeded");
    EXPECT_THAT(answer.json()["error"]["message"].get<std::string>(),
                ::testing::AllOf(HasSubstr(absl::StrCat(context)), HasSubstr(absl::StrCat(tokens))));
  }
  const Json last = with_prompt(context - 1).json();
  EXPECT_EQ(last["usage"]["completion_tokens"], 1);
  EXPECT_EQ(last["choices"][0]["finish_reason"], "length");
  const Json all = node.Post("/v1/completions", PromptBody({{"max_tokens", 1'000'000}, {"ignore_eos", true}})).json();
  EXPECT_EQ(all["usage"]["total_tokens"], context);
  EXPECT_EQ(all["choices"][0]["finish_reason"], "length");
}

TEST(HttpTest, ContextIsBoundedByTheRealPool) {
  TestNode node;
  node.store.SetView(FakeStore::ReadyView({1, 2}, {}, "", 320));  // 5 pages
  EXPECT_EQ(node.Get("/health").status, 200);
  EXPECT_EQ(node.Get("/v1/models").json()["data"][0]["max_model_len"], 320);
  const auto with_prompt = [&](int tokens) {
    return node.Post("/v1/completions", PromptBody({{"prompt", std::vector<int32_t>(static_cast<size_t>(tokens), 50)}, {"ignore_eos", true}}));
  };
  const auto refused = with_prompt(320);
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.json()["error"]["code"], "context_length_exceeded");
  EXPECT_THAT(refused.json()["error"]["message"].get<std::string>(),
              ::testing::AllOf(HasSubstr("KV pool"), HasSubstr("320"), HasSubstr("319"), HasSubstr(absl::StrCat(DemoModel().model_context_tokens))));
  EXPECT_EQ(with_prompt(300).json()["usage"]["completion_tokens"], 20);
  node.store.SetView(FakeStore::ReadyView({3, 4}, {}, "", 1'000'000));  // the same weights, another pool
  EXPECT_EQ(node.Get("/health").status, 200);
  EXPECT_EQ(node.Get("/v1/models").json()["data"][0]["max_model_len"], DemoModel().model_context_tokens);
}

TEST(HttpTest, KeysAndOrigins) {
  const std::string path = ::testing::TempDir() + "/hearth_http_keys";
  std::ofstream(path) << "k1\nk2\n";
  TestNode node([&](NodeConfig* config) { config->api_key_file = path; });
  EXPECT_EQ(node.Get("/health").status, 200);
  TestClient client(node.address());
  client.Post("/v1/completions", PromptBody().dump(), "Content-Type: application/json\r\nOrigin: http://localhost:3000\r\n");
  const auto refused = client.Read();
  EXPECT_EQ(refused.status, 401);
  EXPECT_THAT(refused.headers.at("www-authenticate"), HasSubstr("Bearer"));
  EXPECT_EQ(refused.headers.at("access-control-allow-origin"), "http://localhost:3000");
  client.Get("/v1/chat/completions",
             "Origin: http://localhost:3000\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: "
             "authorization,content-type,x-stainless-os\r\n",
             "OPTIONS");
  const auto preflight = client.Read();
  EXPECT_EQ(preflight.status, 204);
  EXPECT_EQ(preflight.headers.at("access-control-allow-headers"), "authorization,content-type,x-stainless-os");
  EXPECT_THAT(preflight.headers.at("access-control-allow-methods"), HasSubstr("POST"));
  client.Post("/v1/completions", PromptBody({{"stream", true}}).dump(),
              "Content-Type: application/json\r\nauthorization: bearer  k2\r\nOrigin: http://localhost:3000\r\n");
  const auto stream = client.Read();
  EXPECT_EQ(stream.status, 200);
  EXPECT_EQ(stream.headers.at("access-control-allow-origin"), "http://localhost:3000");
  client.Get("/v1/models", "Authorization: Bearer k1\r\nOrigin: http://evil.org\r\n");
  EXPECT_EQ(client.Read().headers.count("access-control-allow-origin"), 0U);
}

TEST(HttpTest, OneConnectionServesEveryKindOfAnswer) {
  TestNode node([](NodeConfig* config) { config->max_body_bytes = 5000; });
  TestClient client(node.address());
  client.Post("/v1/completions", PromptBody().dump());
  EXPECT_EQ(client.Read().status, 200);
  client.Post("/v1/completions", "{");
  EXPECT_EQ(client.Read().status, 400);
  client.Get("/nowhere");
  EXPECT_EQ(client.Read().status, 404);
  client.Post("/v1/completions", PromptBody({{"stream", true}}).dump());
  const auto stream = client.Read();
  EXPECT_TRUE(stream.done());
  EXPECT_EQ(stream.headers.at("connection"), "keep-alive");
  EXPECT_EQ(stream.headers.at("keep-alive"), "timeout=120");
  client.Get("/v1/models", "", "HEAD");
  const auto head = client.Read(true);
  EXPECT_EQ(head.status, 200);
  EXPECT_NE(head.headers.at("content-length"), "0");
  client.Get("/v1//models/?x=1");
  EXPECT_EQ(client.Read().json()["data"][0]["id"], "fable-moe");
  client.Get("/v1/models/fable-moe");
  EXPECT_EQ(client.Read().json()["object"], "model");
  // Two at once.
  client.Get("/livez");
  client.Get("/health");
  EXPECT_EQ(client.Read().json()["status"], "alive");
  EXPECT_EQ(client.Read().json()["status"], "ok");
  // Too large is answered, and announces the end.
  client.Post("/v1/completions", std::string(100'000, ' '));
  const auto large = client.Read();
  EXPECT_EQ(large.status, 413);
  EXPECT_EQ(large.headers.at("connection"), "close");
  EXPECT_TRUE(client.ClosedByServer(absl::Seconds(2)));
}

TEST(HttpTest, ExpectContinueAndHttp10) {
  TestNode node;
  TestClient client(node.address());
  const std::string body = PromptBody().dump();
  client.Send(absl::StrCat("POST /v1/completions HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: ", body.size(), "\r\n\r\n"));
  EXPECT_THAT(client.ReadUntil("\r\n\r\n"), HasSubstr("100 Continue"));
  client.Send(body);
  EXPECT_EQ(client.Read().status, 200);
  TestClient old(node.address());
  const std::string stream = PromptBody({{"stream", true}}).dump();
  old.Send(absl::StrCat("POST /v1/completions HTTP/1.0\r\nContent-Length: ", stream.size(), "\r\n\r\n", stream));
  const auto answer = old.Read();
  EXPECT_EQ(answer.headers.count("transfer-encoding"), 0U);
  EXPECT_TRUE(answer.done());
}

TEST(HttpTest, EveryPipelinedRequestIsAnsweredThoughTheClientHasClosedItsSide) {
  TestNode node;
  TestClient client(node.address());
  const std::string body = PromptBody({}).dump();
  std::string all;
  for (int i = 0; i < 4; ++i)
    all += absl::StrCat("POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: ", body.size(), "\r\n\r\n", body);
  client.Send(all + "POST /v1/completions HTTP/1.1\r\nContent-Le");  // and a piece that never becomes one
  client.HalfClose();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(client.Read().status, 200) << i;
  EXPECT_TRUE(client.ClosedByServer(absl::Seconds(2)));
  // Answers that are ready at once: the end of the client's side is seen between two of them.
  for (int round = 0; round < 20; ++round) {
    TestClient quick(node.address());
    std::string gets;
    for (int i = 0; i < 30; ++i) gets += "GET /livez HTTP/1.1\r\n\r\n";
    quick.Send(gets);
    quick.HalfClose();
    for (int i = 0; i < 30; ++i) ASSERT_EQ(quick.Read().status, 200) << round << " " << i;
  }
}

TEST(HttpTest, ForeignTransferCodingsEndTheConnection) {
  TestNode node;
  TestClient client(node.address());
  client.Send("POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n");
  EXPECT_EQ(client.Read().status, 501);
  EXPECT_TRUE(client.ClosedByServer(absl::Seconds(2))) << "the bytes behind it are no request";
}

TEST(HttpTest, CommentsKeepASilentStreamAlive) {
  TestNode node;
  node.decode->hold_at = 0;
  TestClient client(node.address());
  client.Post("/v1/chat/completions", ChatBody({{"stream", true}}).dump());
  EXPECT_THAT(client.ReadUntil(": still working\n\n"), HasSubstr("HTTP/1.1 200"));
  client.ReadUntil(": still working\n\n");
  node.decode->Release();
  EXPECT_THAT(client.ReadUntil("[DONE]"), HasSubstr("Once"));
}

// The worker hears of a client that is gone, however it went, stream or not, queued or running; a half-close is no going.
TEST(HttpTest, ClientsThatGoAreCancelled) {
  TestNode node;
  node.decode->hold_at = 1;
  for (const bool stream : {true, false}) {
    for (const std::string how : {"fin", "rst"}) {
      TestClient client(node.address());
      client.Post("/v1/completions", PromptBody({{"stream", stream}}).dump());
      ASSERT_TRUE(node.decode->WaitRunning(1, absl::Seconds(2)));
      const absl::Time left = absl::Now();
      if (how == "rst") {
        client.Reset();
      } else {
        client.Close();
      }
      EXPECT_TRUE(node.decode->WaitRunning(0, absl::Seconds(2))) << how << " stream " << stream;
      EXPECT_LT(absl::Now() - left, absl::Milliseconds(300)) << how << " stream " << stream;
    }
  }
  EXPECT_EQ(node.Metric("hearth_running"), 0);
  EXPECT_EQ(node.Metric("hearth_requests_total{outcome=\"cancelled\"}"), 4);
  EXPECT_TRUE(node.store.freed().empty());  // the worker frees what it was told to end
}

TEST(HttpTest, HalfCloseIsNoCancel) {
  TestNode node;
  node.decode->hold_at = 1;
  for (const bool stream : {true, false}) {
    node.decode->hold_at = 1;
    TestClient client(node.address());
    client.Post("/v1/completions", PromptBody({{"stream", stream}}).dump());
    ASSERT_TRUE(node.decode->WaitRunning(1, absl::Seconds(2)));
    client.HalfClose();
    absl::SleepFor(absl::Milliseconds(100));
    EXPECT_EQ(node.decode->running(), 1);
    node.decode->Release();
    const auto answer = client.Read();
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(stream ? answer.text() : answer.json()["choices"][0]["text"].get<std::string>(), "Once upon a time");
  }
}

TEST(HttpTest, FullQueueIs429AndQueuedClientsCanLeave) {
  TestNode node([](NodeConfig* config) { config->max_queue = 2; });
  node.decode->max_batch = 1;
  ASSERT_TRUE(WaitFor([&] { return node.Get("/health").status == 200; }));
  absl::SleepFor(absl::Milliseconds(150));  // the link learns of max_batch with its next question
  node.decode->hold_at = 1;
  TestClient running(node.address());
  running.Post("/v1/completions", PromptBody({{"stream", true}}).dump());
  ASSERT_TRUE(node.decode->WaitRunning(1, absl::Seconds(2)));
  TestClient first(node.address()), second(node.address());
  first.Post("/v1/completions", PromptBody({{"stream", true}}).dump());
  second.Post("/v1/completions", PromptBody().dump());
  ASSERT_TRUE(WaitFor([&] { return node.Metric("hearth_streams{state=\"queued\"}") == 2; }));
  const auto refused = node.Post("/v1/completions", PromptBody());
  EXPECT_EQ(refused.status, 429);
  EXPECT_TRUE(refused.headers.count("retry-after"));
  first.Close();
  ASSERT_TRUE(WaitFor([&] { return node.Metric("hearth_streams{state=\"queued\"}") == 1; }));
  node.decode->Release();
  EXPECT_EQ(second.Read().status, 200);
  EXPECT_EQ(node.decode->calls().size(), 2U);  // the one that left was never sent
}

TEST(HttpTest, TokenizeDetokenizeApplyTemplate) {
  TestNode node;
  const Json tokens = node.Post("/tokenize", {{"content", "Once 😸"}}).json()["tokens"];
  EXPECT_EQ(tokens, Json(Ids("Once 😸")));
  EXPECT_EQ(node.Post("/detokenize", {{"tokens", tokens}}).json()["content"], "Once 😸");
  EXPECT_EQ(node.Post("/tokenize", {{"content", "x"}, {"add_special", true}}).json()["tokens"][0], 0);
  const Json pieces = node.Post("/tokenize", {{"content", "é"}, {"with_pieces", true}}).json()["tokens"];
  EXPECT_TRUE(pieces[0]["piece"].is_array() || pieces[0]["piece"] == "é");
  EXPECT_EQ(node.Post("/tokenize", {{"content", "<｜User｜>"}, {"parse_special", false}}).json()["tokens"], Json(Ids("<｜User｜>")));
  EXPECT_EQ(node.Post("/tokenize", {{"content", "<｜User｜>"}}).json()["tokens"], Json({4094}));
  EXPECT_EQ(node.Post("/apply-template", {{"messages", {{{"role", "user"}, {"content", "hi"}}}}}).json()["prompt"],
            "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>");
  EXPECT_EQ(node.Post("/tokenize", Json::object()).json()["error"]["param"], "content");
}

TEST(HttpTest, LocalhostIsBothFamilies) {
  TestNode node([](NodeConfig* config) { config->http_listen = {"localhost:0"}; });
  for (const std::string& address : node.router->http_addresses()) {
    TestClient client(address);
    ASSERT_TRUE(client.open()) << address;
    client.Get("/livez");
    EXPECT_EQ(client.Read().status, 200);
  }
  // A second router at the same port says so.
  NodeConfig other = node.config;
  other.node_name = "other";
  other.http_listen = {node.address()};
  FakeStore store;
  const auto refused = Router::Start(other, Forward(&store));
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("another process listens there"));
}

// Out of descriptors on both families at once: both listeners accept again when there are some.
TEST(HttpTest, EveryListenerRecoversFromLackOfDescriptors) {
  TestNode node([](NodeConfig* config) { config->http_listen = {"localhost:0"}; });
  const std::vector<std::string>& addresses = node.router->http_addresses();
  if (addresses.size() < 2) GTEST_SKIP() << "this machine has one address family";
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  // Connecting needs descriptors too: its sockets are made first. What is open stays open under the lower limit.
  std::vector<int> sockets;
  std::vector<sockaddr_storage> targets;
  std::vector<socklen_t> lengths;
  for (const std::string& address : addresses) {
    const size_t colon = address.rfind(':');
    const bool v6 = address[0] == '[';
    sockets.push_back(socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_storage target{};
    const auto port = htons(static_cast<uint16_t>(std::stoi(address.substr(colon + 1))));
    if (v6) {
      auto* in6 = reinterpret_cast<sockaddr_in6*>(&target);
      *in6 = {.sin6_family = AF_INET6, .sin6_port = port, .sin6_flowinfo = 0, .sin6_addr = in6addr_loopback, .sin6_scope_id = 0};
    } else {
      auto* in = reinterpret_cast<sockaddr_in*>(&target);
      in->sin_family = AF_INET;
      in->sin_port = port;
      in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    }
    targets.push_back(target);
    lengths.push_back(v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
  }
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  for (size_t i = 0; i < sockets.size(); ++i) EXPECT_EQ(connect(sockets[i], reinterpret_cast<const sockaddr*>(&targets[i]), lengths[i]), 0);
  absl::SleepFor(absl::Milliseconds(150));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  for (const int fd : sockets) close(fd);
  for (const std::string& address : addresses) {
    TestClient client(address);
    client.Get("/livez");
    EXPECT_EQ(client.Read().status, 200) << address;
  }
}

// The door alone: a slow upload passes, one that drips for ever does not.
TEST(HttpServerTest, ARequestHasADeadlineThatGrowsWithWhatHasCome) {
  EventLoop loop(1);
  HttpServerOptions options;
  options.request_read = absl::Milliseconds(300);
  options.request_read_bytes = 1000;  // 1000 bytes earn a second
  options.render_error = [](const absl::Status& status) { return HttpReply{408, "text/plain", std::string(status.message()), {}}; };
  auto server = HttpServer::Start(&loop, {"127.0.0.1:0"}, options, [](HttpRequest request, std::shared_ptr<HttpResponder> responder) {
    responder->Reply({200, "text/plain", absl::StrCat(request.body.size()), {}});
  });
  ASSERT_TRUE(server.ok()) << server.status();
  std::thread thread([&] { loop.Run(); });
  const std::string address = (*server)->addresses().front();
  const auto upload = [&](size_t total, size_t part, absl::Duration every, absl::Duration limit) {
    TestClient client(address);
    client.Send(absl::StrCat("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: ", total, "\r\n\r\n"));
    const absl::Time end = absl::Now() + limit;
    for (size_t sent = 0; sent < total && absl::Now() < end; sent += part) {
      client.Send(std::string(std::min(part, total - sent), 'x'));
      absl::SleepFor(every);
    }
    return client.Read();
  };
  const absl::Time start = absl::Now();
  const auto slow = upload(2000, 200, absl::Milliseconds(100), absl::Seconds(9));  // 1 s in all, never silent for long
  EXPECT_EQ(slow.status, 200);
  EXPECT_EQ(slow.body, "2000");
  EXPECT_GT(absl::Now() - start, absl::Milliseconds(900));
  EXPECT_EQ(upload(2000, 1, absl::Milliseconds(20), absl::Seconds(2)).status, 408);  // never silent for long either
  loop.Post([&] { server->reset(); });
  loop.DrainPool();
  loop.Stop();
  thread.join();
}

// A stream's comment may fall due right before the answer's end: its handler is in the queue then, and must not end the connection, over which the last
// events are still on their way.
TEST(HttpServerTest, ATimerThatFiredBeforeTheAnswerEndedCutsNothingOff) {
  constexpr size_t kBytes = 4 << 20;  // more than a socket's buffers hold
  EventLoop loop(1);
  HttpServerOptions options;
  options.comment_every = absl::Milliseconds(10);
  auto server = HttpServer::Start(&loop, {"127.0.0.1:0"}, options, [&loop](HttpRequest, std::shared_ptr<HttpResponder> responder) {
    responder->StartEvents({});
    loop.Post([&loop, responder] {
      absl::SleepFor(absl::Milliseconds(15));
      loop.Post([responder] {  // the loop looks at its timers before it comes here
        responder->SendEvent(std::string(kBytes, 'x'));
        responder->EndEvents();
      });
    });
  });
  ASSERT_TRUE(server.ok()) << server.status();
  std::thread thread([&] { loop.Run(); });
  for (int i = 0; i < 5; ++i) {
    TestClient client((*server)->addresses().front());
    client.Get("/");
    EXPECT_GT(client.Read().body.size(), kBytes) << i;
  }
  loop.Post([&] { server->reset(); });
  loop.DrainPool();
  loop.Stop();
  thread.join();
}

TEST(HttpTest, SixtyFourStreamsAtOnce) {
  TestNode node;
  node.decode->max_batch = 16;
  node.decode->token_delay_us = 500;
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < 64; ++i) {
    threads.emplace_back([&, i] {
      const auto answer = node.Post("/v1/chat/completions", ChatBody({{"stream", i % 2 == 0}}));
      const bool ok = i % 2 == 0 ? answer.done() && answer.text() == "Once upon a time"
                                 : answer.status == 200 && answer.json()["choices"][0]["message"]["content"] == "Once upon a time";
      if (ok) ++good;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 64);
  EXPECT_EQ(node.Metric("hearth_requests_total{outcome=\"done\"}"), 64);
  EXPECT_EQ(node.Metric("hearth_ttft_seconds_count"), 64);
}

}  // namespace
}  // namespace hearth::router::testing
