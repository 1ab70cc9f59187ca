// See special_frame.h.
#include "common/text/special_frame.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/text/json_access.h"

namespace hearth {
namespace {

constexpr int kSequenceDepthMax = 16;

absl::Status ParseTemplate(const nlohmann::json& spec, const std::string& where, SpecialFrame* frame) {
  const nlohmann::json& single = JsonMember(spec, "single");
  if (!single.is_array()) return JsonTypeError(absl::StrCat(where, ".single"), "an array", single);
  const nlohmann::json& tokens = JsonMember(spec, "special_tokens");
  std::vector<int32_t> prefix;
  std::vector<int32_t> suffix;
  bool seen_text = false;
  for (const nlohmann::json& part : single) {
    if (part.is_object() && part.contains("Sequence")) {
      if (seen_text) return absl::InvalidArgumentError(absl::StrCat(where, ".single: names the text twice; once is supported"));
      seen_text = true;
      continue;
    }
    absl::StatusOr<std::string> name = JsonString(JsonMember(part, "SpecialToken"), "id", absl::StrCat(where, ".single[].SpecialToken"));
    if (!name.ok()) return name.status();
    const nlohmann::json& ids = JsonMember(JsonMember(tokens, name->c_str()), "ids");
    const std::string ids_where = absl::StrCat(where, ".special_tokens.", *name, ".ids");
    if (!ids.is_array()) return JsonTypeError(ids_where, "an array of token ids", ids);
    for (const nlohmann::json& id : ids) {
      ASSIGN_OR_RETURN(const int32_t token, JsonTokenId(id, ids_where));
      (seen_text ? suffix : prefix).push_back(token);
    }
  }
  if (!seen_text) return absl::InvalidArgumentError(absl::StrCat(where, ".single: does not say where the text goes"));
  // A later processor of a sequence frames what an earlier one made.
  frame->prefix.insert(frame->prefix.begin(), prefix.begin(), prefix.end());
  frame->suffix.insert(frame->suffix.end(), suffix.begin(), suffix.end());
  return absl::OkStatus();
}

absl::Status ParseProcessor(const nlohmann::json& spec, const std::string& where, int depth, SpecialFrame* frame) {
  if (depth > kSequenceDepthMax) return absl::InvalidArgumentError(absl::StrCat(where, ": sequences nest too deeply"));
  ASSIGN_OR_RETURN(const std::string type, JsonString(spec, "type", where));
  if (type == "ByteLevel") return absl::OkStatus();
  if (type == "TemplateProcessing") return ParseTemplate(spec, where, frame);
  if (type == "Sequence") {
    const nlohmann::json& parts = JsonMember(spec, "processors");
    if (!parts.is_array()) return JsonTypeError(absl::StrCat(where, ".processors"), "an array", parts);
    for (size_t i = 0; i < parts.size(); ++i) {
      RETURN_IF_ERROR(ParseProcessor(parts[i], absl::StrCat(where, ".processors[", i, "]"), depth + 1, frame));
    }
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(where, ".type: \"", type, "\" is not supported; supported are TemplateProcessing, ByteLevel and Sequence"));
}

}  // namespace

absl::StatusOr<SpecialFrame> SpecialFrame::Parse(const nlohmann::json& spec) {
  SpecialFrame frame;
  if (spec.is_null()) return frame;
  RETURN_IF_ERROR(ParseProcessor(spec, "post_processor", 0, &frame));
  return frame;
}

void SpecialFrame::SetBos(int32_t bos, bool add) {
  const auto found = std::find(prefix.begin(), prefix.end(), bos);
  if (add && found == prefix.end()) prefix.insert(prefix.begin(), bos);
  if (!add && found != prefix.end()) prefix.erase(found);
}

void SpecialFrame::SetEos(int32_t eos, bool add) {
  const auto found = std::find(suffix.begin(), suffix.end(), eos);
  if (add && found == suffix.end()) suffix.push_back(eos);
  if (!add && found != suffix.end()) suffix.erase(found);
}

void SpecialFrame::Apply(std::vector<int32_t>* ids) const {
  const bool has_prefix = !prefix.empty() && !ids->empty() && ids->front() == prefix.front();
  const bool has_suffix = !suffix.empty() && !ids->empty() && ids->back() == suffix.back();
  if (!has_prefix) ids->insert(ids->begin(), prefix.begin(), prefix.end());
  if (!has_suffix) ids->insert(ids->end(), suffix.begin(), suffix.end());
}

}  // namespace hearth
