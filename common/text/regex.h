// A compiled pattern of tokenizer.json, matched by PCRE2's JIT.
// Room: common/text. May touch: common/base. Threads: any; const after Compile, each thread has its own match state and
// JIT stack. Never recurses on the machine stack: the JIT has a stack of its own on the heap, and where that is full
// the interpreter, which keeps its frames on the heap under a limit, does the same match again.
#pragma once

#include <cstddef>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hearth {

struct ByteRange {
  size_t begin = 0;
  size_t end = 0;
};

class Regex {
 public:
  // `pattern` in the dialect of tokenizer.json (see regex_dialect.h). Errors: InvalidArgument with the pattern and the
  // place.
  static absl::StatusOr<Regex> Compile(std::string_view pattern);
  // Matches exactly `literal`.
  static absl::StatusOr<Regex> Literal(std::string_view literal);
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  ~Regex();

  // All matches from left to right, none overlapping; `text` must be valid UTF-8.
  // Errors: ResourceExhausted when the pattern needs more memory or steps than one text may use.
  absl::Status FindAll(std::string_view text, std::vector<ByteRange>* matches) const;

 private:
  struct Impl;
  explicit Regex(std::unique_ptr<Impl> impl);
  static absl::StatusOr<Regex> CompilePcre(std::string_view pcre_pattern, std::string_view shown);
  std::unique_ptr<Impl> impl_;
};

// A "pattern" member: {"Regex": "..."} or {"String": "..."}.
absl::StatusOr<Regex> ParsePattern(const nlohmann::json& spec, const std::string& where);

}  // namespace hearth
