// tokenizer_config.json and chat_template.jinja: what stands beside tokenizer.json and changes what a tokenizer does.
// Room: common/text. May touch: common/base. Threads: any; a plain value.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/text/added_tokens.h"

namespace hearth {

struct TokenizerConfig {
  std::optional<std::string> bos_text;
  std::optional<std::string> eos_text;
  std::optional<bool> add_bos;  // nothing said: the post-processor decides
  std::optional<bool> add_eos;
  bool clean_up_spaces = false;
  std::vector<AddedTokenRule> added_tokens;  // added_tokens_decoder
  std::string chat_template;                 // chat_template.jinja before chat_template, of several the one named "default"

  // Absent files are fine; unreadable or wrongly typed ones are InvalidArgument with file and key.
  static absl::StatusOr<TokenizerConfig> Read(const std::string& model_dir);
  // `json`: what tokenizer_config.json holds. Errors name the key.
  static absl::StatusOr<TokenizerConfig> Parse(const nlohmann::json& json);
};

// An entry of "added_tokens" or "added_tokens_decoder".
absl::StatusOr<AddedTokenRule> ParseAddedToken(const nlohmann::json& spec, int32_t id, const std::string& where);

}  // namespace hearth
