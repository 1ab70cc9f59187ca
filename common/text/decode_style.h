// What a tokenizer's decoder does to the joined text of an output, applied piece by piece so that a stream equals the
// whole. Room: common/text. May touch: nothing. Threads: one at a time; a pure function of the text pushed so far.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hearth {

struct DecodeStyle {
  // Up to `strip_left_max` copies of `strip_content` go from the beginning (the Strip decoder of SentencePiece-like
  // chains).
  std::string strip_content = " ";
  int strip_left_max = 0;
  // tokenizer_config.json's clean_up_tokenization_spaces: no blank before . ? ! , and the English contractions.
  bool clean_up_spaces = false;
};

// Replaces `from` (not empty) by `to`, leftmost first and none overlapping, over text that arrives in parts.
class StreamReplacer {
 public:
  StreamReplacer(std::string_view from, std::string_view to) : from_(from), to_(to) {}
  std::string Push(std::string_view text);
  std::string Finish();

 private:
  std::string from_;
  std::string to_;
  std::string pending_;  // what may yet become `from_`
};

class TextStyler {
 public:
  explicit TextStyler(const DecodeStyle& style);
  std::string Push(std::string_view text);
  std::string Finish();

 private:
  std::string StripLeft(std::string_view text, bool at_end);

  std::string strip_content_;
  int strip_left_ = 0;         // copies that may still go
  std::string strip_pending_;  // the front of the output, while it may be another copy
  std::vector<StreamReplacer> replacers_;
};

}  // namespace hearth
