// The special tokens that go before and behind a text, such as BOS.
// Room: common/text. May touch: common/base. Threads: any; a plain value.
// Reads the post-processors TemplateProcessing, ByteLevel (which adds nothing) and Sequence; others are refused by
// name.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "common/base/status.h"

namespace hearth {

struct SpecialFrame {
  std::vector<int32_t> prefix;
  std::vector<int32_t> suffix;

  // `spec`: the "post_processor" member; null means an empty frame.
  static absl::StatusOr<SpecialFrame> Parse(const nlohmann::json& spec);

  // add_bos_token and add_eos_token, where said, overrule the post-processor for that one token.
  void SetBos(int32_t bos, bool add);
  void SetEos(int32_t eos, bool add);

  // Puts the frame around `ids`. A side that is already there, written in the text itself, is not added again.
  void Apply(std::vector<int32_t>* ids) const;
};

}  // namespace hearth
