// From token bytes to text that may be sent: never half a character, never a part of a stop string.
// Room: common/text. A pure function of the tokens pushed so far: a stream that is resumed elsewhere pushes the same
// tokens again. Without stop strings the texts together equal Tokenizer::Decode of all tokens, however the bytes were
// cut.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/text/decode_style.h"

namespace hearth {

// Looks for several texts at once in text that arrives in parts; linear in both, whatever they are.
class StopMatcher {
 public:
  explicit StopMatcher(const std::vector<std::string>& stops);

  // Takes `text` in. Returns true once a match is certain: no other stop can still begin earlier.
  bool Push(std::string_view text);
  // No text follows: a complete match counts even if an earlier one was still possible.
  bool Finish();

  // Offsets count from the first byte pushed. Before `safe_end` no match can begin any more.
  uint64_t safe_end() const { return safe_end_; }
  uint64_t match_begin() const { return best_begin_; }
  const std::string& matched() const { return stops_[best_].text; }

 private:
  static constexpr size_t kNone = ~size_t{0};
  struct Stop {
    std::string text;
    std::vector<uint32_t> fallback;  // Knuth-Morris-Pratt: longest proper prefix that ends the prefix of each length
    uint32_t matched_bytes = 0;
  };
  void Accept(char byte);

  std::vector<Stop> stops_;
  uint64_t seen_ = 0;
  uint64_t safe_end_ = 0;
  size_t best_ = kNone;  // the earliest complete match so far
  uint64_t best_begin_ = 0;
  bool certain_ = false;
};

class TextStream {
 public:
  // `stops`: empty ones are ignored. Matching looks at output only, the earliest match wins (of equal starts, the one
  // completed first); so a match is reported only when no stop that began before it can still be completed. `style`:
  // the tokenizer's decode_style().
  explicit TextStream(const std::vector<std::string>& stops, const DecodeStyle& style = {});

  // Adds one token's bytes; returns what may be sent now (possibly nothing). Bytes that can't begin or continue a
  // character become U+FFFD once that is certain. After a stop matched, returns "" for ever.
  std::string Push(std::string_view token_bytes);
  // The end of the output: releases withheld text (an unfinished character as U+FFFD). May still find a stop.
  std::string Finish();

  bool stopped() const { return stopped_; }
  // The stop string that matched; empty before.
  const std::string& matched() const { return matched_; }

 private:
  std::string TakeCharacters(bool at_end);
  std::string Release(std::string_view text, bool at_end);

  TextStyler styler_;
  StopMatcher matcher_;
  std::string bytes_;           // not yet complete characters
  std::string pending_;         // complete characters withheld because a stop string may begin in them
  uint64_t pending_begin_ = 0;  // the offset of pending_ in the output
  bool stopped_ = false;
  std::string matched_;
};

}  // namespace hearth
