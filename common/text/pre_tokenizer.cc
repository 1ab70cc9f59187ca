// See pre_tokenizer.h.
#include "common/text/pre_tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/text/byte_level.h"
#include "common/text/json_access.h"

namespace hearth {
namespace {

constexpr int kSequenceDepthMax = 16;

// GPT-2's split, which ByteLevel does by itself unless use_regex is false.
constexpr std::string_view kByteLevelPattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct Part {
  ByteRange range;
  bool is_match;
};

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::Parse(const nlohmann::json& spec) {
  PreTokenizer pre_tokenizer;
  if (spec.is_null()) return pre_tokenizer;
  RETURN_IF_ERROR(pre_tokenizer.ParseStep(spec, "pre_tokenizer", 0));
  // Spelling bytes costs time and only matters to splits that come after it.
  while (!pre_tokenizer.steps_.empty() && pre_tokenizer.steps_.back().kind == Step::Kind::kSpellBytes) pre_tokenizer.steps_.pop_back();
  for (const Step& step : pre_tokenizer.steps_) pre_tokenizer.spelled_ |= step.kind == Step::Kind::kSpellBytes;
  return pre_tokenizer;
}

absl::StatusOr<PreTokenizer::Behavior> PreTokenizer::ParseBehavior(const nlohmann::json& spec, const char* fallback, const std::string& where) {
  std::string name = fallback;
  if (!JsonMember(spec, "behavior").is_null()) {
    ASSIGN_OR_RETURN(name, JsonString(spec, "behavior", where));
  }
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  return absl::InvalidArgumentError(
      absl::StrCat(where, ".behavior: \"", name, "\" is not known; known are Isolated, Removed, MergedWithPrevious, MergedWithNext and Contiguous"));
}

absl::Status PreTokenizer::AddSplit(absl::StatusOr<Regex> pattern, Behavior behavior, bool invert) {
  if (!pattern.ok()) return pattern.status();
  Step step{Step::Kind::kSplit, {}};
  step.split.push_back(SplitStep{*std::move(pattern), behavior, invert});
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

absl::Status PreTokenizer::ParseStep(const nlohmann::json& spec, const std::string& where, int depth) {
  if (depth > kSequenceDepthMax) return absl::InvalidArgumentError(absl::StrCat(where, ": sequences nest too deeply"));
  ASSIGN_OR_RETURN(const std::string type, JsonString(spec, "type", where));
  if (type == "Sequence") {
    const nlohmann::json& parts = JsonMember(spec, "pretokenizers");
    if (!parts.is_array()) return JsonTypeError(absl::StrCat(where, ".pretokenizers"), "an array", parts);
    for (size_t i = 0; i < parts.size(); ++i) {
      RETURN_IF_ERROR(ParseStep(parts[i], absl::StrCat(where, ".pretokenizers[", i, "]"), depth + 1));
    }
    return absl::OkStatus();
  }
  if (type == "Split") {
    ASSIGN_OR_RETURN(const Behavior behavior, ParseBehavior(spec, "", where));
    ASSIGN_OR_RETURN(const bool invert, JsonBool(spec, "invert", false, where));
    return AddSplit(ParsePattern(JsonMember(spec, "pattern"), absl::StrCat(where, ".pattern")), behavior, invert);
  }
  if (type == "ByteLevel") {
    if (byte_level_) return absl::InvalidArgumentError(absl::StrCat(where, ": ByteLevel a second time; one is supported"));
    byte_level_ = true;
    ASSIGN_OR_RETURN(const bool add_prefix_space, JsonBool(spec, "add_prefix_space", true, where));
    ASSIGN_OR_RETURN(const bool use_regex, JsonBool(spec, "use_regex", true, where));
    if (add_prefix_space) steps_.push_back(Step{Step::Kind::kPrefixSpace, {}});
    if (use_regex) RETURN_IF_ERROR(AddSplit(Regex::Compile(kByteLevelPattern), Behavior::kIsolated, false));
    steps_.push_back(Step{Step::Kind::kSpellBytes, {}});
    return absl::OkStatus();
  }
  if (type == "Digits") {
    ASSIGN_OR_RETURN(const bool individual, JsonBool(spec, "individual_digits", false, where));
    return AddSplit(Regex::Compile("\\p{N}"), individual ? Behavior::kIsolated : Behavior::kContiguous, false);
  }
  if (type == "Punctuation") {
    ASSIGN_OR_RETURN(const Behavior behavior, ParseBehavior(spec, "Isolated", where));
    return AddSplit(Regex::Compile("[!-/:-@\\[-`{-~\\p{P}]"), behavior, false);
  }
  if (type == "Whitespace") return AddSplit(Regex::Compile("\\w+|[^\\w\\s]+"), Behavior::kRemoved, true);
  if (type == "WhitespaceSplit") return AddSplit(Regex::Compile("\\s"), Behavior::kRemoved, false);
  return absl::InvalidArgumentError(absl::StrCat(where, ".type: \"", type,
                                                 "\" is not supported; supported are Split, ByteLevel, Digits, "
                                                 "Punctuation, Whitespace, WhitespaceSplit and Sequence"));
}

void PreTokenizer::AddPieces(const SplitStep& step, std::string_view text, const std::vector<ByteRange>& matches,
                             std::vector<std::string_view>* out) {
  const auto add = [&](const ByteRange& range) {
    if (range.begin < range.end) out->push_back(text.substr(range.begin, range.end - range.begin));
  };
  if (step.behavior == Behavior::kIsolated) {  // by far the most common, so without a list of parts
    size_t end = 0;
    for (const ByteRange& match : matches) {
      add({end, match.begin});
      add(match);
      end = match.end;
    }
    add({end, text.size()});
    return;
  }
  std::vector<Part> parts;
  size_t end = 0;
  for (const ByteRange& match : matches) {
    if (match.begin > end) parts.push_back({{end, match.begin}, step.invert});
    parts.push_back({match, !step.invert});
    end = match.end;
  }
  if (end < text.size()) parts.push_back({{end, text.size()}, step.invert});

  std::vector<ByteRange> ranges;
  bool previous_match = false;
  switch (step.behavior) {
    case Behavior::kIsolated: break;
    case Behavior::kRemoved:
      for (const Part& part : parts) {
        if (!part.is_match) ranges.push_back(part.range);
      }
      break;
    case Behavior::kContiguous:
      for (const Part& part : parts) {
        if (part.is_match == previous_match && !ranges.empty()) {
          ranges.back().end = part.range.end;
        } else {
          ranges.push_back(part.range);
        }
        previous_match = part.is_match;
      }
      break;
    case Behavior::kMergedWithPrevious:
      for (const Part& part : parts) {
        if (part.is_match && !previous_match && !ranges.empty()) {
          ranges.back().end = part.range.end;
        } else {
          ranges.push_back(part.range);
        }
        previous_match = part.is_match;
      }
      break;
    case Behavior::kMergedWithNext:
      for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
        if (part->is_match && !previous_match && !ranges.empty()) {
          ranges.back().begin = part->range.begin;
        } else {
          ranges.push_back(part->range);
        }
        previous_match = part->is_match;
      }
      std::reverse(ranges.begin(), ranges.end());
      break;
  }
  for (const ByteRange& range : ranges) add(range);
}

absl::Status PreTokenizer::Split(std::string_view text, TextArena* arena, std::vector<std::string_view>* pieces) const {
  pieces->clear();
  if (text.empty()) return absl::OkStatus();
  pieces->push_back(text);
  std::vector<std::string_view> next;
  std::vector<ByteRange> matches;
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Step::Kind::kPrefixSpace:
        for (std::string_view& piece : *pieces) {
          if (piece[0] != ' ') piece = arena->emplace_back(absl::StrCat(" ", Sv(piece)));
        }
        break;
      case Step::Kind::kSpellBytes:
        for (std::string_view& piece : *pieces) piece = arena->emplace_back(ToByteLevel(piece));
        break;
      case Step::Kind::kSplit:
        next.clear();
        next.reserve(pieces->size() + text.size() / 8);
        for (const std::string_view piece : *pieces) {
          matches.clear();
          RETURN_IF_ERROR(step.split[0].pattern.FindAll(piece, &matches));
          AddPieces(step.split[0], piece, matches, &next);
        }
        pieces->swap(next);
        break;
    }
  }
  if (spelled_) {
    for (std::string_view& piece : *pieces) piece = arena->emplace_back(*FromByteLevel(piece));
  }
  return absl::OkStatus();
}

}  // namespace hearth
