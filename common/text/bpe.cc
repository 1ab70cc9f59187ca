// See bpe.h.
#include "common/text/bpe.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/text/byte_level.h"
#include "common/text/json_access.h"
#include "common/text/utf8.h"

namespace hearth {
namespace {

// Up to here a scan of all pairs beats the heap.
constexpr size_t kShortPieceMax = 32;

}  // namespace

void MergeTable::Reserve(size_t num_merges) {
  size_t num_slots = 16;
  while (num_slots < num_merges * 2) num_slots *= 2;
  slots_.assign(num_slots, Slot{});
  mask_ = num_slots - 1;
}

void MergeTable::Set(int32_t left, int32_t right, Merge merge) {
  const uint64_t key = Key(left, right);
  size_t slot = Hash(key) & mask_;
  while (slots_[slot].key != kEmpty && slots_[slot].key != key) slot = (slot + 1) & mask_;
  slots_[slot] = {key, merge};
}

absl::StatusOr<std::unique_ptr<Bpe>> Bpe::Parse(const nlohmann::json& model, bool byte_level, const absl::flat_hash_set<std::string>& reserved) {
  if (!model.is_object()) return JsonTypeError("model", "an object", model);
  // Old files leave the type out; what has merges is BPE.
  const nlohmann::json& type = JsonMember(model, "type");
  if (!type.is_null() && type != "BPE") {
    return absl::InvalidArgumentError(absl::StrCat("model.type: ", type.dump(), " is not supported; the one supported type is \"BPE\""));
  }
  std::unique_ptr<Bpe> bpe(new Bpe);
  bpe->byte_level_ = byte_level;
  RETURN_IF_ERROR(bpe->ParseVocabulary(model));
  RETURN_IF_ERROR(bpe->ParseOptions(model));
  RETURN_IF_ERROR(bpe->ParseMerges(model, reserved));
  if (bpe->ignore_merges_) {
    for (const auto& [spelling, id] : bpe->vocabulary_) {
      if (reserved.contains(spelling)) continue;
      std::optional<std::string> bytes = byte_level ? FromByteLevel(spelling) : spelling;
      if (bytes.has_value()) bpe->whole_pieces_.emplace(*std::move(bytes), id);
    }
  }
  return bpe;
}

absl::Status Bpe::ParseVocabulary(const nlohmann::json& model) {
  const nlohmann::json& vocabulary = JsonMember(model, "vocab");
  if (!vocabulary.is_object()) return JsonTypeError("model.vocab", "an object of token texts and ids", vocabulary);
  vocabulary_.reserve(vocabulary.size());
  for (const auto& [spelling, id] : vocabulary.items()) {
    absl::StatusOr<int32_t> parsed = JsonTokenId(id, "model.vocab");
    if (!parsed.ok()) return Annotate(parsed.status(), absl::StrCat("token \"", spelling, "\""));
    vocabulary_.emplace(spelling, *parsed);
    max_id_ = std::max(max_id_, *parsed);
  }
  return absl::OkStatus();
}

absl::Status Bpe::ParseOptions(const nlohmann::json& model) {
  ASSIGN_OR_RETURN(ignore_merges_, JsonBool(model, "ignore_merges", false, "model"));
  ASSIGN_OR_RETURN(byte_fallback_, JsonBool(model, "byte_fallback", false, "model"));
  ASSIGN_OR_RETURN(fuse_unk_, JsonBool(model, "fuse_unk", false, "model"));
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const nlohmann::json& affix = JsonMember(model, key);
    if (!affix.is_null() && affix != "") {
      return absl::InvalidArgumentError(absl::StrCat("model.", key, ": ", affix.dump(), " is not supported; only null and \"\" are"));
    }
  }
  const nlohmann::json& dropout = JsonMember(model, "dropout");
  if (!dropout.is_null() && dropout != 0.0) {
    return absl::InvalidArgumentError(absl::StrCat("model.dropout: ", dropout.dump(), " would make ids random; only null and 0 are supported"));
  }
  const nlohmann::json& unk = JsonMember(model, "unk_token");
  if (!unk.is_null()) {
    ASSIGN_OR_RETURN(const std::string spelling, JsonString(model, "unk_token", "model"));
    unk_ = Find(spelling);
    if (!unk_.has_value()) return absl::InvalidArgumentError(absl::StrCat("model.unk_token: \"", spelling, "\" is not in model.vocab"));
  }
  for (int byte = 0; byte < 256; ++byte) {
    const std::string spelling = byte_level_ ? std::string(ByteLevelCharacter(static_cast<uint8_t>(byte))) : absl::StrFormat("<0x%02X>", byte);
    byte_tokens_[byte] = Find(spelling).value_or(-1);
  }
  return absl::OkStatus();
}

absl::Status Bpe::ParseMerges(const nlohmann::json& model, const absl::flat_hash_set<std::string>& reserved) {
  const nlohmann::json& merges = JsonMember(model, "merges");
  if (merges.is_null()) {
    return absl::InvalidArgumentError(
        "model.merges is missing: without merges no text can be encoded; take tokenizer.json from the model's own "
        "repository");
  }
  if (!merges.is_array()) return JsonTypeError("model.merges", "an array", merges);
  merges_.Reserve(merges.size());
  by_rank_.resize(merges.size());
  std::string merged;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const nlohmann::json& entry = merges[rank];
    std::string_view left;
    std::string_view right;
    if (entry.is_string()) {
      const std::string_view pair = entry.get_ref<const std::string&>();
      const size_t space = pair.find(' ');
      if (space != std::string_view::npos && pair.find(' ', space + 1) == std::string_view::npos) {
        left = pair.substr(0, space);
        right = pair.substr(space + 1);
      }
    } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
      left = entry[0].get_ref<const std::string&>();
      right = entry[1].get_ref<const std::string&>();
    }
    const std::string where = absl::StrCat("model.merges[", rank, "]");
    if (left.empty() || right.empty()) return JsonTypeError(where, "\"left right\" or [\"left\", \"right\"]", entry);
    merged.assign(left);
    merged += right;
    const std::optional<int32_t> left_id = Find(left);
    const std::optional<int32_t> right_id = Find(right);
    const std::optional<int32_t> merged_id = Find(merged);
    if (!left_id || !right_id || !merged_id) {
      const std::string_view unknown = !left_id ? left : !right_id ? right : std::string_view(merged);
      return absl::InvalidArgumentError(absl::StrCat(where, ": \"", Sv(unknown), "\" is not in model.vocab"));
    }
    if (reserved.contains(merged)) continue;  // else a user could spell a special token
    merges_.Set(*left_id, *right_id, {static_cast<uint32_t>(rank), *merged_id});
    by_rank_[rank] = {*left_id, *right_id, *merged_id};
  }
  return absl::OkStatus();
}

std::optional<int32_t> Bpe::Find(std::string_view spelling) const {
  const auto it = vocabulary_.find(Sv(spelling));
  if (it == vocabulary_.end()) return std::nullopt;
  return it->second;
}

absl::Status Bpe::Encode(std::string_view piece, std::vector<int32_t>* ids) const {
  if (ignore_merges_) {
    if (const auto it = whole_pieces_.find(Sv(piece)); it != whole_pieces_.end()) {
      ids->push_back(it->second);
      return absl::OkStatus();
    }
  }
  // Kept per thread: a piece is a few bytes, and an allocation each would cost more than the merging.
  thread_local std::vector<int32_t> tokens;
  tokens.clear();
  RETURN_IF_ERROR(FirstTokens(piece, &tokens));
  if (tokens.size() <= kShortPieceMax) {
    MergeShort(&tokens);
    ids->insert(ids->end(), tokens.begin(), tokens.end());
  } else {
    MergeLong(&tokens);
    ids->insert(ids->end(), tokens.begin(), tokens.end());
    std::vector<int32_t>().swap(tokens);  // may be megabytes
  }
  return absl::OkStatus();
}

absl::Status Bpe::FirstTokens(std::string_view piece, std::vector<int32_t>* tokens) const {
  if (!byte_level_) return FirstTokensOfCharacters(piece, tokens);
  for (const char c : piece) {
    const int32_t token = byte_tokens_[static_cast<unsigned char>(c)];
    if (token >= 0) {
      tokens->push_back(token);
    } else if (unk_.has_value()) {
      tokens->push_back(*unk_);
    } else {
      return absl::InvalidArgumentError(
          absl::StrFormat("the vocabulary has no token for byte 0x%02X; leave the character out", static_cast<unsigned char>(c)));
    }
  }
  return absl::OkStatus();
}

absl::Status Bpe::FirstTokensOfCharacters(std::string_view piece, std::vector<int32_t>* tokens) const {
  bool after_unk = false;
  for (size_t position = 0; position < piece.size();) {
    const size_t start = position;
    DecodeUtf8(piece, &position);
    const std::string_view character = piece.substr(start, position - start);
    if (const std::optional<int32_t> token = Find(character)) {
      tokens->push_back(*token);
      after_unk = false;
      continue;
    }
    const auto has_token = [&](char c) { return byte_tokens_[static_cast<unsigned char>(c)] >= 0; };
    if (byte_fallback_ && std::all_of(character.begin(), character.end(), has_token)) {
      for (const char c : character) tokens->push_back(byte_tokens_[static_cast<unsigned char>(c)]);
      after_unk = false;
      continue;
    }
    if (!unk_.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the vocabulary has no token for \"", Sv(character), "\" and no unk_token; leave the character out"));
    }
    if (!(fuse_unk_ && after_unk)) tokens->push_back(*unk_);
    after_unk = true;
  }
  return absl::OkStatus();
}

void Bpe::MergeShort(std::vector<int32_t>* tokens) const {
  size_t num_tokens = tokens->size();
  if (num_tokens < 2) return;
  MergeTable::Merge merges[kShortPieceMax];  // merges[i]: of tokens i and i + 1
  for (size_t i = 0; i + 1 < num_tokens; ++i) merges[i] = merges_.Find((*tokens)[i], (*tokens)[i + 1]);
  while (num_tokens > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < num_tokens; ++i) {
      if (merges[i].rank < merges[best].rank) best = i;
    }
    if (merges[best].rank == MergeTable::kNoMerge) break;
    (*tokens)[best] = merges[best].token;
    std::copy(tokens->begin() + best + 2, tokens->begin() + num_tokens, tokens->begin() + best + 1);
    std::copy(merges + best + 1, merges + num_tokens - 1, merges + best);
    --num_tokens;
    if (best > 0) merges[best - 1] = merges_.Find((*tokens)[best - 1], (*tokens)[best]);
    if (best + 1 < num_tokens) merges[best] = merges_.Find((*tokens)[best], (*tokens)[best + 1]);
  }
  tokens->resize(num_tokens);
}

void Bpe::MergeLong(std::vector<int32_t>* tokens) const {
  constexpr uint32_t kEnd = 0xFFFFFFFFu;
  constexpr int32_t kGone = -1;
  struct Links {
    uint32_t previous;
    uint32_t next;
  };
  // A candidate is rank, then place, in one number, so that the lowest comes first. The rank names the pair as it was
  // when this was queued; anything else now in that place makes it stale.
  std::vector<int32_t>& token = *tokens;
  const uint32_t num_tokens = static_cast<uint32_t>(token.size());
  std::vector<Links> links(num_tokens);
  std::vector<uint64_t> heap;
  heap.reserve(num_tokens);
  const auto candidate = [&](uint32_t place, uint32_t next) {
    const uint32_t rank = merges_.Find(token[place], token[next]).rank;
    if (rank == MergeTable::kNoMerge) return false;
    heap.push_back(static_cast<uint64_t>(rank) << 32 | place);
    return true;
  };
  for (uint32_t i = 0; i < num_tokens; ++i) {
    links[i] = {i == 0 ? kEnd : i - 1, i + 1 == num_tokens ? kEnd : i + 1};
    if (i + 1 < num_tokens) candidate(i, i + 1);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto push = [&](uint32_t place, uint32_t next) {
    if (candidate(place, next)) std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint32_t place = static_cast<uint32_t>(heap.back());
    const RankedMerge& best = by_rank_[heap.back() >> 32];
    heap.pop_back();
    const uint32_t next = links[place].next;
    if (token[place] != best.left || next == kEnd || token[next] != best.right) continue;
    token[place] = best.token;
    token[next] = kGone;
    const uint32_t after = links[next].next;
    links[place].next = after;
    if (after != kEnd) {
      links[after].previous = place;
      push(place, after);
    }
    if (links[place].previous != kEnd) push(links[place].previous, place);
  }
  token.erase(std::remove(token.begin(), token.end(), kGone), token.end());
}

}  // namespace hearth
