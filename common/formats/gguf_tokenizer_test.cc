// Tokenizers written into GGUF metadata as convert_hf_to_gguf.py does it must give the ids and texts of the tokenizer.json that they come from.
#include "common/formats/gguf_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "common/formats/gguf_test_tokenizer.h"
#include "common/text/tokenizer.h"

namespace hearth {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Environment(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}
std::string SourceDir() { return Environment("HEARTH_SOURCE_DIR", "."); }
std::string SharedDir() { return Environment("HEARTH_SHARED_DIR", SourceDir() + "/../shared"); }

json ReadJson(const std::string& path) { return json::parse(std::ifstream(path)); }

GgufTestWriter Converted(const std::string& dir, const std::string& pre) {
  GgufTestWriter w;
  AddTokenizer(w, dir, pre);
  return w;
}

class GgufTokenizerTest : public ::testing::Test {
 protected:
  GgufTokenizerTest() {
    std::string dir = testing::TempDir() + "/hearth_gguf_tokenizer_test_XXXXXX";
    dir_ = mkdtemp(dir.data());
  }
  ~GgufTokenizerTest() override { std::filesystem::remove_all(dir_); }
  std::string Path() const { return dir_ + "/model.gguf"; }

  static absl::StatusOr<std::optional<TokenizerTexts>> Texts(const std::string& path) {
    ASSIGN_OR_RETURN(const ModelFiles files, OpenModelFiles(path, GgufArrays::kValues));
    return ReadGgufTokenizer(files);
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const GgufTestWriter& w) {
    w.Write(Path());
    const absl::StatusOr<std::optional<TokenizerTexts>> texts = Texts(Path());
    if (!texts.ok()) return texts.status();
    EXPECT_TRUE(texts->has_value());
    return Tokenizer::Parse((*texts)->tokenizer_json, (*texts)->tokenizer_config_json, Path());
  }
  std::string ErrorOf(const GgufTestWriter& w) { return std::string(Load(w).status().message()); }

  std::string dir_;
};

// Three tokens of a byte each, and what else the test says.
GgufTestWriter Small(const std::string& pre, std::vector<std::string> more, std::vector<std::string> merges, std::vector<int32_t> types = {}) {
  GgufTestWriter w;
  w.String("tokenizer.ggml.model", "gpt2");
  w.String("tokenizer.ggml.pre", pre);
  std::vector<std::string> tokens = {"a", "b", "1"};
  tokens.insert(tokens.end(), more.begin(), more.end());
  w.Strings("tokenizer.ggml.tokens", tokens);
  w.Strings("tokenizer.ggml.merges", merges);
  if (!types.empty()) w.Int32s("tokenizer.ggml.token_type", types);
  return w;
}

TEST_F(GgufTokenizerTest, GivesTheIdsOfTheTokenizerJsonThatItCameFrom) {
  std::vector<std::pair<std::string, std::string>> sources = {{SourceDir() + "/deploy/models/fable-moe", "deepseek-v3"}};
  std::vector<std::string> texts = {
      "",           "A fox met 12345 crows.", "  two  spaces\n\n\nthree lines\r\n",  "na\u00efve \u4f60\u597d \U0001f98a",
      "it's we'll", "f(x)={1.5e-3};\t//",     "<think>a</think><|end of sentence|>", "\u0651\u0627 _a_ B2b"};
  for (const auto& [name, pre] : {std::pair{"deepseek_v3", "deepseek-v3"}, std::pair{"qwen3", "qwen2"}}) {
    const std::string dir = SharedDir() + "/tokenizers/" + name;
    if (!std::filesystem::exists(dir + "/cases.json")) {
      std::cout << dir << " is not there: the bundled model's tokenizer alone is looked at\n";
      continue;
    }
    sources.emplace_back(dir, pre);
    for (const json& c : ReadJson(dir + "/cases.json")["cases"]) texts.push_back(c["text"]);
  }
  for (const auto& [source, pre] : sources) {
    const auto original = Tokenizer::Load(source);
    ASSERT_TRUE(original.ok()) << original.status();
    const auto converted = Load(Converted(source, pre));
    ASSERT_TRUE(converted.ok()) << converted.status();
    EXPECT_EQ((*converted)->bos_id(), (*original)->bos_id());
    EXPECT_EQ((*converted)->eos_id(), (*original)->eos_id());
    EXPECT_EQ((*converted)->add_bos(), (*original)->add_bos());
    EXPECT_EQ((*converted)->chat_template(), (*original)->chat_template());
    EXPECT_EQ((*converted)->vocab_size(), (*original)->vocab_size());
    for (const std::string& text : texts) {
      for (const EncodeOptions& options : {EncodeOptions{true, true}, EncodeOptions{false, false}}) {
        const auto want = (*original)->Encode(text, options), got = (*converted)->Encode(text, options);
        ASSERT_TRUE(want.ok() && got.ok()) << text;
        ASSERT_EQ(*got, *want) << source << ": " << text;
        ASSERT_EQ((*converted)->Decode(*got, true), (*original)->Decode(*want, true)) << source << ": " << text;
      }
    }
  }
}

TEST_F(GgufTokenizerTest, EveryNamedPreTokenizerSplitsAsItsModel) {
  const auto ids = [&](const std::string& pre, std::string_view text) {
    const auto tokenizer = Load(Small(pre, {"11", "111", "1111", "ab", "aba", "Ġ", "Ċ", "Ġa", "ĊĊ", "'", "s", "'s", "b's"},
                                      {"1 1", "11 1", "11 11", "a b", "ab a", "Ġ a", "Ċ Ċ", "' s", "b 's"}));
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    const auto encoded = tokenizer.ok() ? (*tokenizer)->Encode(text, {false, true}) : absl::StatusOr<std::vector<int32_t>>(tokenizer.status());
    return encoded.ok() ? *encoded : std::vector<int32_t>();
  };
  using Ids = std::vector<int32_t>;
  for (const char* pre : {"deepseek-v3", "kimi-k2", "llama-bpe"}) EXPECT_EQ(ids(pre, "1111"), (Ids{4, 2})) << pre;  // groups of three digits
  for (const char* pre : {"deepseek-llm", "qwen2"}) EXPECT_EQ(ids(pre, "111"), (Ids{2, 2, 2})) << pre;
  for (const char* pre : {"deepseek-v3", "deepseek-llm", "kimi-k2", "llama-bpe", "qwen2"}) EXPECT_EQ(ids(pre, "ab a"), (Ids{6, 10})) << pre;
  EXPECT_EQ(ids("deepseek-llm", "\n\n"), (Ids{9, 9}));
  EXPECT_EQ(ids("deepseek-v3", "\n\n"), (Ids{11}));
  EXPECT_EQ(ids("kimi-k2", "b's"), (Ids{15}));  // the one whose words keep their endings
  EXPECT_EQ(ids("qwen2", "b's"), (Ids{1, 14}));
  EXPECT_EQ(ids("llama-bpe", "aba"), (Ids{7}));
}

TEST_F(GgufTokenizerTest, TypesSayWhatATokenIs) {
  GgufTestWriter w = Small("deepseek-v3", {"<s>", "<u>", "[PAD5]", "ab"}, {"a b"}, {1, 1, 1, 3, 4, 5, 1});
  w.Uint32("tokenizer.ggml.bos_token_id", 3);
  w.Bool("tokenizer.ggml.add_bos_token", true);
  const auto tokenizer = Load(w);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->bos_id(), 3);
  EXPECT_TRUE((*tokenizer)->add_bos());
  EXPECT_TRUE((*tokenizer)->IsSpecial(3));
  EXPECT_FALSE((*tokenizer)->IsSpecial(4));
  EXPECT_EQ(*(*tokenizer)->Encode("ab<u>a", {true, true}), (std::vector<int32_t>{3, 6, 4, 0}));
  EXPECT_EQ((*tokenizer)->TokenBytes(5), "");
  EXPECT_EQ((*tokenizer)->vocab_size(), 7);
  // Llama-3's text begins with BOS where the file does not say.
  GgufTestWriter llama = Small("llama-bpe", {"<s>"}, {}, {1, 1, 1, 3});
  llama.Uint32("tokenizer.ggml.bos_token_id", 3);
  EXPECT_TRUE((*Load(llama))->add_bos());
}

TEST_F(GgufTokenizerTest, WhatCannotBeReadIsRefusedWithTheKeyAndTheRemedy) {
  const auto refused = [&](const GgufTestWriter& w, const std::string& key, const std::string& what) {
    EXPECT_THAT(ErrorOf(w), AllOf(HasSubstr(Path()), HasSubstr(key), HasSubstr(what), HasSubstr("tokenizer.json")));
  };
  GgufTestWriter none;
  refused(none, "tokenizer.ggml.model", "is missing");
  GgufTestWriter llama;
  llama.String("tokenizer.ggml.model", "llama");
  refused(llama, "tokenizer.ggml.model", "supported: \"gpt2\"");
  refused(Small("tekken", {}, {}), "tokenizer.ggml.pre", "\"tekken\"; supported: deepseek-v3, deepseek-llm, kimi-k2");
  refused(Small("deepseek-v3", {"a"}, {}), "tokenizer.ggml.tokens", "\"a\" twice, as 0 and 3");
  refused(Small("deepseek-v3", {"\xff"}, {}), "tokenizer", "not UTF-8");
  refused(Small("deepseek-v3", {}, {}, {1, 1}), "tokenizer.ggml.token_type", "no number for each token");
  refused(Small("deepseek-v3", {}, {}, {1, 1, 9}), "tokenizer.ggml.token_type", "9 for token 2");
  GgufTestWriter bos = Small("deepseek-v3", {}, {});
  bos.Uint32("tokenizer.ggml.bos_token_id", 3);
  refused(bos, "tokenizer.ggml.bos_token_id", "is 3, none of the 3 tokens");
  GgufTestWriter unused = Small("deepseek-v3", {"[PAD3]"}, {}, {1, 1, 1, 5});
  unused.Uint32("tokenizer.ggml.eos_token_id", 3);
  refused(unused, "tokenizer.ggml.eos_token_id", "none of the 4 tokens that are in use");
  GgufTestWriter no_bos = Small("deepseek-v3", {}, {});
  no_bos.Bool("tokenizer.ggml.add_bos_token", true);
  refused(no_bos, "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id is missing");
  refused(Small("deepseek-v3", {"ab"}, {"a b", "ab"}), "tokenizer.ggml.merges", "\"ab\" as entry 1, which is not two tokens");
  for (const char* merge : {"", " ", "a ", " a", "a b a"}) refused(Small("deepseek-v3", {"ab"}, {merge}), "tokenizer.ggml.merges", "not two tokens");
  refused(Small("deepseek-v3", {}, {"a x"}), "tokenizer.ggml.merges", "\"x\" is no normal token");
  refused(Small("deepseek-v3", {}, {"a b"}), "tokenizer.ggml.merges", "\"ab\" is no normal token");
  refused(Small("deepseek-v3", {"ab"}, {"a b"}, {1, 1, 1, 3}), "tokenizer.ggml.merges", "\"ab\" is no normal token");
  // Special ones as well: of two ids for one text the model has learned one.
  refused(Small("deepseek-v3", {"<s>", "<s>"}, {}, {1, 1, 1, 3, 3}), "tokenizer.ggml.tokens", "\"<s>\" twice, as 3 and 4");
  refused(Small("deepseek-v3", {"<u>", "<u>"}, {}, {1, 1, 1, 3, 4}), "tokenizer.ggml.tokens", "\"<u>\" twice");
  refused(Small("deepseek-v3", {"a"}, {}, {1, 1, 1, 3}), "tokenizer.ggml.tokens", "\"a\" twice");
  GgufTestWriter rows = Small("deepseek-v3", {}, {});
  rows.Tensor("token_embd.weight", DType::kF32, {4, 1}, std::string(16, '\0'));
  refused(rows, "tokenizer.ggml.tokens", "has 3 entries, token_embd.weight 4 rows");
}

TEST_F(GgufTokenizerTest, IntegersOfEveryTypeAreRead) {
  const auto array = [](uint32_t type, auto one, auto special) {
    using W = GgufTestWriter;
    return W::Raw(type) + W::Raw(uint64_t{4}) + W::Raw(one) + W::Raw(one) + W::Raw(one) + W::Raw(special);
  };
  using W = GgufTestWriter;
  struct Type {
    uint32_t id;
    std::string three;
    std::string types;
  };
  const Type all[] = {{0, W::Raw(uint8_t{3}), array(0, uint8_t{1}, uint8_t{3})},      {1, W::Raw(int8_t{3}), array(1, int8_t{1}, int8_t{3})},
                      {2, W::Raw(uint16_t{3}), array(2, uint16_t{1}, uint16_t{3})},   {3, W::Raw(int16_t{3}), array(3, int16_t{1}, int16_t{3})},
                      {4, W::Raw(uint32_t{3}), array(4, uint32_t{1}, uint32_t{3})},   {5, W::Raw(int32_t{3}), array(5, int32_t{1}, int32_t{3})},
                      {10, W::Raw(uint64_t{3}), array(10, uint64_t{1}, uint64_t{3})}, {11, W::Raw(int64_t{3}), array(11, int64_t{1}, int64_t{3})}};
  for (const Type& type : all) {
    GgufTestWriter w = Small("deepseek-v3", {"<s>"}, {});
    w.Pair("tokenizer.ggml.token_type", 9, type.types);
    w.Pair("tokenizer.ggml.bos_token_id", type.id, type.three);
    const auto tokenizer = Load(w);
    ASSERT_TRUE(tokenizer.ok()) << type.id << ": " << tokenizer.status();
    EXPECT_EQ((*tokenizer)->bos_id(), 3) << type.id;
    EXPECT_TRUE((*tokenizer)->IsSpecial(3)) << type.id;
  }
  GgufTestWriter negative = Small("deepseek-v3", {}, {});
  negative.Pair("tokenizer.ggml.bos_token_id", 5, W::Raw(int32_t{-1}));
  EXPECT_THAT(ErrorOf(negative), HasSubstr("tokenizer.ggml.bos_token_id is -1"));
  GgufTestWriter real = Small("deepseek-v3", {}, {});
  real.Float("tokenizer.ggml.bos_token_id", 1.0f);
  EXPECT_THAT(ErrorOf(real), HasSubstr("tokenizer.ggml.bos_token_id is no integer"));
  GgufTestWriter reals = Small("deepseek-v3", {}, {});
  reals.Pair("tokenizer.ggml.token_type", 9, W::Raw(uint32_t{6}) + W::Raw(uint64_t{3}) + W::Raw(1.0f) + W::Raw(1.0f) + W::Raw(1.0f));
  EXPECT_THAT(ErrorOf(reals), HasSubstr("tokenizer.ggml.token_type is no number for each token"));
  GgufTestWriter huge = Small("deepseek-v3", {}, {});
  huge.Pair("tokenizer.ggml.token_type", 9, W::Raw(uint32_t{10}) + W::Raw(uint64_t{1}) + W::Raw(~uint64_t{0}));
  EXPECT_THAT(ErrorOf(huge), HasSubstr("holds 18446744073709551615"));
}

TEST_F(GgufTokenizerTest, ATokenizerJsonBesideTheFileIsBelieved) {
  Small("no such pre-tokenizer", {}, {}).Write(Path());
  EXPECT_FALSE(Texts(Path()).ok());
  std::ofstream(dir_ + "/tokenizer.json") << "{}";
  for (const std::string& path : {Path(), dir_}) {
    const auto texts = Texts(path);
    ASSERT_TRUE(texts.ok()) << texts.status();
    EXPECT_FALSE(texts->has_value());
  }
}

}  // namespace
}  // namespace hearth
