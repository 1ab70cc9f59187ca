// Added tokens: texts that are one token wherever they stand, found before anything else happens to a text.
// Room: common/text. May touch: regex.h. Threads: any; const after Build.
// Matches are leftmost, of those the longest, none overlapping: a walk in a trie from every byte that can begin one.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/text/regex.h"

namespace hearth {

// One entry of "added_tokens".
struct AddedTokenRule {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space behind it
  bool normalized = true;    // looked for after normalisation, not before
};

struct AddedTokenMatch {
  ByteRange range;
  int32_t id = 0;
};

class AddedTokenMatcher {
 public:
  // `patterns[i]`: the text that stands for rules[i] (its content, or that normalised). Empty patterns never match.
  static AddedTokenMatcher Build(const std::vector<AddedTokenRule>& rules, const std::vector<std::string>& patterns);

  bool empty() const { return nodes_.size() == 1; }

  // Appends the matches that lie in [run.begin, run.end) of `text`; neighbours outside the run count for words and
  // white space. `text` must be valid UTF-8.
  void Find(std::string_view text, ByteRange run, std::vector<AddedTokenMatch>* matches) const;

 private:
  struct Node {
    int32_t rule = -1;
  };
  static uint64_t EdgeKey(uint32_t node, unsigned char byte) { return static_cast<uint64_t>(node) << 8 | byte; }

  std::vector<AddedTokenRule> rules_;
  std::vector<Node> nodes_{Node{}};
  absl::flat_hash_map<uint64_t, uint32_t> edges_;
  std::array<bool, 256> begins_{};
};

}  // namespace hearth
