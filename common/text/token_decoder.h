// Decoders of tokenizer.json: the bytes that a token stands for, and what is done to the joined text.
// Room: common/text. May touch: common/base. Threads: any; const after Parse.
// Reads: ByteLevel, Replace, ByteFallback, Fuse, Strip, Sequence. Others are refused by name.
// Where bytes are no valid UTF-8, one U+FFFD stands for each maximal subpart, in streams and at once alike; the
// reference's ByteFallback instead writes one for every byte of the whole run of byte tokens, which no stream can know
// in time.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/base/status.h"
#include "common/text/decode_style.h"
#include "common/text/regex.h"

namespace hearth {

class TokenDecoder {
 public:
  // `spec`: the "decoder" member.
  static absl::StatusOr<TokenDecoder> Parse(const nlohmann::json& spec);

  // The bytes of a token spelled `spelling` (valid UTF-8). `added`: an added token, which is never spelled in the
  // byte-level alphabet.
  absl::StatusOr<std::string> Bytes(std::string_view spelling, bool added) const;

  const DecodeStyle& style() const { return style_; }

 private:
  struct ByteLevelStep {};
  struct ByteFallbackStep {};
  struct ReplaceStep {
    Regex pattern;
    std::string content;
  };
  struct StripStep {
    std::string content;
    int num_left = 0;
    int num_right = 0;
  };
  absl::Status ParseStep(const nlohmann::json& spec, const std::string& where, int depth);

  std::vector<std::variant<ByteLevelStep, ByteFallbackStep, ReplaceStep, StripStep>> steps_;  // for each token by itself
  bool fused_ = false;                                                                        // what follows is done to the whole text
  DecodeStyle style_;
};

}  // namespace hearth
