// See tokenizer_config.h.
#include "common/text/tokenizer_config.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/text/json_access.h"

namespace hearth {
namespace {

bool Exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

// A special token's text: "text", {"content": "text"} or null.
absl::StatusOr<std::optional<std::string>> TokenText(const nlohmann::json& config, const char* key) {
  const nlohmann::json& value = JsonMember(config, key);
  std::optional<std::string> text;
  if (value.is_null()) return text;
  if (value.is_string()) {
    text = value.get<std::string>();
  } else {
    ASSIGN_OR_RETURN(text, JsonString(value, "content", key));
  }
  if (text->empty()) text.reset();
  return text;
}

absl::StatusOr<std::optional<bool>> OptionalBool(const nlohmann::json& config, const char* key) {
  if (JsonMember(config, key).is_null()) return std::optional<bool>();
  ASSIGN_OR_RETURN(const bool value, JsonBool(config, key, false, "(top)"));
  return std::optional<bool>(value);
}

absl::StatusOr<std::string> ChatTemplateOf(const nlohmann::json& config) {
  const nlohmann::json& value = JsonMember(config, "chat_template");
  if (value.is_null()) return std::string();
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return JsonTypeError("chat_template", "a string or an array of {name, template}", value);
  for (const nlohmann::json& entry : value) {
    if (JsonMember(entry, "name") == "default") return JsonString(entry, "template", "chat_template[]");
  }
  return absl::InvalidArgumentError("chat_template: several templates and none is named \"default\"");
}

}  // namespace

absl::StatusOr<AddedTokenRule> ParseAddedToken(const nlohmann::json& spec, int32_t id, const std::string& where) {
  AddedTokenRule rule;
  rule.id = id;
  ASSIGN_OR_RETURN(rule.content, JsonString(spec, "content", where));
  ASSIGN_OR_RETURN(rule.special, JsonBool(spec, "special", false, where));
  ASSIGN_OR_RETURN(rule.single_word, JsonBool(spec, "single_word", false, where));
  ASSIGN_OR_RETURN(rule.lstrip, JsonBool(spec, "lstrip", false, where));
  ASSIGN_OR_RETURN(rule.rstrip, JsonBool(spec, "rstrip", false, where));
  ASSIGN_OR_RETURN(rule.normalized, JsonBool(spec, "normalized", !rule.special, where));
  return rule;
}

absl::StatusOr<TokenizerConfig> TokenizerConfig::Parse(const nlohmann::json& json) {
  TokenizerConfig config;
  if (!json.is_object()) return JsonTypeError("(top)", "an object", json);
  ASSIGN_OR_RETURN(config.bos_text, TokenText(json, "bos_token"));
  ASSIGN_OR_RETURN(config.eos_text, TokenText(json, "eos_token"));
  ASSIGN_OR_RETURN(config.add_bos, OptionalBool(json, "add_bos_token"));
  ASSIGN_OR_RETURN(config.add_eos, OptionalBool(json, "add_eos_token"));
  ASSIGN_OR_RETURN(config.clean_up_spaces, JsonBool(json, "clean_up_tokenization_spaces", false, "(top)"));
  ASSIGN_OR_RETURN(config.chat_template, ChatTemplateOf(json));
  const nlohmann::json& added = JsonMember(json, "added_tokens_decoder");
  if (added.is_null()) return config;
  if (!added.is_object()) return JsonTypeError("added_tokens_decoder", "an object", added);
  for (const auto& [key, spec] : added.items()) {
    uint32_t id = 0;
    const std::string where = absl::StrCat("added_tokens_decoder.", key);
    if (!absl::SimpleAtoi(key, &id)) return absl::InvalidArgumentError(absl::StrCat(where, ": the key is not a token id"));
    ASSIGN_OR_RETURN(const int32_t checked_id, JsonTokenId(nlohmann::json(id), where));
    ASSIGN_OR_RETURN(AddedTokenRule rule, ParseAddedToken(spec, checked_id, where));
    config.added_tokens.push_back(std::move(rule));
  }
  return config;
}

absl::StatusOr<TokenizerConfig> TokenizerConfig::Read(const std::string& model_dir) {
  TokenizerConfig config;
  const std::string config_path = absl::StrCat(model_dir, "/tokenizer_config.json");
  if (Exists(config_path)) {
    ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(config_path));
    absl::StatusOr<TokenizerConfig> parsed = Parse(json);
    if (!parsed.ok()) return Annotate(parsed.status(), config_path);
    config = *std::move(parsed);
  }
  const std::string template_path = absl::StrCat(model_dir, "/chat_template.jinja");
  if (Exists(template_path)) {
    ASSIGN_OR_RETURN(config.chat_template, ReadTokenizerFile(template_path));
  }
  return config;
}

}  // namespace hearth
