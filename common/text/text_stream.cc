// See text_stream.h. Bytes -> characters -> the decoder's style -> what no stop string can touch.
#include "common/text/text_stream.h"

#include <algorithm>
#include <utility>

#include "common/text/utf8.h"

namespace hearth {

StopMatcher::StopMatcher(const std::vector<std::string>& stops) {
  for (const std::string& text : stops) {
    if (text.empty()) continue;
    Stop stop;
    stop.text = text;
    stop.fallback.assign(text.size() + 1, 0);
    for (size_t i = 1, length = 0; i < text.size(); ++i) {
      while (length > 0 && text[i] != text[length]) length = stop.fallback[length];
      if (text[i] == text[length]) ++length;
      stop.fallback[i + 1] = static_cast<uint32_t>(length);
    }
    stops_.push_back(std::move(stop));
  }
}

void StopMatcher::Accept(char byte) {
  ++seen_;
  uint64_t earliest_begun = seen_;  // where the longest unfinished match begins
  for (size_t i = 0; i < stops_.size(); ++i) {
    Stop& stop = stops_[i];
    while (stop.matched_bytes > 0 && stop.text[stop.matched_bytes] != byte) stop.matched_bytes = stop.fallback[stop.matched_bytes];
    if (stop.text[stop.matched_bytes] == byte) ++stop.matched_bytes;
    if (stop.matched_bytes == stop.text.size()) {
      const uint64_t begin = seen_ - stop.text.size();
      if (best_ == kNone || begin < best_begin_) {
        best_ = i;
        best_begin_ = begin;
      }
      stop.matched_bytes = stop.fallback[stop.matched_bytes];
    }
    earliest_begun = std::min(earliest_begun, seen_ - stop.matched_bytes);
  }
  safe_end_ = best_ == kNone ? earliest_begun : std::min(earliest_begun, best_begin_);
  certain_ = best_ != kNone && earliest_begun >= best_begin_;
}

bool StopMatcher::Push(std::string_view text) {
  if (stops_.empty()) {
    seen_ += text.size();
    safe_end_ = seen_;
    return false;
  }
  for (const char byte : text) {
    if (certain_) break;
    Accept(byte);
  }
  return certain_;
}

bool StopMatcher::Finish() {
  certain_ = best_ != kNone;
  safe_end_ = certain_ ? best_begin_ : seen_;
  return certain_;
}

TextStream::TextStream(const std::vector<std::string>& stops, const DecodeStyle& style) : styler_(style), matcher_(stops) {}

std::string TextStream::TakeCharacters(bool at_end) {
  std::string text;
  std::string_view rest = bytes_;
  while (!rest.empty()) {
    const Utf8Step step = NextUtf8(rest);
    if (step.verdict == Utf8Step::Verdict::kIncomplete && !at_end) break;
    text += step.verdict == Utf8Step::Verdict::kValid ? rest.substr(0, step.length) : kReplacementCharacter;
    rest.remove_prefix(step.length);
  }
  bytes_.erase(0, bytes_.size() - rest.size());
  return text;
}

std::string TextStream::Release(std::string_view text, bool at_end) {
  pending_ += text;
  stopped_ = matcher_.Push(text) || (at_end && matcher_.Finish());
  uint64_t end = matcher_.safe_end();
  if (stopped_) {
    matched_ = matcher_.matched();
    end = matcher_.match_begin();
  }
  size_t num_sent = static_cast<size_t>(end - pending_begin_);
  // A stop string of broken UTF-8 may begin inside a character, which then goes whole or not at all.
  while (num_sent > 0 && num_sent < pending_.size() && (static_cast<unsigned char>(pending_[num_sent]) & 0xC0) == 0x80) --num_sent;
  std::string sent = pending_.substr(0, num_sent);
  pending_.erase(0, num_sent);
  pending_begin_ += num_sent;
  if (stopped_) {
    pending_.clear();
    bytes_.clear();
  }
  return sent;
}

std::string TextStream::Push(std::string_view token_bytes) {
  if (stopped_) return "";
  bytes_ += token_bytes;
  return Release(styler_.Push(TakeCharacters(false)), false);
}

std::string TextStream::Finish() {
  if (stopped_) return "";
  std::string text = styler_.Push(TakeCharacters(true));
  text += styler_.Finish();
  return Release(text, true);
}

}  // namespace hearth
