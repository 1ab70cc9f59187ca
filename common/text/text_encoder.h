// From text to token ids: added tokens, normaliser, pre-tokeniser, BPE, in the reference's order.
// Room: common/text. May touch: its own parts only. Threads: any; const after construction.
// Trust: added tokens are looked for only where a run of the text says so, but the pieces between them may cross from
// one run to the next. So a prompt gives the ids that the reference gives for the same characters, and still nobody
// forges a token.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"
#include "common/text/added_tokens.h"
#include "common/text/bpe.h"
#include "common/text/normalizer.h"
#include "common/text/pre_tokenizer.h"

namespace hearth {

// A stretch of a text. Runs given together follow each other without a gap.
struct TrustRun {
  ByteRange range;
  bool parse_special = false;
};

class TextEncoder {
 public:
  static absl::StatusOr<std::unique_ptr<TextEncoder>> Build(Normalizer normalizer, PreTokenizer pre_tokenizer, std::unique_ptr<Bpe> bpe,
                                                            const std::vector<AddedTokenRule>& rules);

  // Appends the ids of `text` (valid UTF-8), which `runs` cover.
  absl::Status Encode(std::string_view text, const std::vector<TrustRun>& runs, std::vector<int32_t>* ids) const;

  const Bpe& bpe() const { return *bpe_; }

 private:
  struct Call;  // what lives as long as one Encode

  TextEncoder(Normalizer normalizer, PreTokenizer pre_tokenizer, std::unique_ptr<Bpe> bpe)
      : normalizer_(std::move(normalizer)), pre_tokenizer_(std::move(pre_tokenizer)), bpe_(std::move(bpe)) {}

  // Text between two added tokens that are looked for before normalisation.
  absl::Status EncodeBetween(std::string_view text, ByteRange segment, const std::vector<TrustRun>& runs, Call* call) const;
  // Normalised text that lies in runs of one kind, or whose added tokens were found by the caller.
  absl::Status EncodeNormalized(std::string_view text, const std::vector<AddedTokenMatch>& matches, Call* call) const;
  absl::Status EncodePieces(std::string_view text, Call* call) const;

  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  std::unique_ptr<Bpe> bpe_;
  AddedTokenMatcher raw_tokens_;         // looked for in the text as it came
  AddedTokenMatcher normalized_tokens_;  // looked for in normalised text
};

}  // namespace hearth
