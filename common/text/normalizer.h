// Normalisers of tokenizer.json: what happens to a text before it is split.
// Room: common/text. May touch: common/base, utf8proc. Threads: any; const after Parse.
// Reads: NFC, NFD, NFKC, NFKD, Lowercase, Replace, Prepend, Strip, Sequence. Others are refused by name.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hearth {

class Normalizer {
 public:
  // `spec`: the "normalizer" member; null means none.
  static absl::StatusOr<Normalizer> Parse(const nlohmann::json& spec);
  Normalizer(Normalizer&&) noexcept;
  Normalizer& operator=(Normalizer&&) noexcept;
  ~Normalizer();

  // True if Apply never changes a text.
  bool is_identity() const { return steps_.empty(); }

  // `text` must be valid UTF-8. Linear but for the sorting of combining marks, which is n log n.
  absl::StatusOr<std::string> Apply(std::string_view text) const;

  struct Step;

 private:
  Normalizer();
  std::vector<std::unique_ptr<Step>> steps_;
};

}  // namespace hearth
