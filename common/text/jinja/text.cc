#include "common/text/jinja/text.h"

#include <algorithm>

#include "common/text/jinja/error.h"

namespace hearth::jinja {
namespace {

void CheckSize(size_t size) {
  if (size > kMaxTextBytes) Fail("the template builds a string of more than ", kMaxTextBytes >> 20, " MiB");
}

}  // namespace

Text::Text(std::string bytes, bool trusted) {
  if (bytes.empty()) return;
  CheckSize(bytes.size());
  buffer_ = std::make_shared<Buffer>();
  buffer_->bytes = std::move(bytes);
  buffer_->runs.push_back({static_cast<uint32_t>(buffer_->bytes.size()), trusted});
  size_ = static_cast<uint32_t>(buffer_->bytes.size());
}

void Text::Buffer::Append(std::string_view piece, bool trusted) {
  if (piece.empty()) return;
  bytes.append(piece);
  const auto end = static_cast<uint32_t>(bytes.size());
  if (!runs.empty() && runs.back().trusted == trusted) {
    runs.back().end = end;
  } else {
    runs.push_back({end, trusted});
  }
}

size_t Text::RunAt(size_t offset) const {
  const auto& runs = buffer_->runs;
  return std::upper_bound(runs.begin(), runs.end(), offset, [](size_t at, const Run& run) { return at < run.end; }) - runs.begin();
}

bool Text::trusted() const {
  bool all = true;
  ForEachRun([&all](std::string_view, bool trusted) { all = all && trusted; });
  return all;
}

Text Text::Slice(size_t begin, size_t end) const {
  Text out;
  if (begin >= end) return out;
  out.buffer_ = buffer_;
  out.begin_ = static_cast<uint32_t>(begin_ + begin);
  out.size_ = static_cast<uint32_t>(end - begin);
  return out;
}

Text Text::Concat(const Text& left, const Text& right, size_t* copied) {
  if (copied != nullptr) *copied = right.size();
  if (right.empty()) return left;
  if (left.empty()) return right;
  CheckSize(left.size() + right.size());
  Text out;
  if (left.buffer_->growable && left.begin_ + left.size_ == left.buffer_->bytes.size() &&
      left.buffer_->bytes.size() + right.size() <= 2 * kMaxTextBytes) {
    out.buffer_ = left.buffer_;
    out.begin_ = left.begin_;
  } else {
    out.buffer_ = std::make_shared<Buffer>();
    out.buffer_->growable = true;
    out.buffer_->bytes.reserve(left.size() + right.size());
    if (copied != nullptr) *copied += left.size();
    left.ForEachRun([&out](std::string_view piece, bool trusted) { out.buffer_->Append(piece, trusted); });
  }
  if (right.buffer_ == out.buffer_) {
    // The right side lies in the buffer that grows: its windows would move while they are read.
    std::vector<std::pair<std::string, bool>> pieces;
    right.ForEachRun([&pieces](std::string_view piece, bool trusted) { pieces.emplace_back(piece, trusted); });
    for (const auto& [piece, trusted] : pieces) out.buffer_->Append(piece, trusted);
  } else {
    right.ForEachRun([&out](std::string_view piece, bool trusted) { out.buffer_->Append(piece, trusted); });
  }
  out.size_ = left.size_ + right.size_;
  return out;
}

TextBuilder::TextBuilder() : buffer_(std::make_shared<Text::Buffer>()) { buffer_->growable = true; }

void TextBuilder::Append(std::string_view piece, bool trusted) {
  CheckSize(buffer_->bytes.size() + piece.size());
  buffer_->Append(piece, trusted);
}

void TextBuilder::Append(const Text& text) {
  text.ForEachRun([this](std::string_view piece, bool trusted) { Append(piece, trusted); });
}

Text TextBuilder::Take() {
  Text out;
  out.size_ = static_cast<uint32_t>(buffer_->bytes.size());
  out.buffer_ = std::move(buffer_);
  buffer_ = std::make_shared<Text::Buffer>();
  buffer_->growable = true;
  return out;
}

}  // namespace hearth::jinja
