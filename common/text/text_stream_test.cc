// Streams of bytes cut anywhere: whole characters only, nothing of a stop string, and together the same text as at
// once.
#include "common/text/text_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "common/text/utf8.h"

namespace hearth {
namespace {

struct Result {
  std::string text;
  std::string matched;
  std::vector<std::string> deltas;
};

Result StreamOf(const std::vector<std::string>& tokens, const std::vector<std::string>& stops, const DecodeStyle& style = {}) {
  TextStream stream(stops, style);
  Result result;
  for (const std::string& token : tokens) result.deltas.push_back(stream.Push(token));
  result.deltas.push_back(stream.Finish());
  for (const std::string& delta : result.deltas) {
    EXPECT_FALSE(FirstInvalidUtf8(delta).has_value()) << "a delta is not valid UTF-8: " << testing::PrintToString(delta);
    result.text += delta;
  }
  result.matched = stream.matched();
  EXPECT_EQ(stream.stopped(), !result.matched.empty());
  return result;
}

std::vector<std::string> Bytes(const std::string& text) {
  std::vector<std::string> bytes;
  for (const char c : text) bytes.emplace_back(1, c);
  return bytes;
}

TEST(Utf8Test, OneReplacementForEachMaximalSubpart) {
  const std::string r(kReplacementCharacter);
  EXPECT_EQ(ReplaceInvalidUtf8("a\xF0\x9F\x98"
                               "b"),
            "a" + r + "b");                                              // a prefix that could have gone on
  EXPECT_EQ(ReplaceInvalidUtf8("\xF0\x80\x80"), r + r + r);              // overlong: no byte could have gone on
  EXPECT_EQ(ReplaceInvalidUtf8("\xED\xA0\x80"), r + r + r);              // a surrogate
  EXPECT_EQ(ReplaceInvalidUtf8("\xF4\x90\x80\x80"), r + r + r + r);      // beyond U+10FFFF
  EXPECT_EQ(ReplaceInvalidUtf8("\xC0\xAF\xFF\xE4\xBD"), r + r + r + r);  // the unfinished end is one
  EXPECT_EQ(ReplaceInvalidUtf8("\xE4\xBD\xE4\xBD\xA0"),
            r + "\xE4\xBD\xA0");  // the byte that breaks one begins the next
  EXPECT_EQ(FirstInvalidUtf8("abc\xC3\xA9\xFFz"), std::optional<size_t>(5));
  EXPECT_EQ(FirstInvalidUtf8("0123456789 \xF0\x9F\x98\xB8"), std::nullopt);
}

TEST(TextStreamTest, ACharacterSplitOverTokensIsSentWhole) {
  const Result result = StreamOf({"a", "\xF0\x9F\x98", "\xB8", "\xE4", "\xB8", "\xAD", "!"}, {});
  EXPECT_EQ(result.text, "a\xF0\x9F\x98\xB8\xE4\xB8\xAD!");
  EXPECT_THAT(result.deltas, testing::ElementsAre("a", "", "\xF0\x9F\x98\xB8", "", "", "\xE4\xB8\xAD", "!", ""));
}

TEST(TextStreamTest, InvalidBytesAreReplacedOnceTheyAreCertain) {
  TextStream stream(std::vector<std::string>{});
  EXPECT_EQ(stream.Push("\xF0\x9F"), "");
  EXPECT_EQ(stream.Push("x"), std::string(kReplacementCharacter) + "x");
  EXPECT_EQ(stream.Push("\xFF"), std::string(kReplacementCharacter));
  EXPECT_EQ(stream.Push("\xE4\xBD"), "");
  EXPECT_EQ(stream.Finish(), std::string(kReplacementCharacter));
}

TEST(TextStreamTest, AnyCutOfAnyBytesGivesTheWholeText) {
  std::mt19937 random(20);
  const std::string alphabet = "a \xF0\x9F\x98\xB8\xE4\xBD\xA0\xC3\xA9\xFF\xC0\xED\xA0\x80\xF4\x90";
  for (int round = 0; round < 3000; ++round) {
    std::string bytes;
    for (int i = random() % 24; i > 0; --i) bytes.push_back(alphabet[random() % alphabet.size()]);
    std::vector<std::string> tokens;
    for (size_t begin = 0; begin < bytes.size();) {
      const size_t length = 1 + random() % 4;
      tokens.push_back(bytes.substr(begin, length));
      begin += length;
    }
    ASSERT_EQ(StreamOf(tokens, {}).text, ReplaceInvalidUtf8(bytes)) << testing::PrintToString(bytes);
  }
}

TEST(TextStreamTest, StopStringsOverTokenEdges) {
  const std::string text = "abcDEFGHIJxyz";
  struct Case {
    std::vector<std::string> stops;
    std::string text;
    std::string matched;
  };
  const std::vector<Case> cases = {
      {{"DEFGHIJ"}, "abc", "DEFGHIJ"},
      {{"HI"}, "abcDEFG", "HI"},
      {{"DEF", "EFGH"}, "abc", "DEF"},
      {{"EFGH", "DEF"}, "abc", "DEF"},
      {{"DEFX"}, text, ""},
      {{"xyzz", "zz"}, text, ""},
      {{text}, "", text},
      {{"DEFGHIJ", "DE"}, "abc", "DE"},          // equal starts: the one completed first
      {{"FG", "cDEFGHIJx"}, "ab", "cDEFGHIJx"},  // the earlier start wins though it completes later
      {{"FG", "cDEFGHIJy"}, "abcDE", "FG"},      // and is released when it fails
      {{"z", "yzQ"}, "abcDEFGHIJxy", "z"},       // decided by the end of the output
      {{"", "J"}, "abcDEFGHI", "J"},
  };
  for (const Case& c : cases) {
    for (const std::vector<std::string>& tokens : {Bytes(text), {text}, {"abcDEFG", "HIJxyz"}, {"abcD", "", "EFGHIJ", "xyz"}}) {
      const Result result = StreamOf(tokens, c.stops);
      EXPECT_EQ(result.text, c.text) << testing::PrintToString(c.stops);
      EXPECT_EQ(result.matched, c.matched) << testing::PrintToString(c.stops);
    }
  }
}

TEST(TextStreamTest, NothingOfAStopIsSentAndWithheldTextComesAtOnceWhenItFails) {
  TextStream stream({"DEFX"});
  EXPECT_EQ(stream.Push("abcD"), "abc");
  EXPECT_EQ(stream.Push("EF"), "");
  EXPECT_EQ(stream.Push("G"), "DEFG");
  EXPECT_EQ(stream.Push("DEF"), "");
  EXPECT_EQ(stream.Push("X tail"), "");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.Push("more"), "");
  EXPECT_EQ(stream.Finish(), "");
}

TEST(TextStreamTest, AMultiByteStopCutInsideACharacter) {
  const Result result = StreamOf(Bytes("x\xE5\xAD\x97\xE6\xAE\xB5\xE7\xBB\x93y"), {"\xE6\xAE\xB5\xE7\xBB\x93"});
  EXPECT_EQ(result.text, "x\xE5\xAD\x97");
  EXPECT_EQ(result.matched, "\xE6\xAE\xB5\xE7\xBB\x93");
}

// The definition, spelled out: of all places where a stop stands, the first; there, the shortest.
std::pair<std::string, std::string> Reference(const std::string& text, const std::vector<std::string>& stops) {
  size_t best = std::string::npos;
  std::string matched;
  for (const std::string& stop : stops) {
    const size_t found = text.find(stop);
    if (found == std::string::npos) continue;
    if (found < best || (found == best && stop.size() < matched.size())) {
      best = found;
      matched = stop;
    }
  }
  return {text.substr(0, best), matched};
}

TEST(TextStreamTest, AgreesWithTheDefinitionOnRandomTexts) {
  std::mt19937 random(74);
  for (int round = 0; round < 5000; ++round) {
    const auto word = [&](size_t longest) {
      std::string s;
      for (size_t i = random() % longest + 1; i > 0; --i) s.push_back("abc"[random() % 3]);
      return s;
    };
    std::vector<std::string> stops;
    for (size_t i = random() % 4; i > 0; --i) stops.push_back(word(6));
    const std::string text = word(30);
    const auto [expected, matched] = Reference(text, stops);
    for (const auto& tokens : {Bytes(text), std::vector<std::string>{text}}) {
      const Result result = StreamOf(tokens, stops);
      ASSERT_EQ(result.text, expected) << text << " " << testing::PrintToString(stops);
      ASSERT_EQ(result.matched, matched) << text << " " << testing::PrintToString(stops);
    }
  }
}

TEST(TextStreamTest, LongStopsCostNoMoreThanShortOnes) {
  // Every position of the text begins a match of thousands of bytes that fails; rescanning would take minutes.
  const std::string stop = std::string(5000, 'a') + "b" + std::string(4999, 'a');
  const auto start = std::chrono::steady_clock::now();
  const Result result = StreamOf(Bytes(std::string(400000, 'a')), {stop, stop + "c"});
  EXPECT_EQ(result.text.size(), 400000u);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(TextStreamTest, CleanUpOfSpacesEqualsTheWholeText) {
  DecodeStyle style;
  style.clean_up_spaces = true;
  EXPECT_EQ(StreamOf(Bytes("Hello , world ! I do n't know , it 's ' quoted ' ."), {}, style).text, "Hello, world! I don't know, it's'quoted '.");
  EXPECT_EQ(StreamOf(Bytes(" . .  ."), {}, style).text, ".. .");
  // Matching looks at the text that is sent.
  EXPECT_EQ(StreamOf(Bytes("end . tail"), {"end."}, style).matched, "end.");
  std::mt19937 random(11);
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = random() % 30; i > 0; --i) text.push_back(" .,'ntsmver"[random() % 11]);
    ASSERT_EQ(StreamOf(Bytes(text), {}, style).text, StreamOf({text}, {}, style).text) << text;
  }
}

TEST(TextStreamTest, StripTakesFromTheBeginningOnly) {
  DecodeStyle style;
  style.strip_left_max = 1;
  EXPECT_EQ(StreamOf({" ", " a", " b"}, {}, style).text, " a b");
  EXPECT_EQ(StreamOf({"a", " b"}, {}, style).text, "a b");
  EXPECT_EQ(StreamOf({" "}, {}, style).text, "");
  EXPECT_EQ(StreamOf({" Hello"}, {}).text, " Hello");  // no such decoder: the space stays
}

}  // namespace
}  // namespace hearth
