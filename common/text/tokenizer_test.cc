// Tokenizers against the ids of the reference: the demo model's always, the public vocabularies where they are at hand.
#include "common/text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/text/regex.h"
#include "common/text/text_stream.h"
#include "common/text/unicode_form.h"
#include "common/text/utf8.h"

namespace hearth {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;
namespace fs = std::filesystem;

constexpr EncodeOptions kAsReference{.add_special_tokens = false, .parse_special = true};
constexpr EncodeOptions kUserText{.add_special_tokens = false, .parse_special = false};

std::string SourceDir() {
  const char* dir = std::getenv("HEARTH_SOURCE_DIR");
  return dir != nullptr ? dir : ".";
}
std::string SharedDir() {
  const char* dir = std::getenv("HEARTH_SHARED_DIR");
  return dir != nullptr ? dir : SourceDir() + "/../shared";
}
std::string DemoModelDir() { return SourceDir() + "/deploy/models/fable-moe"; }

json ReadJson(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return json::parse(file);
}

std::unique_ptr<Tokenizer> MustLoad(const std::string& dir) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(dir);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

std::vector<int32_t> MustEncode(const Tokenizer& tokenizer, std::string_view text, const EncodeOptions& options = kAsReference) {
  absl::StatusOr<std::vector<int32_t>> ids = tokenizer.Encode(text, options);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? *ids : std::vector<int32_t>{};
}

std::string Streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  TextStream stream({}, tokenizer.decode_style());
  std::string text;
  for (const int32_t id : ids) text += stream.Push(tokenizer.TokenBytes(id));
  return text + stream.Finish();
}

// A directory with the demo model's tokenizer files, changed by the test.
class ChangedTokenizer {
 public:
  ChangedTokenizer() : dir_(fs::temp_directory_path() / ("hearth_tokenizer_test_" + std::to_string(getpid()) + "_" + std::to_string(counter_++))) {
    fs::create_directories(dir_);
    tokenizer = ReadJson(DemoModelDir() + "/tokenizer.json");
    config = ReadJson(DemoModelDir() + "/tokenizer_config.json");
  }
  ~ChangedTokenizer() { fs::remove_all(dir_); }

  absl::StatusOr<std::unique_ptr<Tokenizer>> Load() {
    std::ofstream(dir_ / "tokenizer.json") << tokenizer.dump();
    std::ofstream(dir_ / "tokenizer_config.json") << config.dump();
    return Tokenizer::Load(dir_.string());
  }
  std::unique_ptr<Tokenizer> MustLoad() {
    auto loaded = Load();
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return loaded.ok() ? *std::move(loaded) : nullptr;
  }
  const fs::path& dir() const { return dir_; }

  json tokenizer;
  json config;

 private:
  static inline int counter_ = 0;
  fs::path dir_;
};

// Every case of a reference file: ids, decoded text, and the same text from a stream of single tokens.
void CheckCases(const Tokenizer& tokenizer, const json& cases) {
  ASSERT_GT(cases.size(), 10u);
  for (const json& c : cases) {
    const std::string text = c["text"];
    const std::vector<int32_t> ids = MustEncode(tokenizer, text);
    EXPECT_EQ(ids, c["ids"].get<std::vector<int32_t>>()) << text;
    const std::string decoded = c.value("decoded", text);
    EXPECT_EQ(tokenizer.Decode(ids, false), decoded);
    EXPECT_EQ(Streamed(tokenizer, ids), decoded);
  }
}

TEST(TokenizerTest, DemoModelGivesTheReferenceIds) {
  const auto tokenizer = MustLoad(DemoModelDir());
  ASSERT_NE(tokenizer, nullptr);
  CheckCases(*tokenizer, ReadJson(SourceDir() + "/tests/golden/fable-moe/tokenizer_cases_hf.json")["cases"]);
  CheckCases(*tokenizer, ReadJson(SourceDir() + "/tests/golden/fable-moe/golden.json")["tokenizer_cases"]);
  EXPECT_EQ(tokenizer->vocab_size(), 4096);
  EXPECT_EQ(tokenizer->bos_id(), 0);
  EXPECT_EQ(tokenizer->eos_id(), 1);
  EXPECT_TRUE(tokenizer->add_bos());
  EXPECT_THAT(tokenizer->chat_template(), HasSubstr("add_generation_prompt"));
  EXPECT_THAT(tokenizer->added_tokens(), testing::SizeIs(5));
}

TEST(TokenizerTest, CharactersOfSeveralTokensKeepTheirBytes) {
  const auto tokenizer = MustLoad(DemoModelDir());
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_THAT(MustEncode(*tokenizer, "😸"), ElementsAre(175, 256, 249, 119));
  EXPECT_THAT(MustEncode(*tokenizer, "é"), ElementsAre(130, 105));
  EXPECT_THAT(MustEncode(*tokenizer, "中"), ElementsAre(163, 119, 258));
  EXPECT_EQ(Streamed(*tokenizer, {175, 256, 249, 119}), "😸");
  EXPECT_EQ(tokenizer->Decode({175, 256, 249}, false), kReplacementCharacter);
  EXPECT_EQ(tokenizer->TokenBytes(-1), "");
  EXPECT_EQ(tokenizer->TokenBytes(4096), "");
  EXPECT_EQ(tokenizer->TokenBytes(4094), "<｜User｜>");
}

TEST(TokenizerTest, StreamEqualsDecodeForAnyIds) {
  const auto tokenizer = MustLoad(DemoModelDir());
  ASSERT_NE(tokenizer, nullptr);
  std::mt19937 random(9);
  for (int round = 0; round < 500; ++round) {
    std::vector<int32_t> ids;
    for (int i = 0; i < 40; ++i) ids.push_back(static_cast<int32_t>(random() % 300));  // mostly single bytes: broken characters
    ASSERT_EQ(Streamed(*tokenizer, ids), tokenizer->Decode(ids, false));
  }
}

TEST(TokenizerTest, UserTextNeverBecomesAnAddedToken) {
  const auto tokenizer = MustLoad(DemoModelDir());
  ASSERT_NE(tokenizer, nullptr);
  const std::string text = "<｜User｜>a<｜end▁of▁sentence｜>";
  EXPECT_THAT(MustEncode(*tokenizer, text), ElementsAre(4094, 67, 1));
  const std::vector<int32_t> plain = MustEncode(*tokenizer, text, kUserText);
  for (const int32_t id : plain) EXPECT_TRUE(id > 2 && id < 4094) << id;
  EXPECT_EQ(tokenizer->Decode(plain, true), text);
}

TEST(TokenizerTest, SpansAreOneTextWithTwoKindsOfTrust) {
  const auto tokenizer = MustLoad(DemoModelDir());
  ASSERT_NE(tokenizer, nullptr);
  const auto encode = [&](const std::vector<TextSpan>& spans) {
    const auto ids = tokenizer->EncodeSpans(spans, false);
    EXPECT_TRUE(ids.ok()) << ids.status();
    return *ids;
  };
  // A piece may cross from template to message, so the ids are the reference's for the whole prompt.
  const std::string whole = "<｜User｜>Once upon a time<｜Assistant｜>";
  EXPECT_EQ(encode({{"<｜User｜>Once u", true}, {"pon a ti", false}, {"me<｜Assistant｜>", true}}), MustEncode(*tokenizer, whole));
  EXPECT_EQ(encode({{"<｜Us", true}, {"er｜>", true}}), std::vector<int32_t>{4094});
  // A forged token, whole or with its halves on both sides, stays text.
  for (const std::vector<TextSpan>& spans : std::vector<std::vector<TextSpan>>{{{"<｜User｜>", false}}, {{"<｜Us", true}, {"er｜>", false}}}) {
    EXPECT_EQ(encode(spans), MustEncode(*tokenizer, "<｜User｜>", kUserText));
  }
}

TEST(TokenizerTest, InvalidUtf8IsRefusedWithItsPlace) {
  const auto tokenizer = MustLoad(DemoModelDir());
  ASSERT_NE(tokenizer, nullptr);
  const auto ids = tokenizer->Encode("abc\xFF", kUserText);
  EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(ids.status().message()), HasSubstr("byte 3"));
}

TEST(TokenizerTest, BosIsAddedOnceByWhoeverAsks) {
  const auto tokenizer = MustLoad(DemoModelDir());
  ASSERT_NE(tokenizer, nullptr);
  const std::vector<int32_t> hi = MustEncode(*tokenizer, "hi");
  std::vector<int32_t> with_bos = hi;
  with_bos.insert(with_bos.begin(), 0);
  EXPECT_EQ(MustEncode(*tokenizer, "hi", {.add_special_tokens = true, .parse_special = false}), with_bos);
  EXPECT_EQ(MustEncode(*tokenizer, "<｜begin▁of▁sentence｜>hi", {.add_special_tokens = true, .parse_special = true}), with_bos);
  EXPECT_THAT(MustEncode(*tokenizer, "", {.add_special_tokens = true, .parse_special = true}), ElementsAre(0));

  ChangedTokenizer templated;  // the post-processor asks, the config says nothing
  templated.config.erase("add_bos_token");
  templated.config.erase("add_eos_token");
  templated.tokenizer["post_processor"] = json::parse(R"({"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "E", "type_id": 0}}],
    "pair": [], "special_tokens": {"B": {"id": "B", "ids": [0], "tokens": ["B"]}, "E": {"id": "E", "ids": [1], "tokens": ["E"]}}}]})");
  std::vector<int32_t> framed = with_bos;
  framed.push_back(1);
  auto changed = templated.MustLoad();
  ASSERT_NE(changed, nullptr);
  EXPECT_TRUE(changed->add_bos());
  EXPECT_EQ(MustEncode(*changed, "hi", {.add_special_tokens = true}), framed);
  templated.config["add_bos_token"] = false;  // the config overrules it
  templated.config["add_eos_token"] = false;
  changed = templated.MustLoad();
  ASSERT_NE(changed, nullptr);
  EXPECT_FALSE(changed->add_bos());
  EXPECT_EQ(MustEncode(*changed, "hi", {.add_special_tokens = true}), hi);
}

TEST(TokenizerTest, EosOfTheConfigIsSpecialEvenIfNoListSaysSo) {
  ChangedTokenizer files;
  files.config["eos_token"] = "the";  // a plain word of the vocabulary
  auto tokenizer = files.MustLoad();
  ASSERT_NE(tokenizer, nullptr);
  ASSERT_TRUE(tokenizer->eos_id().has_value());
  EXPECT_TRUE(tokenizer->IsSpecial(*tokenizer->eos_id()));
  EXPECT_EQ(tokenizer->Decode({67, *tokenizer->eos_id()}, true), "a");
  files.config["eos_token"] = nullptr;
  tokenizer = files.MustLoad();
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_FALSE(tokenizer->eos_id().has_value());
  files.config["eos_token"] = {{"content", "<not there>"}};
  EXPECT_THAT(std::string(files.Load().status().message()), HasSubstr("<not there>"));
}

TEST(TokenizerTest, WhatIsNotSupportedIsRefusedByName) {
  struct Case {
    const char* what;
    std::function<void(json&)> change;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"no merges", [](json& t) { t["model"].erase("merges"); }, "model.merges is missing"},
      {"model type", [](json& t) { t["model"]["type"] = "Unigram"; }, "\"Unigram\" is not supported"},
      {"merge of unknown tokens", [](json& t) { t["model"]["merges"].push_back("qqq zzzz"); }, "\"qqq\" is not in model.vocab"},
      {"merge of three", [](json& t) { t["model"]["merges"].push_back("a b c"); }, "model.merges[3835]"},
      {"negative id", [](json& t) { t["model"]["vocab"]["zzzzzzz"] = -4; }, "token id"},
      {"huge id", [](json& t) { t["model"]["vocab"]["zzzzzzz"] = 4000000000u; }, "token id"},
      {"vocab is a list", [](json& t) { t["model"]["vocab"] = json::array(); }, "model.vocab"},
      {"dropout", [](json& t) { t["model"]["dropout"] = 0.1; }, "dropout"},
      {"word suffix", [](json& t) { t["model"]["end_of_word_suffix"] = "</w>"; }, "end_of_word_suffix"},
      {"normaliser",
       [](json& t) {
         t["normalizer"] = {{"type", "Precompiled"}};
       },
       "\"Precompiled\" is not supported"},
      {"pre-tokeniser",
       [](json& t) {
         t["pre_tokenizer"] = {{"type", "Metaspace"}};
       },
       "\"Metaspace\" is not supported"},
      {"decoder",
       [](json& t) {
         t["decoder"] = {{"type", "WordPiece"}};
       },
       "\"WordPiece\" is not supported"},
      {"no decoder", [](json& t) { t["decoder"] = nullptr; }, "decoder is missing"},
      {"post-processor",
       [](json& t) {
         t["post_processor"] = {{"type", "BertProcessing"}};
       },
       "\"BertProcessing\" is not supported"},
      {"pattern", [](json& t) { t["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a"; }, "pretokenizers[0].pattern"},
      {"open class", [](json& t) { t["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[a"; }, "no closing"},
      {"added token without content", [](json& t) { t["added_tokens"][0].erase("content"); }, "added_tokens[0].content"},
  };
  for (const Case& c : cases) {
    ChangedTokenizer files;
    c.change(files.tokenizer);
    const auto loaded = files.Load();
    ASSERT_FALSE(loaded.ok()) << c.what;
    EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument) << c.what;
    EXPECT_THAT(std::string(loaded.status().message()), testing::AllOf(HasSubstr(c.message), HasSubstr("tokenizer.json"))) << c.what;
  }
}

TEST(TokenizerTest, MissingAndBrokenFiles) {
  ChangedTokenizer files;
  EXPECT_EQ(Tokenizer::Load(files.dir().string()).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(files.Load().ok());
  fs::remove(files.dir() / "tokenizer_config.json");
  const auto bare = MustLoad(files.dir().string());
  ASSERT_NE(bare, nullptr);
  EXPECT_FALSE(bare->bos_id().has_value());
  EXPECT_FALSE(bare->add_bos());
  std::ofstream(files.dir() / "tokenizer_config.json") << "{\"bos_token\": ";
  EXPECT_THAT(std::string(Tokenizer::Load(files.dir().string()).status().message()), HasSubstr("tokenizer_config.json: not valid JSON"));
  std::ofstream(files.dir() / "tokenizer_config.json") << "{\"add_bos_token\": \"yes\"}";
  EXPECT_THAT(std::string(Tokenizer::Load(files.dir().string()).status().message()), HasSubstr("add_bos_token"));
  std::ofstream(files.dir() / "tokenizer_config.json") << "{}";
  std::ofstream(files.dir() / "chat_template.jinja") << "{{ messages }}";
  EXPECT_EQ(MustLoad(files.dir().string())->chat_template(), "{{ messages }}");
}

TEST(TokenizerTest, MergesAsPairsAreTheSameAsMergesAsStrings) {
  ChangedTokenizer files;
  for (json& merge : files.tokenizer["model"]["merges"]) {
    const std::string pair = merge;
    const size_t space = pair.find(' ');
    merge = {pair.substr(0, space), pair.substr(space + 1)};
  }
  const auto tokenizer = files.MustLoad();
  ASSERT_NE(tokenizer, nullptr);
  CheckCases(*tokenizer, ReadJson(SourceDir() + "/tests/golden/fable-moe/golden.json")["tokenizer_cases"]);
}

TEST(TokenizerTest, IgnoreMergesTakesWholePiecesButNoSpecialTokens) {
  ChangedTokenizer files;
  files.tokenizer["pre_tokenizer"]["pretokenizers"] = {{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}};
  files.tokenizer["model"]["vocab"]["qzx"] = 4096;
  files.tokenizer["model"]["vocab"]["<s>"] = 4097;
  files.tokenizer["added_tokens"].push_back({{"id", 4097}, {"content", "<s>"}, {"special", true}});
  files.tokenizer["model"]["ignore_merges"] = true;
  const auto tokenizer = files.MustLoad();
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_THAT(MustEncode(*tokenizer, "qzx"), ElementsAre(4096));
  EXPECT_THAT(MustEncode(*tokenizer, "<s>"), ElementsAre(4097));
  EXPECT_THAT(MustEncode(*tokenizer, "<s>", kUserText), testing::Not(testing::Contains(4097)));
}

TEST(TokenizerTest, AddedTokensTakeSpaceAndRespectWords) {
  ChangedTokenizer files;
  const auto add = [&](int id, const char* content, const char* flag) {
    json token = {{"id", id}, {"content", content}, {"special", false}, {"normalized", false}};
    if (*flag != '\0') token[flag] = true;
    files.tokenizer["added_tokens"].push_back(token);
  };
  add(4096, "<l>", "lstrip");
  add(4097, "<r>", "rstrip");
  add(4098, "zqx", "single_word");
  add(4099, "<l><r>", "");
  add(4100, "<N>", "normalized");
  files.tokenizer["normalizer"] = {{"type", "Lowercase"}};
  const auto tokenizer = files.MustLoad();
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_THAT(MustEncode(*tokenizer, "a \u3000<l>a"), ElementsAre(67, 4096, 67));
  EXPECT_THAT(MustEncode(*tokenizer, "a<r> \n\na"), ElementsAre(67, 4097, 67));
  EXPECT_THAT(MustEncode(*tokenizer, "<l><r>"), ElementsAre(4099));  // the longest
  EXPECT_THAT(MustEncode(*tokenizer, "zqx"), ElementsAre(4098));
  EXPECT_THAT(MustEncode(*tokenizer, "azqx"), testing::Not(testing::Contains(4098)));
  EXPECT_THAT(MustEncode(*tokenizer, "<n>A<N>"), ElementsAre(4100, 67, 4100));
}

TEST(TokenizerTest, ASentencePieceLikeVocabularyFallsBackToBytes) {
  ChangedTokenizer files;
  json vocabulary = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}};
  for (int byte = 0; byte < 256; ++byte) {
    char spelling[8];
    std::snprintf(spelling, sizeof spelling, "<0x%02X>", byte);
    vocabulary[spelling] = 3 + byte;
  }
  const std::vector<std::string> more = {"▁", "H", "i", "▁H", "▁Hi", "!"};
  for (size_t i = 0; i < more.size(); ++i) vocabulary[more[i]] = 259 + i;
  files.tokenizer = {
      {"added_tokens", json::array()},
      {"normalizer", json::parse(R"({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]})")},
      {"pre_tokenizer", nullptr},
      {"decoder", json::parse(R"({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})")},
      {"model",
       {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", {"▁ H", "▁H i"}}, {"byte_fallback", true}, {"unk_token", "<unk>"}, {"fuse_unk", true}}}};
  files.config = {{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"add_bos_token", true}};
  const auto tokenizer = files.MustLoad();
  ASSERT_NE(tokenizer, nullptr);
  const std::vector<int32_t> ids = MustEncode(*tokenizer, "Hi é!");
  EXPECT_THAT(ids, ElementsAre(263, 259, 3 + 0xC3, 3 + 0xA9, 264));
  EXPECT_EQ(tokenizer->Decode(ids, false), "Hi é!");  // the space of the first token goes, no other
  EXPECT_EQ(Streamed(*tokenizer, ids), "Hi é!");
  EXPECT_EQ(Streamed(*tokenizer, MustEncode(*tokenizer, " Hi  Hi")), " Hi  Hi");
}

TEST(TokenizerTest, CleanUpOfSpacesIsTheSameInStreams) {
  ChangedTokenizer files;
  files.config["clean_up_tokenization_spaces"] = true;
  const auto tokenizer = files.MustLoad();
  ASSERT_NE(tokenizer, nullptr);
  const std::vector<int32_t> ids = MustEncode(*tokenizer, " Well , it 's done .");
  EXPECT_EQ(tokenizer->Decode(ids, false), " Well, it's done.");
  EXPECT_EQ(Streamed(*tokenizer, ids), " Well, it's done.");
}

TEST(UnicodeFormTest, FormsOfMarksLettersAndSyllables) {
  const auto form = [](std::string_view text, UnicodeForm f) { return ToUnicodeForm(text, f).value_or("error"); };
  EXPECT_EQ(form("cafe\u0301!", UnicodeForm::kNfc), "caf\u00e9!");
  EXPECT_EQ(form("caf\u00e9", UnicodeForm::kNfd), "cafe\u0301");
  EXPECT_EQ(form("\u212b \u0344", UnicodeForm::kNfc), "\u00c5 \u0308\u0301");
  EXPECT_EQ(form("\u1112\u1161\u11ab", UnicodeForm::kNfc), "\ud55c");
  EXPECT_EQ(form("\ufb01\uff21", UnicodeForm::kNfkc), "fiA");
  EXPECT_EQ(form("a\u0301\u0316", UnicodeForm::kNfd), "a\u0316\u0301");
  EXPECT_EQ(form("", UnicodeForm::kNfc), "");
}

TEST(UnicodeFormTest, MarksWithoutEndAreSortedInTime) {
  std::string text;
  for (int i = 0; i < 200000; ++i) text += "\u0301\u0316";
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(ToUnicodeForm(text, UnicodeForm::kNfc).ok());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(RegexTest, MeansWhatItMeansInOniguruma) {
  const auto matches = [](std::string_view pattern, std::string_view text) {
    std::vector<std::string> found;
    auto regex = Regex::Compile(pattern);
    EXPECT_TRUE(regex.ok()) << regex.status();
    std::vector<ByteRange> ranges;
    if (!regex.ok()) return found;
    EXPECT_TRUE(regex->FindAll(text, &ranges).ok());
    for (const ByteRange& range : ranges) found.emplace_back(text.substr(range.begin, range.end - range.begin));
    return found;
  };
  EXPECT_THAT(matches("\\s", "a\u180e \u00a0b"), ElementsAre(" ", "\u00a0"));  // U+180E is no white space since Unicode 6.3
  EXPECT_THAT(matches("\\h+", "xAF9\t"), ElementsAre("AF9"));                  // hexadecimal digits
  EXPECT_THAT(matches("[\\p{L}&&[^\\p{Han}]]+", "ab字c"), ElementsAre("ab", "c"));
  EXPECT_THAT(matches("[a-z&&[^aeiou]&&[^x-z]]+", "abcxe"), ElementsAre("bc"));
  EXPECT_THAT(matches("[a[0-3]]+", "a1b4"), ElementsAre("a1"));
  EXPECT_THAT(matches("[^\\W_]+", "a_é"), ElementsAre("a", "é"));
  EXPECT_THAT(matches("\\p{Han}", "字。"), ElementsAre("字"));  // the script, not its extensions
  EXPECT_THAT(matches("a{,2}b", "aab"), ElementsAre("aab"));
  EXPECT_THAT(matches("(?m:a.b)", "a\nb"), ElementsAre("a\nb"));
  EXPECT_THAT(matches("\\w+\\b", "e\u0301a, b"), ElementsAre("e\u0301a", "b"));
  EXPECT_THAT(matches("(?i:'s)", "'S'\u017f"), ElementsAre("'S", "'\u017f"));
  EXPECT_THAT(matches("x*", "axxb"), ElementsAre("", "xx", ""));
}

TEST(RegexTest, RepeatedGroupsOfAnyLengthNeverOverflow) {
  // A group costs stack at every repetition, here far more than the JIT's own stack holds.
  auto regex = Regex::Compile("(?:(?=[a-z])(a|b|c|d))+|(?:x|y)+?z");
  ASSERT_TRUE(regex.ok());
  for (const size_t num_bytes : {size_t{1} << 17, size_t{1} << 20, size_t{1} << 23}) {
    std::vector<ByteRange> matches;
    const absl::Status status = regex->FindAll(std::string(num_bytes, 'a'), &matches);
    if (status.ok()) {
      ASSERT_EQ(matches.size(), 1u);
      EXPECT_EQ(matches[0].end, num_bytes);
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      EXPECT_GT(num_bytes, size_t{1} << 20);
    }
  }
}

// One run per text of trouble 1, and how many tokens the reference makes of it.
struct LongRun {
  std::string text;
  size_t qwen;
  size_t deepseek;
  size_t fable;
};

std::vector<LongRun> LongRuns() {
  const auto repeat = [](std::string_view part, size_t times) {
    std::string text;
    for (size_t i = 0; i < times; ++i) text += part;
    return text;
  };
  return {{repeat("A", 131072), 16384, 16384, 131072}, {repeat("Z", 131072), 65536, 65536, 131072},
          {repeat(".", 131072), 2048, 1024, 131072},   {repeat("\n", 131072), 4096, 8192, 65536},
          {repeat("_", 131072), 2048, 2048, 131072},   {repeat("us", 65536), 65536, 65536, 65536},
          {repeat("字", 65536), 65536, 65536, 196608}, {absl::StrCat("x", repeat(" ", 131072), "y"), 1027, 1027, 131073}};
}

void CheckLongRun(const Tokenizer& tokenizer, const LongRun& run, size_t num_tokens) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<int32_t> ids = MustEncode(tokenizer, run.text, kUserText);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  EXPECT_EQ(ids.size(), num_tokens) << run.text.substr(0, 4);
  EXPECT_EQ(tokenizer.Decode(ids, false), run.text);
}

TEST(TokenizerTest, LongRunsHaveTheReferencesCountsInTime) {
  const auto tokenizer = MustLoad(DemoModelDir());
  ASSERT_NE(tokenizer, nullptr);
  for (const LongRun& run : LongRuns()) CheckLongRun(*tokenizer, run, run.fable);
}

TEST(TokenizerTest, MergingIsNotQuadratic) {
  const auto tokenizer = MustLoad(DemoModelDir());
  ASSERT_NE(tokenizer, nullptr);
  std::mt19937 random(14);
  for (const std::string alphabet : {"abcdefghijklmnopqrstuvwxyz", "ABCDEFGHabcdefgh0123456789+/", "{}[]\":,abc01"}) {
    std::string text;
    while (text.size() < (512 << 10)) text.push_back(alphabet[random() % alphabet.size()]);
    const auto start = std::chrono::steady_clock::now();
    const std::vector<int32_t> ids = MustEncode(*tokenizer, text);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
    EXPECT_EQ(tokenizer->Decode(ids, false), text);
  }
}

// Small pieces are merged by scanning, long ones with a heap: both are the same rule.
TEST(TokenizerTest, ShortAndLongPiecesMergeAlike) {
  ChangedTokenizer files;
  files.tokenizer["pre_tokenizer"]["pretokenizers"] = {{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}};
  const auto whole = files.MustLoad();
  ASSERT_NE(whole, nullptr);
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::string word;
    for (int i = 0; i < 30; ++i) word.push_back("etaoinshr "[random() % 10]);
    // The unmergeable byte 0x01 between copies makes one long piece of many that are each merged as the short one is.
    std::vector<int32_t> expected = MustEncode(*whole, word);
    std::vector<int32_t> once = expected;
    once.push_back(MustEncode(*whole, "\x01")[0]);
    expected = once;
    expected.insert(expected.end(), once.begin(), once.end());
    ASSERT_EQ(MustEncode(*whole, word + "\x01" + word + "\x01"), expected) << word;
  }
}

class PublicVocabularyTest : public testing::Test {
 protected:
  std::unique_ptr<Tokenizer> LoadOrSkip(const std::string& name) {
    dir_ = SharedDir() + "/tokenizers/" + name;
    return fs::exists(dir_ + "/tokenizer.json") ? MustLoad(dir_) : nullptr;
  }
  std::string dir_;
};

#define LOAD_OR_SKIP(tokenizer, name)      \
  const auto tokenizer = LoadOrSkip(name); \
  if (tokenizer == nullptr) GTEST_SKIP() << "no public vocabulary at " << dir_ << "; set HEARTH_SHARED_DIR to where tokenizers/ lies"

TEST_F(PublicVocabularyTest, QwenGivesTheReferenceIds) {
  LOAD_OR_SKIP(tokenizer, "qwen3");
  CheckCases(*tokenizer, ReadJson(dir_ + "/cases.json")["cases"]);
  for (const LongRun& run : LongRuns()) CheckLongRun(*tokenizer, run, run.qwen);
}

TEST_F(PublicVocabularyTest, DeepSeekGivesTheReferenceIds) {
  LOAD_OR_SKIP(tokenizer, "deepseek_v3");
  CheckCases(*tokenizer, ReadJson(dir_ + "/cases.json")["cases"]);
  for (const LongRun& run : LongRuns()) CheckLongRun(*tokenizer, run, run.deepseek);
  EXPECT_THAT(MustEncode(*tokenizer, "cafe\u0301"), ElementsAre(69, 15702, 17793));  // it has no normaliser
  EXPECT_EQ(Streamed(*tokenizer, {28927, 119}), "😸");
  EXPECT_EQ(MustEncode(*tokenizer, "hi", {.add_special_tokens = true}).front(), 0);
  const std::vector<int32_t> ids = MustEncode(*tokenizer, "<｜begin▁of▁sentence｜>hi", {.add_special_tokens = true, .parse_special = true});
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 0), 1);
}

TEST_F(PublicVocabularyTest, QwenNormalisesToNfc) {
  LOAD_OR_SKIP(tokenizer, "qwen3");
  EXPECT_THAT(MustEncode(*tokenizer, "cafe\u0301"), ElementsAre(924, 58858));
  EXPECT_THAT(MustEncode(*tokenizer, "caf\u00e9"), ElementsAre(924, 58858));
  EXPECT_THAT(MustEncode(*tokenizer, " Vi\u1ec7t"), ElementsAre(128324));
  EXPECT_THAT(MustEncode(*tokenizer, " Vie\u0302\u0323t"), ElementsAre(128324));
  EXPECT_THAT(MustEncode(*tokenizer, "\ud55c\uae00"), ElementsAre(23573, 83291));
  EXPECT_THAT(MustEncode(*tokenizer, "\u1112\u1161\u11ab\u1100\u1173\u11af"), ElementsAre(23573, 83291));
  EXPECT_THAT(MustEncode(*tokenizer, "\u212b"), ElementsAre(144044));
  EXPECT_THAT(MustEncode(*tokenizer, "\u0344"), ElementsAre(136, 230, 53839));
  // A letter of the template and the mark of a message join over the edge, as in one text.
  const auto ids = tokenizer->EncodeSpans({{"cafe", true}, {"\u0301", false}}, false);
  EXPECT_THAT(*ids, ElementsAre(924, 58858));
  EXPECT_EQ(Streamed(*tokenizer, {220, 9707}), " Hello");
  EXPECT_EQ(tokenizer->Decode({220, 9707}, true), " Hello");
}

TEST_F(PublicVocabularyTest, AMebibyteOfMixedTextInWellUnderASecond) {
  for (const char* name : {"qwen3", "deepseek_v3"}) {
    const auto load_start = std::chrono::steady_clock::now();
    LOAD_OR_SKIP(tokenizer, name);
    EXPECT_LT(std::chrono::steady_clock::now() - load_start, std::chrono::seconds(4));
    std::mt19937 random(1);
    std::string text;
    const std::vector<std::string> parts = {"the ", "Router", " = ",    "();\n", "\n\n    ", "über", "字段", "模型的",  "12345",
                                            ".",    ", ",     "don't ", "🙂",  "é",        "_id",  "\t",   "https://"};
    while (text.size() < (1 << 20)) {
      text += parts[random() % parts.size()];
      for (int i = random() % 5; i > 0; --i) text.push_back(static_cast<char>('a' + random() % 26));
    }
    const auto start = std::chrono::steady_clock::now();
    const std::vector<int32_t> ids = MustEncode(*tokenizer, text);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    RecordProperty(std::string(name) + "_ms", static_cast<int>(seconds * 1000));
    EXPECT_LT(seconds, 1.0);  // some 0.1 s on an idle core
    EXPECT_EQ(tokenizer->Decode(ids, false), text);
  }
}

TEST_F(PublicVocabularyTest, TinyByteVocabulariesOfTheOracles) {
  const std::string models = SharedDir() + "/oracles/models";
  if (!fs::exists(models)) GTEST_SKIP() << "no oracle models at " << models;
  for (const auto& entry : fs::directory_iterator(models)) {
    const auto tokenizer = MustLoad(entry.path().string());
    ASSERT_NE(tokenizer, nullptr);
    std::vector<int32_t> expected;
    const std::string text = "Hi there,\n\n  42 é";
    for (const char c : text) expected.push_back(3 + static_cast<unsigned char>(c));
    EXPECT_EQ(MustEncode(*tokenizer, text), expected);
    EXPECT_EQ(tokenizer->Decode(expected, true), text);
    EXPECT_FALSE(tokenizer->add_bos());
  }
}

}  // namespace
}  // namespace hearth
