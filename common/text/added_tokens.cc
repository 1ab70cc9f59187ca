// See added_tokens.h.
#include "common/text/added_tokens.h"

#include <algorithm>

#include "common/text/unicode_class.h"
#include "common/text/utf8.h"

namespace hearth {
namespace {

// Where the character that ends at `end` begins.
size_t PreviousCharacter(std::string_view text, size_t end) {
  do {
    --end;
  } while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
  return end;
}

bool WordEndsAt(std::string_view text, size_t position) {
  if (position == 0) return false;
  size_t start = PreviousCharacter(text, position);
  return IsWordCharacter(DecodeUtf8(text, &start));
}

bool WordBeginsAt(std::string_view text, size_t position) { return position < text.size() && IsWordCharacter(DecodeUtf8(text, &position)); }

// The first byte of the white space that ends at `position`, but not before `limit`.
size_t SpaceBegin(std::string_view text, size_t position, size_t limit) {
  while (position > limit) {
    const size_t start = PreviousCharacter(text, position);
    size_t cursor = start;
    if (start < limit || !IsWhiteSpace(DecodeUtf8(text, &cursor))) break;
    position = start;
  }
  return position;
}

size_t SpaceEnd(std::string_view text, size_t position) {
  while (position < text.size()) {
    size_t cursor = position;
    if (!IsWhiteSpace(DecodeUtf8(text, &cursor))) break;
    position = cursor;
  }
  return position;
}

}  // namespace

AddedTokenMatcher AddedTokenMatcher::Build(const std::vector<AddedTokenRule>& rules, const std::vector<std::string>& patterns) {
  AddedTokenMatcher matcher;
  matcher.rules_ = rules;
  for (size_t i = 0; i < rules.size(); ++i) {
    const std::string& pattern = patterns[i];
    if (pattern.empty()) continue;
    uint32_t node = 0;
    for (const char c : pattern) {
      const auto [edge, added] =
          matcher.edges_.try_emplace(EdgeKey(node, static_cast<unsigned char>(c)), static_cast<uint32_t>(matcher.nodes_.size()));
      if (added) matcher.nodes_.emplace_back();
      node = edge->second;
    }
    if (matcher.nodes_[node].rule < 0) matcher.nodes_[node].rule = static_cast<int32_t>(i);
    matcher.begins_[static_cast<unsigned char>(pattern[0])] = true;
  }
  return matcher;
}

void AddedTokenMatcher::Find(std::string_view text, ByteRange run, std::vector<AddedTokenMatch>* matches) const {
  if (empty()) return;
  size_t taken = matches->empty() ? 0 : matches->back().range.end;
  for (size_t position = run.begin; position < run.end;) {
    if (!begins_[static_cast<unsigned char>(text[position])]) {
      ++position;
      continue;
    }
    int32_t rule_index = -1;
    size_t end = position;
    uint32_t node = 0;
    for (size_t i = position; i < run.end; ++i) {
      const auto edge = edges_.find(EdgeKey(node, static_cast<unsigned char>(text[i])));
      if (edge == edges_.end()) break;
      node = edge->second;
      if (nodes_[node].rule >= 0) {
        rule_index = nodes_[node].rule;
        end = i + 1;
      }
    }
    if (rule_index < 0) {
      ++position;
      continue;
    }
    const AddedTokenRule& rule = rules_[rule_index];
    ByteRange range{position, end};
    position = end;  // a match that is discarded below still uses up its text
    if (rule.single_word && (WordEndsAt(text, range.begin) || WordBeginsAt(text, range.end))) continue;
    if (rule.lstrip) range.begin = SpaceBegin(text, range.begin, taken);
    if (rule.rstrip) range.end = SpaceEnd(text, range.end);
    range.begin = std::min(std::max(range.begin, taken), range.end);
    matches->push_back({range, rule.id});
    taken = range.end;
  }
}

}  // namespace hearth
