#include "services/router/openai/reasoning.h"

#include <algorithm>

namespace hearth::router {
namespace {

constexpr std::string_view kOpen = "<think>";
constexpr std::string_view kClose = "</think>";

// How many bytes at the end of `text` could begin `tag`.
size_t PartialTag(std::string_view text, std::string_view tag) {
  for (size_t n = std::min(text.size(), tag.size() - 1); n > 0; --n) {
    if (text.substr(text.size() - n) == tag.substr(0, n)) return n;
  }
  return 0;
}

}  // namespace

Thought ThoughtAtEndOf(std::string_view turn) {
  turn.remove_prefix(std::min(turn.find_first_not_of(" \t\r\n"), turn.size()));
  if (turn.substr(0, kOpen.size()) != kOpen) return Thought::kNone;
  const std::string_view behind = turn.substr(kOpen.size());
  if (behind.find(kClose) != std::string_view::npos) return Thought::kNone;
  return behind.find_first_not_of(" \t\r\n") == std::string_view::npos ? Thought::kOpened : Thought::kMidway;
}

ReasoningPart ReasoningSplitter::Push(std::string_view text) {
  pending_ += text;
  ReasoningPart part;
  Run(false, &part);
  return part;
}

ReasoningPart ReasoningSplitter::Finish() {
  ReasoningPart part;
  Run(true, &part);
  return part;
}

void ReasoningSplitter::Run(bool at_end, ReasoningPart* part) {
  if (state_ == State::kStart) {
    const size_t first = std::min(pending_.find_first_not_of(" \t\r\n"), pending_.size());
    const std::string_view rest = std::string_view(pending_).substr(first);
    if (!at_end && rest.size() < kOpen.size() && kOpen.substr(0, rest.size()) == rest) return;  // may still open a thought
    if (rest.substr(0, kOpen.size()) == kOpen) {
      pending_.erase(0, first + kOpen.size());
      state_ = State::kThought;
      skip_blank_ = true;
    } else {
      state_ = State::kAnswer;
    }
  }
  const auto skip_blank = [&] {
    if (!skip_blank_) return;
    pending_.erase(0, std::min(pending_.find_first_not_of("\r\n"), pending_.size()));
    skip_blank_ = pending_.empty() && !at_end;
  };
  if (state_ == State::kThought) {
    skip_blank();
    const size_t close = pending_.find(kClose);
    size_t take = close != std::string::npos ? close : pending_.size() - (at_end ? 0 : PartialTag(pending_, kClose));
    std::string text = blanks_ + pending_.substr(0, take);
    pending_.erase(0, take);
    const size_t last = text.find_last_not_of("\r\n");
    const size_t keep = last == std::string::npos ? 0 : last + 1;
    blanks_ = text.substr(keep);
    part->thought += text.substr(0, keep);
    if (close == std::string::npos) {
      if (at_end) part->thought += std::exchange(blanks_, {});
      return;
    }
    blanks_.clear();
    pending_.erase(0, kClose.size());
    state_ = State::kAnswer;
    skip_blank_ = true;
  }
  skip_blank();
  part->answer += pending_;
  pending_.clear();
}

}  // namespace hearth::router
