// From token bytes to text that may be sent: never half a character, never a part of a stop string.
// Room: common/text. A pure function of the tokens pushed so far: a stream that is resumed elsewhere pushes the same tokens again.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hearth {

class TextStream {
 public:
  // `stops`: none empty. Matching looks at output only, the earliest match wins (of equal starts, the one completed first).
  explicit TextStream(std::vector<std::string> stops);

  // Adds one token's bytes; returns what may be sent now (possibly nothing). Bytes that can't begin or continue a character
  // become U+FFFD once that is certain. After a stop matched, returns "" for ever.
  std::string Push(std::string_view token_bytes);
  // The end of the output: releases withheld text (an unfinished character as U+FFFD).
  std::string Finish();

  bool stopped() const { return stopped_; }
  // The stop string that matched; empty before.
  const std::string& matched() const { return matched_; }

 private:
  std::string TakeSafe(bool at_end);

  std::vector<std::string> stops_;
  std::string bytes_;    // not yet complete characters
  std::string pending_;  // complete characters withheld because a stop string may begin in them
  bool stopped_ = false;
  std::string matched_;
};

}  // namespace hearth
