// See text_encoder.h.
#include "common/text/text_encoder.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"

namespace hearth {
namespace {

// Words repeat, so within a call a short piece is merged once. Below the first number a map costs more than it saves.
constexpr size_t kCachedTextBytesMin = 1024;
constexpr size_t kCachedPieceBytesMax = 32;

std::vector<TrustRun> RunsWithin(const std::vector<TrustRun>& runs, ByteRange segment) {
  std::vector<TrustRun> within;
  auto run = std::partition_point(runs.begin(), runs.end(), [&](const TrustRun& r) { return r.range.end <= segment.begin; });
  for (; run != runs.end() && run->range.begin < segment.end; ++run) {
    within.push_back({{std::max(run->range.begin, segment.begin), std::min(run->range.end, segment.end)}, run->parse_special});
  }
  return within;
}

std::string_view Cut(std::string_view text, ByteRange range) { return text.substr(range.begin, range.end - range.begin); }

}  // namespace

struct TextEncoder::Call {
  struct Span {
    size_t begin;
    size_t count;
  };
  std::vector<int32_t>* ids;
  bool use_cache = false;
  TextArena arena;
  std::vector<std::string_view> pieces;
  absl::flat_hash_map<absl::string_view, Span> cache;  // piece -> where its ids already stand in *ids
};

absl::StatusOr<std::unique_ptr<TextEncoder>> TextEncoder::Build(Normalizer normalizer, PreTokenizer pre_tokenizer, std::unique_ptr<Bpe> bpe,
                                                                const std::vector<AddedTokenRule>& rules) {
  std::vector<AddedTokenRule> raw_rules;
  std::vector<AddedTokenRule> normalized_rules;
  std::vector<std::string> raw_patterns;
  std::vector<std::string> normalized_patterns;
  for (const AddedTokenRule& rule : rules) {
    if (rule.normalized) {
      ASSIGN_OR_RETURN(std::string pattern, normalizer.Apply(rule.content));
      normalized_rules.push_back(rule);
      normalized_patterns.push_back(std::move(pattern));
    } else {
      raw_rules.push_back(rule);
      raw_patterns.push_back(rule.content);
    }
  }
  std::unique_ptr<TextEncoder> encoder(new TextEncoder(std::move(normalizer), std::move(pre_tokenizer), std::move(bpe)));
  encoder->raw_tokens_ = AddedTokenMatcher::Build(raw_rules, raw_patterns);
  encoder->normalized_tokens_ = AddedTokenMatcher::Build(normalized_rules, normalized_patterns);
  return encoder;
}

absl::Status TextEncoder::Encode(std::string_view text, const std::vector<TrustRun>& runs, std::vector<int32_t>* ids) const {
  Call call;
  call.ids = ids;
  call.use_cache = text.size() >= kCachedTextBytesMin;
  std::vector<AddedTokenMatch> matches;
  for (const TrustRun& run : runs) {
    if (run.parse_special) raw_tokens_.Find(text, run.range, &matches);
  }
  size_t done = 0;
  for (const AddedTokenMatch& match : matches) {
    RETURN_IF_ERROR(EncodeBetween(text, {done, match.range.begin}, runs, &call));
    ids->push_back(match.id);
    done = match.range.end;
  }
  return EncodeBetween(text, {done, text.size()}, runs, &call);
}

absl::Status TextEncoder::EncodeBetween(std::string_view text, ByteRange segment, const std::vector<TrustRun>& runs, Call* call) const {
  if (segment.begin >= segment.end) return absl::OkStatus();
  const std::vector<TrustRun> within = RunsWithin(runs, segment);
  const bool any_trusted = std::any_of(within.begin(), within.end(), [](const TrustRun& run) { return run.parse_special; });
  const bool mixed = within.size() > 1;
  std::vector<AddedTokenMatch> matches;

  std::string_view normalized = Cut(text, segment);
  if (normalizer_.is_identity()) {
    for (const TrustRun& run : within) {
      if (run.parse_special) normalized_tokens_.Find(normalized, {run.range.begin - segment.begin, run.range.end - segment.begin}, &matches);
    }
    return EncodeNormalized(normalized, matches, call);
  }
  if (mixed && any_trusted && !normalized_tokens_.empty()) {
    // Added tokens are to be found in normalised text whose runs are known, so each run is normalised by itself. Only
    // if that finds nothing can the whole be normalised at once, which also joins a mark to a letter across two runs.
    std::string joined;
    for (const TrustRun& run : within) {
      const size_t begin = joined.size();
      ASSIGN_OR_RETURN(const std::string part, normalizer_.Apply(Cut(text, run.range)));
      joined += part;
      if (run.parse_special) normalized_tokens_.Find(joined, {begin, joined.size()}, &matches);
    }
    if (!matches.empty()) return EncodeNormalized(call->arena.emplace_back(std::move(joined)), matches, call);
  }
  ASSIGN_OR_RETURN(std::string whole, normalizer_.Apply(normalized));
  normalized = call->arena.emplace_back(std::move(whole));
  if (any_trusted && !mixed) normalized_tokens_.Find(normalized, {0, normalized.size()}, &matches);
  return EncodeNormalized(normalized, matches, call);
}

absl::Status TextEncoder::EncodeNormalized(std::string_view text, const std::vector<AddedTokenMatch>& matches, Call* call) const {
  size_t done = 0;
  for (const AddedTokenMatch& match : matches) {
    RETURN_IF_ERROR(EncodePieces(Cut(text, {done, match.range.begin}), call));
    call->ids->push_back(match.id);
    done = match.range.end;
  }
  return EncodePieces(text.substr(done), call);
}

absl::Status TextEncoder::EncodePieces(std::string_view text, Call* call) const {
  RETURN_IF_ERROR(pre_tokenizer_.Split(text, &call->arena, &call->pieces));
  std::vector<int32_t>& ids = *call->ids;
  for (const std::string_view piece : call->pieces) {
    if (!call->use_cache || piece.size() > kCachedPieceBytesMax) {
      RETURN_IF_ERROR(bpe_->Encode(piece, &ids));
      continue;
    }
    const auto [entry, is_new] = call->cache.try_emplace(Sv(piece), Call::Span{ids.size(), 0});
    if (is_new) {
      RETURN_IF_ERROR(bpe_->Encode(piece, &ids));
      entry->second.count = ids.size() - entry->second.begin;
      continue;
    }
    const Call::Span span = entry->second;
    ids.resize(ids.size() + span.count);
    std::copy_n(ids.begin() + span.begin, span.count, ids.end() - span.count);
  }
  return absl::OkStatus();
}

}  // namespace hearth
