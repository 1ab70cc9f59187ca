// Loads tokenizer.json with what stands beside it, and joins the parts of this room to a Tokenizer.
// The road of a text is in text_encoder.cc, that of a token's bytes in token_decoder.cc.
// Room: common/text. May touch: common/base. Threads: any; const after Load.
#include "common/text/tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "common/text/json_access.h"
#include "common/text/special_frame.h"
#include "common/text/text_encoder.h"
#include "common/text/token_decoder.h"
#include "common/text/tokenizer_config.h"
#include "common/text/utf8.h"

namespace hearth {
namespace {

// Places in a piece are 32 bits wide, and no context is longer.
constexpr size_t kTextBytesMax = size_t{1} << 30;

class HfTokenizer : public Tokenizer {
 public:
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Parse(const nlohmann::json& json, TokenizerConfig config);

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text, const EncodeOptions& options) const override;
  absl::StatusOr<std::vector<int32_t>> EncodeSpans(const std::vector<TextSpan>& spans, bool add_special_tokens) const override;
  std::string_view TokenBytes(int32_t id) const override;
  bool IsSpecial(int32_t id) const override { return InRange(id) && tokens_[id].special; }
  std::string Decode(const std::vector<int32_t>& ids, bool skip_special) const override;
  DecodeStyle decode_style() const override { return style_; }

  std::optional<int32_t> TokenToId(std::string_view content) const override;
  int32_t vocab_size() const override { return static_cast<int32_t>(tokens_.size()); }
  const std::vector<AddedToken>& added_tokens() const override { return added_tokens_; }
  std::optional<int32_t> bos_id() const override { return bos_id_; }
  std::optional<int32_t> eos_id() const override { return eos_id_; }
  std::string_view bos_text() const override { return bos_text_; }
  std::string_view eos_text() const override { return eos_text_; }
  bool add_bos() const override {
    return bos_id_.has_value() && std::find(frame_.prefix.begin(), frame_.prefix.end(), *bos_id_) != frame_.prefix.end();
  }
  std::string_view chat_template() const override { return chat_template_; }

 private:
  struct Token {
    std::string bytes;
    bool special = false;
  };

  bool InRange(int32_t id) const { return id >= 0 && static_cast<size_t>(id) < tokens_.size(); }
  absl::StatusOr<std::vector<int32_t>> EncodeRuns(std::string_view text, const std::vector<TrustRun>& runs, bool add_special_tokens) const;
  absl::Status FillTokens(const TokenDecoder& decoder, const std::vector<AddedTokenRule>& rules);
  absl::Status SetSpecialTokens(const TokenizerConfig& config);

  std::unique_ptr<TextEncoder> encoder_;
  DecodeStyle style_;
  SpecialFrame frame_;
  std::vector<Token> tokens_;  // by id
  std::vector<AddedToken> added_tokens_;
  absl::flat_hash_map<std::string, int32_t> added_ids_;
  std::optional<int32_t> bos_id_;
  std::optional<int32_t> eos_id_;
  std::string bos_text_;
  std::string eos_text_;
  std::string chat_template_;
};

// The added tokens of both files; tokenizer.json is believed where both name an id or a text.
absl::StatusOr<std::vector<AddedTokenRule>> CollectAddedTokens(const nlohmann::json& json, const TokenizerConfig& config) {
  std::vector<AddedTokenRule> rules;
  const nlohmann::json& added = JsonMember(json, "added_tokens");
  const nlohmann::json& vocabulary = JsonMember(JsonMember(json, "model"), "vocab");
  if (!added.is_null() && !added.is_array()) return JsonTypeError("added_tokens", "an array", added);
  absl::flat_hash_set<int32_t> ids;
  absl::flat_hash_set<std::string> texts;
  for (size_t i = 0; i < added.size(); ++i) {
    const std::string where = absl::StrCat("added_tokens[", i, "]");
    ASSIGN_OR_RETURN(const int32_t id, JsonTokenId(JsonMember(added[i], "id"), absl::StrCat(where, ".id")));
    ASSIGN_OR_RETURN(AddedTokenRule rule, ParseAddedToken(added[i], id, where));
    // Where the vocabulary knows the text too, the reference believes the vocabulary.
    if (const nlohmann::json& known = JsonMember(vocabulary, rule.content.c_str()); !known.is_null()) {
      ASSIGN_OR_RETURN(rule.id, JsonTokenId(known, "model.vocab"));
    }
    ids.insert(rule.id);
    texts.insert(rule.content);
    rules.push_back(std::move(rule));
  }
  for (const AddedTokenRule& rule : config.added_tokens) {
    if (!ids.contains(rule.id) && !texts.contains(rule.content)) rules.push_back(rule);
  }
  // BOS and EOS are special even if no list of added tokens says so: their text must never show in an answer.
  for (const std::optional<std::string>* text : {&config.bos_text, &config.eos_text}) {
    if (!text->has_value()) continue;
    const auto listed = std::find_if(rules.begin(), rules.end(), [&](const AddedTokenRule& rule) { return rule.content == **text; });
    if (listed != rules.end()) {
      listed->special = true;
    } else if (const nlohmann::json& id = JsonMember(vocabulary, (*text)->c_str()); !id.is_null()) {
      AddedTokenRule rule;
      ASSIGN_OR_RETURN(rule.id, JsonTokenId(id, "model.vocab"));
      rule.content = **text;
      rule.special = true;
      rule.normalized = false;
      rules.push_back(std::move(rule));
    }
  }
  return rules;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> HfTokenizer::Parse(const nlohmann::json& json, TokenizerConfig config) {
  if (!json.is_object()) return JsonTypeError("(top)", "an object", json);
  auto tokenizer = std::make_unique<HfTokenizer>();
  ASSIGN_OR_RETURN(const std::vector<AddedTokenRule> rules, CollectAddedTokens(json, config));
  ASSIGN_OR_RETURN(Normalizer normalizer, Normalizer::Parse(JsonMember(json, "normalizer")));
  ASSIGN_OR_RETURN(PreTokenizer pre_tokenizer, PreTokenizer::Parse(JsonMember(json, "pre_tokenizer")));
  absl::flat_hash_set<std::string> reserved;
  for (const AddedTokenRule& rule : rules) {
    if (rule.special) reserved.insert(rule.content);
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Bpe> bpe, Bpe::Parse(JsonMember(json, "model"), pre_tokenizer.byte_level(), reserved));
  ASSIGN_OR_RETURN(const TokenDecoder decoder, TokenDecoder::Parse(JsonMember(json, "decoder")));
  ASSIGN_OR_RETURN(tokenizer->frame_, SpecialFrame::Parse(JsonMember(json, "post_processor")));
  ASSIGN_OR_RETURN(tokenizer->encoder_, TextEncoder::Build(std::move(normalizer), std::move(pre_tokenizer), std::move(bpe), rules));
  RETURN_IF_ERROR(tokenizer->FillTokens(decoder, rules));
  RETURN_IF_ERROR(tokenizer->SetSpecialTokens(config));
  tokenizer->style_ = decoder.style();
  tokenizer->style_.clean_up_spaces = config.clean_up_spaces;
  tokenizer->chat_template_ = std::move(config.chat_template);
  return tokenizer;
}

absl::Status HfTokenizer::FillTokens(const TokenDecoder& decoder, const std::vector<AddedTokenRule>& rules) {
  int32_t max_id = encoder_->bpe().max_id();
  for (const AddedTokenRule& rule : rules) max_id = std::max(max_id, rule.id);
  tokens_.resize(static_cast<size_t>(max_id) + 1);
  for (const auto& [spelling, id] : encoder_->bpe().vocabulary()) {
    ASSIGN_OR_RETURN(tokens_[id].bytes, decoder.Bytes(spelling, false));
  }
  for (const AddedTokenRule& rule : rules) {
    Token& token = tokens_[rule.id];
    token.special = rule.special;
    token.bytes = rule.content;
    if (!rule.special) {
      ASSIGN_OR_RETURN(token.bytes, decoder.Bytes(rule.content, true));
    }
    added_tokens_.push_back({rule.id, rule.content, rule.special});
    added_ids_.emplace(rule.content, rule.id);
  }
  return absl::OkStatus();
}

absl::Status HfTokenizer::SetSpecialTokens(const TokenizerConfig& config) {
  const auto resolve = [&](const char* key, const std::optional<std::string>& text, std::optional<int32_t>* id) -> absl::Status {
    if (!text.has_value()) return absl::OkStatus();
    *id = TokenToId(*text);
    if (id->has_value()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer_config.json ", key, ": \"", *text, "\" has no id in tokenizer.json; the two files do not belong together"));
  };
  RETURN_IF_ERROR(resolve("bos_token", config.bos_text, &bos_id_));
  RETURN_IF_ERROR(resolve("eos_token", config.eos_text, &eos_id_));
  bos_text_ = config.bos_text.value_or("");
  eos_text_ = config.eos_text.value_or("");
  if (config.add_bos.value_or(false) && !bos_id_)
    return absl::InvalidArgumentError("tokenizer_config.json: add_bos_token is true, but bos_token is not given");
  if (config.add_eos.value_or(false) && !eos_id_)
    return absl::InvalidArgumentError("tokenizer_config.json: add_eos_token is true, but eos_token is not given");
  if (config.add_bos && bos_id_) frame_.SetBos(*bos_id_, *config.add_bos);
  if (config.add_eos && eos_id_) frame_.SetEos(*eos_id_, *config.add_eos);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> HfTokenizer::Encode(std::string_view text, const EncodeOptions& options) const {
  return EncodeRuns(text, {{{0, text.size()}, options.parse_special}}, options.add_special_tokens);
}

absl::StatusOr<std::vector<int32_t>> HfTokenizer::EncodeSpans(const std::vector<TextSpan>& spans, bool add_special_tokens) const {
  std::string text;
  std::vector<TrustRun> runs;
  for (const TextSpan& span : spans) {
    if (span.text.empty()) continue;
    const size_t begin = text.size();
    text += span.text;
    if (!runs.empty() && runs.back().parse_special == span.parse_special) {
      runs.back().range.end = text.size();
    } else {
      runs.push_back({{begin, text.size()}, span.parse_special});
    }
  }
  return EncodeRuns(text, runs, add_special_tokens);
}

absl::StatusOr<std::vector<int32_t>> HfTokenizer::EncodeRuns(std::string_view text, const std::vector<TrustRun>& runs,
                                                             bool add_special_tokens) const {
  if (text.size() > kTextBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("the text has ", text.size(), " bytes; at most ", kTextBytesMax, " can be tokenized at once"));
  }
  if (const std::optional<size_t> invalid = FirstInvalidUtf8(text)) {
    return absl::InvalidArgumentError(absl::StrCat("the text is not valid UTF-8 at byte ", *invalid));
  }
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 8);
  RETURN_IF_ERROR(encoder_->Encode(text, runs, &ids));
  if (add_special_tokens) frame_.Apply(&ids);
  return ids;
}

std::string_view HfTokenizer::TokenBytes(int32_t id) const { return InRange(id) ? std::string_view(tokens_[id].bytes) : std::string_view(); }

std::string HfTokenizer::Decode(const std::vector<int32_t>& ids, bool skip_special) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (skip_special && IsSpecial(id)) continue;
    bytes += TokenBytes(id);
  }
  TextStyler styler(style_);
  std::string text = styler.Push(ReplaceInvalidUtf8(bytes));
  return text + styler.Finish();
}

std::optional<int32_t> HfTokenizer::TokenToId(std::string_view content) const {
  if (const auto it = added_ids_.find(Sv(content)); it != added_ids_.end()) return it->second;
  return encoder_->bpe().Find(content);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& model_dir) {
  ASSIGN_OR_RETURN(TokenizerConfig config, TokenizerConfig::Read(model_dir));
  const std::string path = absl::StrCat(model_dir, "/tokenizer.json");
  ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(path));
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = HfTokenizer::Parse(json, std::move(config));
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), path);
  return tokenizer;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Parse(const std::string& tokenizer_json, const std::string& tokenizer_config_json,
                                                            const std::string& where) {
  ASSIGN_OR_RETURN(const nlohmann::json config_json, ParseJson(tokenizer_config_json, where));
  ASSIGN_OR_RETURN(const nlohmann::json json, ParseJson(tokenizer_json, where));
  absl::StatusOr<TokenizerConfig> config = TokenizerConfig::Parse(config_json);
  if (!config.ok()) return Annotate(config.status(), where);
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = HfTokenizer::Parse(json, *std::move(config));
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), where);
  return tokenizer;
}

}  // namespace hearth
