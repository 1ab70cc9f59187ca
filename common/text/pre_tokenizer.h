// Pre-tokenisers of tokenizer.json: cut a text into the pieces that BPE merges, none across a cut.
// Room: common/text. May touch: common/base. Threads: any; const after Parse.
// Reads: Split (all behaviours), ByteLevel, Digits, Punctuation, Whitespace, WhitespaceSplit, Sequence. Others are
// refused by name. Each step sees every piece as a text of its own, as the reference does: a look-ahead ends where its
// piece ends.
#pragma once

#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"
#include "common/text/regex.h"

namespace hearth {

// Texts that pieces point into when they are not part of the input. Grows only; views stay valid as long as it lives.
using TextArena = std::deque<std::string>;

class PreTokenizer {
 public:
  // `spec`: the "pre_tokenizer" member; null leaves every text one piece.
  static absl::StatusOr<PreTokenizer> Parse(const nlohmann::json& spec);

  // True if the vocabulary is spelled in the byte-level alphabet. Pieces are plain bytes all the same.
  bool byte_level() const { return byte_level_; }

  // Sets `pieces` to the non-empty pieces of `text` in their order. `text` must outlive them.
  absl::Status Split(std::string_view text, TextArena* arena, std::vector<std::string_view>* pieces) const;

 private:
  enum class Behavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct SplitStep {
    Regex pattern;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
  };
  // Exactly one of the three happens: a prefix space, a change into the byte-level alphabet, or a split.
  struct Step {
    enum class Kind { kPrefixSpace, kSpellBytes, kSplit } kind;
    std::vector<SplitStep> split;  // one, or none
  };

  static absl::StatusOr<Behavior> ParseBehavior(const nlohmann::json& spec, const char* fallback, const std::string& where);
  absl::Status ParseStep(const nlohmann::json& spec, const std::string& where, int depth);
  absl::Status AddSplit(absl::StatusOr<Regex> pattern, Behavior behavior, bool invert);
  static void AddPieces(const SplitStep& step, std::string_view text, const std::vector<ByteRange>& matches, std::vector<std::string_view>* out);

  std::vector<Step> steps_;
  bool byte_level_ = false;
  bool spelled_ = false;  // a split follows ByteLevel and sees the alphabet's characters
};

}  // namespace hearth
