// Byte-pair encoding: a vocabulary and ranked merges; the pair of the lowest rank is merged first, of equals the
// leftmost. Room: common/text. May touch: common/base. Threads: any; const after Parse. Long pieces are merged with a
// heap of pairs, O(n log n); short ones by looking for the best pair in a small array.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "common/base/status.h"

namespace hearth {

// Pair of adjacent tokens -> what they become. Open addressing in one array: one cache line a look-up.
class MergeTable {
 public:
  static constexpr uint32_t kNoMerge = 0xFFFFFFFFu;
  struct Merge {
    uint32_t rank = kNoMerge;
    int32_t token = -1;
  };
  void Reserve(size_t num_merges);
  // A pair given again takes the later rank.
  void Set(int32_t left, int32_t right, Merge merge);
  Merge Find(int32_t left, int32_t right) const {
    const uint64_t key = Key(left, right);
    for (size_t slot = Hash(key) & mask_;; slot = (slot + 1) & mask_) {
      if (slots_[slot].key == key) return slots_[slot].merge;
      if (slots_[slot].key == kEmpty) return Merge{};
    }
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  struct Slot {
    uint64_t key = kEmpty;
    Merge merge;
  };
  static uint64_t Key(int32_t left, int32_t right) { return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right); }
  static uint64_t Hash(uint64_t key) { return (key * 0x9E3779B97F4A7C15u) >> 29; }

  std::vector<Slot> slots_{Slot{}};
  size_t mask_ = 0;
};

class Bpe {
 public:
  // `model`: the "model" member. `byte_level`: the vocabulary is spelled in the byte-level alphabet and pieces are
  // bytes; otherwise pieces are characters. Texts in `reserved` (special tokens) are never built from a piece.
  static absl::StatusOr<std::unique_ptr<Bpe>> Parse(const nlohmann::json& model, bool byte_level, const absl::flat_hash_set<std::string>& reserved);

  // Appends the tokens of one piece. Errors: InvalidArgument if the vocabulary can't spell it.
  absl::Status Encode(std::string_view piece, std::vector<int32_t>* ids) const;

  std::optional<int32_t> Find(std::string_view spelling) const;
  const absl::flat_hash_map<std::string, int32_t>& vocabulary() const { return vocabulary_; }
  int32_t max_id() const { return max_id_; }

 private:
  Bpe() = default;
  absl::Status ParseOptions(const nlohmann::json& model);
  absl::Status ParseVocabulary(const nlohmann::json& model);
  absl::Status ParseMerges(const nlohmann::json& model, const absl::flat_hash_set<std::string>& reserved);
  absl::Status FirstTokens(std::string_view piece, std::vector<int32_t>* tokens) const;
  absl::Status FirstTokensOfCharacters(std::string_view piece, std::vector<int32_t>* tokens) const;
  // Both merge `tokens` in place.
  void MergeShort(std::vector<int32_t>* tokens) const;
  void MergeLong(std::vector<int32_t>* tokens) const;

  struct RankedMerge {
    int32_t left = -1;
    int32_t right = -1;
    int32_t token = -1;
  };

  bool byte_level_ = false;
  bool ignore_merges_ = false;
  bool byte_fallback_ = false;
  bool fuse_unk_ = false;
  std::optional<int32_t> unk_;
  int32_t max_id_ = -1;
  absl::flat_hash_map<std::string, int32_t> vocabulary_;
  absl::flat_hash_map<std::string, int32_t> whole_pieces_;  // piece bytes -> token; only when merges are ignored for them
  std::array<int32_t, 256> byte_tokens_;                    // byte-level spelling or <0xHH>; -1: none
  MergeTable merges_;
  std::vector<RankedMerge> by_rank_;  // the same merges by their place in the list
};

}  // namespace hearth
