// Strings of the template language: immutable bytes that remember which parts the template wrote (trusted) and which
// came from a caller. A Text is a window on a shared buffer. Trimming, slicing and splitting make new windows;
// appending to the Text that ends its buffer extends the buffer in place (older windows never see past their own end),
// so `a + b + c` and `ns.s = ns.s + x` are linear. Room: common/text/jinja. Threads: buffers of literals are frozen and
// may be shared; all others belong to one rendering.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace hearth::jinja {

// Longest string that a template may build. It bounds the rendered prompt, too.
inline constexpr size_t kMaxTextBytes = size_t{64} << 20;

class Text {
 public:
  Text() = default;
  Text(std::string bytes, bool trusted);

  std::string_view view() const { return buffer_ == nullptr ? std::string_view() : std::string_view(buffer_->bytes).substr(begin_, size_); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  // False when any byte is a caller's.
  bool trusted() const;

  Text Slice(size_t begin, size_t end) const;
  // Throws Error when the result would be longer than kMaxTextBytes. `copied`: how many bytes had to be moved.
  static Text Concat(const Text& left, const Text& right, size_t* copied = nullptr);

  // visit(std::string_view piece, bool trusted), in order; adjacent pieces differ in trust.
  template <typename Visit>
  void ForEachRun(Visit visit) const {
    if (size_ == 0) return;
    const size_t end = size_t{begin_} + size_;
    size_t at = begin_;
    for (size_t run = RunAt(begin_); at < end; ++run) {
      const size_t stop = std::min<size_t>(end, buffer_->runs[run].end);
      visit(std::string_view(buffer_->bytes).substr(at, stop - at), buffer_->runs[run].trusted);
      at = stop;
    }
  }

  // The `safe` filter's mark: `+` escapes the other side, as markupsafe does.
  bool markup() const { return markup_; }
  void set_markup(bool markup) { markup_ = markup; }

 private:
  friend class TextBuilder;
  struct Run {
    uint32_t end;
    bool trusted;
  };
  struct Buffer {
    std::string bytes;
    std::vector<Run> runs;
    bool growable = false;  // made by Concat or a builder in this rendering; literals and context strings never are
    void Append(std::string_view piece, bool trusted);
  };
  size_t RunAt(size_t offset) const;

  std::shared_ptr<Buffer> buffer_;
  uint32_t begin_ = 0;
  uint32_t size_ = 0;
  bool markup_ = false;
};

// Collects pieces into one Text. Throws Error beyond kMaxTextBytes.
class TextBuilder {
 public:
  TextBuilder();
  void Append(std::string_view piece, bool trusted);
  void Append(const Text& text);
  size_t size() const { return buffer_->bytes.size(); }
  Text Take();

 private:
  std::shared_ptr<Text::Buffer> buffer_;
};

}  // namespace hearth::jinja
