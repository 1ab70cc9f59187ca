// The router's small parts, each by itself. Room: services/router.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "services/router/access.h"
#include "services/router/chat.h"
#include "services/router/choice_text.h"
#include "services/router/fair_queue.h"
#include "services/router/http/http_message.h"
#include "services/router/http/listen_address.h"
#include "services/router/metrics.h"
#include "services/router/openai/reasoning.h"
#include "services/router/openai/render.h"
#include "services/router/testing/fakes.h"
#include "services/router/utf8.h"

namespace hearth::router {
namespace {

using testing::DemoModel;
using testing::Ids;

TEST(StreamStateTest, OnlyTheTablesMovesAreAllowed) {
  EXPECT_TRUE(MayMove(StreamState::kQueued, StreamState::kPrefilling));
  EXPECT_TRUE(MayMove(StreamState::kPrefilling, StreamState::kQueued));
  EXPECT_TRUE(MayMove(StreamState::kHandoff, StreamState::kDecoding));
  EXPECT_TRUE(MayMove(StreamState::kDecoding, StreamState::kQueued));
  EXPECT_FALSE(MayMove(StreamState::kQueued, StreamState::kDone));
  EXPECT_FALSE(MayMove(StreamState::kPrefilling, StreamState::kDecoding));
  for (const auto end : {StreamState::kDone, StreamState::kCancelled, StreamState::kFailed}) {
    for (int to = 0; to < kNumStreamStates; ++to) EXPECT_FALSE(MayMove(end, static_cast<StreamState>(to)));
  }
}

TEST(FairQueueTest, KeysTakeTurnsAndTheHeadGoesFirst) {
  FairQueue<std::string> queue;
  for (const char* item : {"a1", "a2", "a3"}) queue.PushBack(0, item);
  queue.PushBack(1, "b1");
  queue.PushBack(2, "c1");
  queue.PushHead("back");
  std::vector<std::string> order;
  EXPECT_TRUE(queue.Remove("a2"));
  EXPECT_FALSE(queue.Remove("a2"));
  while (!queue.empty()) order.push_back(queue.Pop());
  EXPECT_THAT(order, ::testing::ElementsAre("back", "a1", "b1", "c1", "a3"));
}

std::string Streamed(const std::vector<int32_t>& prompt, const std::vector<int32_t>& output, const std::vector<std::string>& stops) {
  ChoiceText text(DemoModel().tokenizer.get(), prompt, stops, true);
  std::string out;
  for (const int32_t id : output) out += text.Push({id, 0, {}, false}).text;
  if (!text.stopped()) out += text.Finish().text;
  return out;
}

TEST(ChoiceTextTest, StreamsWholeCharactersAndSpaces) {
  const std::string text = " Hello 😸 é 中, done";
  EXPECT_EQ(Streamed({0}, Ids(text), {}), text);
}

TEST(ChoiceTextTest, StopStringsAcrossTokens) {
  const std::vector<int32_t> output = [] {
    std::vector<int32_t> ids;
    for (const char c : std::string("abcDEFGHIJxyz")) ids.push_back(Ids(std::string(1, c))[0]);
    return ids;
  }();
  EXPECT_EQ(Streamed({0}, output, {"DEFGHIJ"}), "abc");
  EXPECT_EQ(Streamed({0}, output, {"HI"}), "abcDEFG");
  EXPECT_EQ(Streamed({0}, output, {"EFGH", "DEF"}), "abc");
  EXPECT_EQ(Streamed({0}, output, {"DEFX"}), "abcDEFGHIJxyz");
  EXPECT_EQ(Streamed({0}, output, {"xyz!"}), "abcDEFGHIJxyz");
  EXPECT_EQ(Streamed({0}, output, {"abcDEFGHIJxyz"}), "");
  EXPECT_EQ(Streamed(Ids("DE"), output, {"DEabc"}), "abcDEFGHIJxyz");  // the prompt does not count
}

TEST(ChoiceTextTest, OutputThatCompletesThePromptsCharacterShowsIt) {
  std::vector<int32_t> cat = Ids("😸");
  ASSERT_GT(cat.size(), 1U);
  const int32_t last = cat.back();
  cat.pop_back();
  cat.insert(cat.begin(), 0);
  EXPECT_EQ(Streamed(cat, {last}, {}), "😸");
  EXPECT_EQ(Streamed(cat, Ids("x"), {}), "x");
}

TEST(ChoiceTextTest, EndTokensAndSpecialTokensAreSilent) {
  ChoiceText text(DemoModel().tokenizer.get(), {0}, {}, true);
  EXPECT_EQ(text.Push({1, 0, {}, true}).text, "");
  EXPECT_EQ(text.Push({2, 0, {}, false}).text, "");
  ChoiceText shown(DemoModel().tokenizer.get(), {0}, {}, false);
  EXPECT_EQ(shown.Push({2, 0, {}, false}).text, "<｜▁pad▁｜>");
}

TEST(Utf8Test, PartsAndReplacement) {
  EXPECT_EQ(UnfinishedBytes("ab\xF0\x9F\x98"), 3U);
  EXPECT_EQ(UnfinishedBytes("ab\xC3"), 1U);
  EXPECT_EQ(UnfinishedBytes("é"), 0U);
  EXPECT_EQ(UnfinishedBytes("\x80\x80"), 0U);
  EXPECT_EQ(ReplaceInvalidUtf8("a\xF0\x9F\x98z\xFF"), "a\xEF\xBF\xBDz\xEF\xBF\xBD");
  EXPECT_FALSE(IsValidUtf8("\xED\xA0\x80"));  // a surrogate
  EXPECT_FALSE(IsValidUtf8("\xC0\x80"));
  EXPECT_TRUE(IsValidUtf8("中é😸"));
}

// The same result however the text is cut.
void ExpectSplit(const std::string& text, Thought before, const std::string& thought, const std::string& answer) {
  for (size_t step = 1; step <= text.size(); ++step) {
    ReasoningSplitter splitter(before);
    std::string got_thought, got_answer;
    const auto take = [&](const ReasoningPart& part) {
      got_thought += part.thought;
      got_answer += part.answer;
    };
    for (size_t at = 0; at < text.size(); at += step) take(splitter.Push(text.substr(at, step)));
    take(splitter.Finish());
    EXPECT_EQ(got_thought, thought) << "step " << step;
    EXPECT_EQ(got_answer, answer) << "step " << step;
  }
}

TEST(ReasoningTest, ThoughtAndAnswer) {
  ExpectSplit("abc</think>def", Thought::kOpened, "abc", "def");
  ExpectSplit("\nabc\n</think>\n\ndef\n", Thought::kOpened, "abc", "def\n");
  ExpectSplit("abc", Thought::kOpened, "abc", "");
  ExpectSplit("abc</thi", Thought::kOpened, "abc</thi", "");
  ExpectSplit("<think>\nabc\n</think>\n\ndef", Thought::kNone, "abc", "def");
  ExpectSplit("abc</think>def", Thought::kNone, "", "abc</think>def");
  ExpectSplit("<thinking", Thought::kNone, "", "<thinking");
  ExpectSplit("say <think>x", Thought::kNone, "", "say <think>x");
  ExpectSplit("  hello", Thought::kNone, "", "  hello");
  ExpectSplit("\n\nabc\n</think>\ndef", Thought::kMidway, "\n\nabc", "def");
  EXPECT_EQ(ThoughtAtEndOf("\n<think>\n"), Thought::kOpened);
  EXPECT_EQ(ThoughtAtEndOf("The tag <think> is"), Thought::kNone);
  EXPECT_EQ(ThoughtAtEndOf("<think>\nfirst,"), Thought::kMidway);
  EXPECT_EQ(ThoughtAtEndOf("<think>x</think>y"), Thought::kNone);
  EXPECT_EQ(ThoughtAtEndOf("<think>x</think><think>"), Thought::kNone);
  EXPECT_EQ(ThoughtAtEndOf("think"), Thought::kNone);
}

TEST(ChatTest, AThoughtThatIsUnderWayGoesOn) {
  ModelInfo model = DemoModel();
  const auto thought_after = [&](const std::string& source, const std::string& user, const std::string& assistant, bool continued) {
    model.chat_template = *ChatTemplate::Parse(source);
    Json messages = {{{"role", "user"}, {"content", user}}};
    if (!assistant.empty()) messages.push_back({{"role", "assistant"}, {"content", assistant}});
    return RenderChat(model, messages, {.continue_final_message = continued})->thought;
  };
  const std::string plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
  const std::string thinks = plain + "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}";
  EXPECT_EQ(thought_after(thinks, "hi", "", false), Thought::kOpened);
  EXPECT_EQ(thought_after(plain, "hi", "", false), Thought::kNone);
  EXPECT_EQ(thought_after(plain, "what does <think> mean?", "", false), Thought::kNone);
  EXPECT_EQ(thought_after("{{ messages[0].content }}", "what does it mean: <think>", "", false), Thought::kNone);
  EXPECT_EQ(thought_after(plain, "hi", "<think>so", true), Thought::kMidway);
  EXPECT_EQ(thought_after(plain, "hi", "<think>", true), Thought::kOpened);
  EXPECT_EQ(thought_after(plain, "hi", "<think>so</think>well", true), Thought::kNone);
  EXPECT_EQ(thought_after(plain, "<think>", "well", true), Thought::kNone);
  EXPECT_EQ(thought_after(plain, "hi", "The tag <think> is used", true), Thought::kNone);
  EXPECT_EQ(thought_after("{{ messages[1].content.split('>')[-1] }}", "hi", "<think>so", true), Thought::kNone);
}

TEST(AccessTest, BearerInAllItsSpellings) {
  const std::string path = ::testing::TempDir() + "/hearth_keys";
  std::ofstream(path) << "# keys\n\nfirst-key\r\nsecond-key   \n";
  const auto keys = ApiKeys::Load(path);
  ASSERT_TRUE(keys.ok()) << keys.status();
  EXPECT_EQ(*keys->Check("Bearer first-key"), 0);
  EXPECT_EQ(*keys->Check("bearer second-key"), 1);
  EXPECT_EQ(*keys->Check("BEARER   second-key "), 1);
  for (const char* bad : {"", "Bearer", "Bearer ", "Basic first-key", "first-key", "Bearer first-ke", "Bearer first-keyy", "Bearer # keys"}) {
    const auto result = keys->Check(bad);
    EXPECT_TRUE(absl::IsUnauthenticated(result.status())) << bad;
    EXPECT_EQ(std::string(result.status().message()).find("first-ke"), std::string::npos);
  }
  EXPECT_EQ(*ApiKeys().Check("Basic whatever"), 0);  // no key is asked for
  std::ofstream(path) << "# nothing\n";
  EXPECT_FALSE(ApiKeys::Load(path).ok());
  EXPECT_FALSE(ApiKeys::Load(path + ".absent").ok());
}

TEST(AccessTest, Origins) {
  const CorsOrigins local({"http://localhost", "http://[::1]"});
  EXPECT_TRUE(local.Allows("http://localhost"));
  EXPECT_TRUE(local.Allows("http://localhost:3000"));
  EXPECT_TRUE(local.Allows("http://[::1]:3000"));
  EXPECT_FALSE(local.Allows("http://localhost.evil.org"));
  EXPECT_FALSE(local.Allows("http://localhost:3000.evil.org"));
  EXPECT_FALSE(local.Allows("https://localhost"));
  EXPECT_FALSE(local.Allows(""));
  EXPECT_TRUE(CorsOrigins({"*"}).Allows("https://anything.org"));
}

TEST(PathTest, NormalForms) {
  EXPECT_EQ(NormalPath("/v1//models/?x=1"), "/v1/models");
  EXPECT_EQ(NormalPath("/"), "/");
  EXPECT_EQ(NormalPath("/v1/models/org%2Fname"), "/v1/models/org/name");
  EXPECT_EQ(NormalPath("/a%zz%"), "/a%zz%");
  EXPECT_EQ(NormalPath("http://host:1/v1/models"), "/v1/models");
}

TEST(ListenTest, Addresses) {
  EXPECT_EQ(ParseListen("[::1]:81", 1)->host, "::1");
  EXPECT_EQ(ParseListen("[::1]:81", 1)->port, 81);
  EXPECT_EQ(ParseListen("::", 8080)->host, "::");
  EXPECT_EQ(ParseListen("::", 8080)->port, 8080);
  EXPECT_EQ(ParseListen("host", 8080)->port, 8080);
  EXPECT_EQ(ParseListen("0.0.0.0:0", 1)->port, 0);
  for (const char* bad : {"",
                          ":80",
                          "h:",
                          "h:x",
                          "h:65536",
                          "[::1",
                          "[::1]x",
                          "[::1]:",
                          "x:y:z",
                          "[::zz]:80",
                          "[localhost]:80",
                          "999.1.1.1:80",
                          "1.2.3.4.5:80",
                          "*:80",
                          "lo cal:80",
                          " localhost:80",
                          "localhost:+80",
                          "localhost: 80",
                          "a\nb:80",
                          "http://localhost:80"})
    EXPECT_FALSE(ParseListen(bad, 1).ok()) << bad;
  const auto local = ResolveListen({"localhost", 0});
  ASSERT_TRUE(local.ok());
  EXPECT_EQ((*local)[0].ip, "127.0.0.1");
  EXPECT_FALSE(CheckBindable({"192.0.2.77", false}, 4242).ok());  // a documentation address: never this machine's
}

TEST(RenderTest, LogprobsAreFiniteAndBytesExact) {
  AnswerMeta meta{"id", "m", 1, DemoModel().tokenizer, {}, 2};
  const int32_t half = Ids("😸")[0];
  ChoicePart part;
  part.tokens = {{half, -std::numeric_limits<float>::infinity(), {{half, -0.5F}, {7, -1.5F}, {8, -2.5F}}, false}, {1, -0.1F, {{1, -0.1F}}, true}};
  part.text_offsets = {0, 0};
  part.finish = FinishReason::kStop;
  meta.options.chat = true;
  const Json chat = Json::parse(RenderAnswer(meta, {part}, {}))["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(chat.size(), 2U);
  EXPECT_EQ(chat[0]["logprob"], -9999.0);
  EXPECT_EQ(chat[0]["bytes"].size(), DemoModel().tokenizer->TokenBytes(half).size());
  EXPECT_EQ(chat[0]["bytes"][0], static_cast<unsigned char>(DemoModel().tokenizer->TokenBytes(half)[0]));
  EXPECT_EQ(chat[0]["top_logprobs"].size(), 2U);
  EXPECT_EQ(chat[1]["token"], "");
  meta.options.chat = false;
  meta.options.return_tokens_as_token_ids = true;
  meta.options.return_token_ids = true;
  const Json choice = Json::parse(RenderAnswer(meta, {part}, {}))["choices"][0];
  EXPECT_EQ(choice["logprobs"]["tokens"][0], "token_id:" + std::to_string(half));
  EXPECT_EQ(choice["logprobs"]["tokens"][1], "token_id:1");
  EXPECT_TRUE(choice["logprobs"]["top_logprobs"][0].contains("token_id:7"));
  EXPECT_EQ(choice["token_ids"], Json({half, 1}));
}

TEST(MetricsTest, WorkersOrdersOfAStepAreGauges) {
  v1::WorkerStatus status;
  auto& order = *status.add_step_orders();
  order.set_streams(4);
  order.set_chosen("alternate");
  order.set_joint_ms(25);
  order.set_alternate_ms(20);
  Metrics metrics;
  metrics.OnWorkerStatus("decode.0", status);
  const std::string text = metrics.Exposition();
  const auto line = [](const char* family, const char* of, const char* value) {
    return std::string(family) + "{order=\"" + of + "\",streams=\"4\",worker=\"decode.0\"} " + value + "\n";
  };
  EXPECT_NE(text.find(line("hearth_step_order_seconds", "joint", "0.025")), std::string::npos) << text;
  EXPECT_EQ(text.find(line("hearth_step_order_seconds", "plain", "0")), std::string::npos) << "not measured";
  EXPECT_NE(text.find(line("hearth_step_order_chosen", "alternate", "1")), std::string::npos) << text;
  EXPECT_NE(text.find(line("hearth_step_order_chosen", "joint", "0")), std::string::npos) << text;
}

TEST(MetricsTest, WhatAWorkerFoundOutIsGauges) {
  v1::WorkerStatus status;
  v1::WorkerStatus::Memory& memory = *status.mutable_memory();
  memory.set_prefetch("on (34.1 against 28.0 GB/s)");
  memory.set_prefetch_on(true);
  memory.set_prefetch_on_gb_per_s(34.5);
  memory.set_prefetch_off_gb_per_s(28);
  memory.set_pages_looked_at(100);
  memory.set_pages_huge(92);
  memory.set_pages_wrong_node(3);
  Metrics metrics;
  metrics.OnWorkerStatus("decode.0", status);
  const std::string text = metrics.Exposition();
  for (const char* line :
       {"hearth_prefetch_on{worker=\"decode.0\"} 1\n", "hearth_prefetch_bytes_per_second{prefetch=\"on\",worker=\"decode.0\"} 34500000000\n",
        "hearth_image_pages_looked_at{page=\"2MB\",worker=\"decode.0\"} 92\n", "hearth_image_pages_looked_at{page=\"4KB\",worker=\"decode.0\"} 8\n",
        "hearth_image_pages_wrong_node{worker=\"decode.0\"} 3\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  }
}

TEST(MetricsTest, PercentilesByNearestRank) {
  RecentValues values;
  EXPECT_EQ(values.Percentile(0.5), 0);
  for (int i = 1; i <= 100; ++i) values.Add(i);
  EXPECT_EQ(values.Percentile(0.5), 50);
  EXPECT_EQ(values.Percentile(0.99), 99);
  EXPECT_EQ(values.count(), 100U);
}

}  // namespace
}  // namespace hearth::router
