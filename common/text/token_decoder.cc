// See token_decoder.h.
#include "common/text/token_decoder.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/text/byte_level.h"
#include "common/text/json_access.h"
#include "common/text/utf8.h"

namespace hearth {
namespace {

constexpr int kSequenceDepthMax = 16;
constexpr uint64_t kStripMax = 1 << 20;

absl::StatusOr<int> StripCount(const nlohmann::json& spec, const char* key, const std::string& where) {
  const nlohmann::json& count = JsonMember(spec, key);
  if (!count.is_number_unsigned() || count.get<uint64_t>() > kStripMax) return JsonTypeError(absl::StrCat(where, ".", key), "a number from 0", count);
  return static_cast<int>(count.get<uint64_t>());
}

// "<0x0A>" -> 0x0A
std::optional<char> FallbackByte(std::string_view spelling) {
  int byte = 0;
  if (spelling.size() != 6 || spelling.substr(0, 3) != "<0x" || spelling[5] != '>' || !absl::SimpleHexAtoi(Sv(spelling.substr(3, 2)), &byte))
    return std::nullopt;
  return static_cast<char>(byte);
}

}  // namespace

absl::StatusOr<TokenDecoder> TokenDecoder::Parse(const nlohmann::json& spec) {
  if (spec.is_null()) {
    return absl::InvalidArgumentError(
        "decoder is missing or null: how tokens become text is not said; add the one that fits, {\"type\": "
        "\"ByteLevel\"} for a byte-level vocabulary");
  }
  TokenDecoder decoder;
  RETURN_IF_ERROR(decoder.ParseStep(spec, "decoder", 0));
  return decoder;
}

absl::Status TokenDecoder::ParseStep(const nlohmann::json& spec, const std::string& where, int depth) {
  if (depth > kSequenceDepthMax) return absl::InvalidArgumentError(absl::StrCat(where, ": sequences nest too deeply"));
  ASSIGN_OR_RETURN(const std::string type, JsonString(spec, "type", where));
  const auto after_fuse = [&] {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", type, " after Fuse is not supported, only Strip of the beginning is"));
  };
  if (type == "Sequence") {
    const nlohmann::json& parts = JsonMember(spec, "decoders");
    if (!parts.is_array()) return JsonTypeError(absl::StrCat(where, ".decoders"), "an array", parts);
    for (size_t i = 0; i < parts.size(); ++i) {
      RETURN_IF_ERROR(ParseStep(parts[i], absl::StrCat(where, ".decoders[", i, "]"), depth + 1));
    }
  } else if (type == "ByteLevel") {
    if (fused_) return after_fuse();
    steps_.emplace_back(ByteLevelStep{});
    fused_ = true;  // it joins all tokens
  } else if (type == "ByteFallback") {
    if (fused_) return after_fuse();
    steps_.emplace_back(ByteFallbackStep{});
  } else if (type == "Fuse") {
    fused_ = true;
  } else if (type == "Replace") {
    if (fused_) return after_fuse();
    ASSIGN_OR_RETURN(Regex pattern, ParsePattern(JsonMember(spec, "pattern"), absl::StrCat(where, ".pattern")));
    ASSIGN_OR_RETURN(std::string content, JsonString(spec, "content", where));
    steps_.emplace_back(ReplaceStep{std::move(pattern), std::move(content)});
  } else if (type == "Strip") {
    StripStep strip;
    ASSIGN_OR_RETURN(strip.content, JsonString(spec, "content", where));
    ASSIGN_OR_RETURN(strip.num_left, StripCount(spec, "start", where));
    ASSIGN_OR_RETURN(strip.num_right, StripCount(spec, "stop", where));
    if (strip.content.empty()) return absl::InvalidArgumentError(absl::StrCat(where, ".content is empty; it must be one character"));
    if (!fused_) {
      steps_.emplace_back(std::move(strip));
    } else if (strip.num_right > 0 || style_.strip_left_max > 0) {
      return after_fuse();
    } else {
      style_.strip_content = strip.content;
      style_.strip_left_max = strip.num_left;
    }
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ".type: \"", type, "\" is not supported; supported are ByteLevel, Replace, ByteFallback, Fuse, Strip and Sequence"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> TokenDecoder::Bytes(std::string_view spelling, bool added) const {
  std::string bytes(spelling);
  for (const auto& step : steps_) {
    if (std::holds_alternative<ByteLevelStep>(step)) {
      if (added) continue;
      // A token with a character outside the alphabet stands for itself.
      if (std::optional<std::string> plain = FromByteLevel(bytes)) bytes = *std::move(plain);
    } else if (std::holds_alternative<ByteFallbackStep>(step)) {
      // Nothing that follows in a chain looks into single bytes.
      if (const std::optional<char> byte = FallbackByte(bytes)) return std::string(1, *byte);
    } else if (const auto* replace = std::get_if<ReplaceStep>(&step)) {
      std::vector<ByteRange> matches;
      RETURN_IF_ERROR(replace->pattern.FindAll(bytes, &matches));
      std::string replaced;
      size_t copied = 0;
      for (const ByteRange& match : matches) {
        replaced.append(bytes, copied, match.begin - copied);
        replaced += replace->content;
        copied = match.end;
      }
      replaced.append(bytes, copied);
      bytes = std::move(replaced);
    } else if (const auto* strip = std::get_if<StripStep>(&step)) {
      std::string_view rest = bytes;
      for (int i = 0; i < strip->num_left && rest.substr(0, strip->content.size()) == strip->content; ++i) rest.remove_prefix(strip->content.size());
      for (int i = 0;
           i < strip->num_right && rest.size() >= strip->content.size() && rest.substr(rest.size() - strip->content.size()) == strip->content; ++i) {
        rest.remove_suffix(strip->content.size());
      }
      bytes = std::string(rest);
    }
  }
  return bytes;
}

}  // namespace hearth
