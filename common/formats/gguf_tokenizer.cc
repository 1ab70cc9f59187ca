#include "common/formats/gguf_tokenizer.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/formats/file_io.h"
#include "common/formats/model_config.h"

namespace hearth {
namespace {

using nlohmann::json;

// What a name under tokenizer.ggml.pre stands for: splits, one after the other, then the byte-level alphabet.
struct PreTokenizerKind {
  const char* name;
  std::vector<const char*> splits;
  bool nfc = false;
  bool whole_pieces_first = false;  // a piece that is a token is not merged
  bool add_bos = false;             // where the file doesn't say
};

// DeepSeek-V3's, Qwen2's and Llama-3's are those of their tokenizer.json. deepseek-llm, DeepSeek-V2's too, is that of DeepSeek-LLM: some cased letters by
// code, single digits. Kimi-K2's is the pattern of Moonshot's tokenization_kimi.py, where tiktoken looks pieces up whole.
const std::vector<PreTokenizerKind>& PreTokenizerKinds() {
  static const auto* kinds = new std::vector<PreTokenizerKind>{
      {"deepseek-v3",
       {R"(\p{N}{1,3})", R"([\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+)",
        R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}},
      {"deepseek-llm",
       {R"([\r\n])",
        R"(\s?[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af})"
        R"(\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5})"
        R"(\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd})"
        R"(\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15})"
        R"(\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d})"
        R"(\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb})"
        R"(\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d})"
        R"(\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e})"
        R"(\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d})"
        R"(\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06})"
        R"(\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb})"
        R"(\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+)",
        R"(\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+)", R"(\s+$)",
        R"([\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+)", R"(\p{N})"}},
      {"kimi-k2",
       {R"([\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
        R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
        R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
       false,
       true},
      {"qwen2", {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}, true},
      {"llama-bpe",
       {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
       false,
       true,
       true},
  };
  return *kinds;
}

enum TokenType : int64_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

class TokenizerReader {
 public:
  explicit TokenizerReader(const GgufModel& model) : model_(model) {}

  absl::StatusOr<TokenizerTexts> Read() {
    ASSIGN_OR_RETURN(const std::string kind, String("tokenizer.ggml.model"));
    if (kind != "gpt2") return Refuse("tokenizer.ggml.model", absl::StrCat("is ", Quoted(kind), "; supported: \"gpt2\" (byte-level BPE)"));
    ASSIGN_OR_RETURN(const PreTokenizerKind* pre, Kind());
    ASSIGN_OR_RETURN(tokens_, Array("tokenizer.ggml.tokens"));
    json tokenizer;
    RETURN_IF_ERROR(AddTokens(tokenizer));
    ASSIGN_OR_RETURN(const GgufArray* merges, Array("tokenizer.ggml.merges"));
    for (size_t i = 0; i < merges->strings.size(); ++i) RETURN_IF_ERROR(CheckMerge(merges->strings[i], i));
    tokenizer["model"]["type"] = "BPE";
    tokenizer["model"]["merges"] = merges->strings;
    tokenizer["model"]["ignore_merges"] = pre->whole_pieces_first;
    tokenizer["normalizer"] = pre->nfc ? json{{"type", "NFC"}} : json(nullptr);
    json steps = json::array();
    for (const char* split : pre->splits) steps.push_back({{"type", "Split"}, {"pattern", {{"Regex", split}}}, {"behavior", "Isolated"}});
    steps.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
    tokenizer["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", std::move(steps)}};
    tokenizer["decoder"] = {{"type", "ByteLevel"}};
    ASSIGN_OR_RETURN(const json config, Config(*pre));
    TokenizerTexts texts;
    ASSIGN_OR_RETURN(texts.tokenizer_json, Text(tokenizer));
    ASSIGN_OR_RETURN(texts.tokenizer_config_json, Text(config));
    return texts;
  }

 private:
  absl::Status Refuse(const std::string& key, std::string_view what) const { return RefuseGgufTokenizer(model_, key, what); }
  const GgufValue* Find(const std::string& key) const {
    const auto it = model_.metadata.find(key);
    return it == model_.metadata.end() ? nullptr : &it->second;
  }
  absl::StatusOr<std::string> String(const std::string& key) const {
    const GgufValue* value = Find(key);
    if (value == nullptr) return Refuse(key, "is missing");
    const auto* text = std::get_if<std::string>(value);
    if (text == nullptr) return Refuse(key, "is no string");
    return *text;
  }
  // An array of strings.
  absl::StatusOr<const GgufArray*> Array(const std::string& key) const {
    const GgufValue* value = Find(key);
    if (value == nullptr) return Refuse(key, "is missing");
    const auto* array = std::get_if<GgufArray>(value);
    if (array != nullptr && array->length > kGgufArrayKeptMax)
      return Refuse(key, absl::StrCat("has ", array->length, " entries; at most ", kGgufArrayKeptMax, " are read"));
    if (array == nullptr || array->strings.size() != array->length) return Refuse(key, "is no array of strings");
    return array;
  }

  absl::StatusOr<const PreTokenizerKind*> Kind() const {
    ASSIGN_OR_RETURN(const std::string name, String("tokenizer.ggml.pre"));
    std::string known;
    for (const PreTokenizerKind& kind : PreTokenizerKinds()) {
      if (name == kind.name) return &kind;
      absl::StrAppend(&known, known.empty() ? "" : ", ", kind.name);
    }
    return Refuse("tokenizer.ggml.pre", absl::StrCat("is ", Quoted(name), "; supported: ", known));
  }

  int64_t TypeOf(size_t id) const { return types_ == nullptr ? kNormal : types_->integers[id]; }
  bool IsPiece(size_t id) const { return TypeOf(id) == kNormal || TypeOf(id) == kByte; }

  // The vocabulary, and beside it what is looked for in texts as it stands.
  absl::Status AddTokens(json& tokenizer) {
    if (const GgufValue* value = Find("tokenizer.ggml.token_type"); value != nullptr) {
      types_ = std::get_if<GgufArray>(value);
      if (types_ == nullptr || types_->integers.size() != tokens_->length) return Refuse("tokenizer.ggml.token_type", "is no number for each token");
    }
    // The converter fills the list up to the model's vocabulary, so that each row of the embedding has its text.
    if (const auto embedding = model_.tensors.find("token_embd.weight"); embedding != model_.tensors.end()) {
      const auto rows = static_cast<uint64_t>(embedding->second.shape[0]);
      if (tokens_->length != rows)
        return Refuse("tokenizer.ggml.tokens", absl::StrCat("has ", tokens_->length, " entries, token_embd.weight ", rows, " rows"));
    }
    json vocabulary = json::object(), added = json::array();
    for (size_t id = 0; id < tokens_->strings.size(); ++id) {
      const std::string& text = tokens_->strings[id];
      const int64_t type = TypeOf(id);
      if (type == kUnused) continue;  // a place without a token, whose text the converter made up
      const auto [known, is_new] = ids_.emplace(text, id);
      if (!is_new) return Refuse("tokenizer.ggml.tokens", absl::StrCat("has ", Quoted(text), " twice, as ", known->second, " and ", id));
      if (IsPiece(id)) {
        vocabulary[text] = id;
        continue;
      }
      if (type != kControl && type != kUnknown && type != kUserDefined) {
        return Refuse("tokenizer.ggml.token_type", absl::StrCat("is ", type, " for token ", id, ", which is no known type"));
      }
      added.push_back({{"id", id}, {"content", text}, {"special", type != kUserDefined}, {"normalized", false}});
    }
    tokenizer["added_tokens"] = std::move(added);
    tokenizer["model"]["vocab"] = std::move(vocabulary);
    return absl::OkStatus();
  }

  absl::Status CheckMerge(std::string_view merge, size_t rank) const {
    const auto refuse = [&](std::string_view why) {
      return Refuse("tokenizer.ggml.merges", absl::StrCat("has ", Quoted(merge), " as entry ", rank, ", ", Sv(why)));
    };
    const size_t space = merge.find(' ');
    if (space == std::string_view::npos || space == 0 || space + 1 == merge.size() || merge.find(' ', space + 1) != std::string_view::npos)
      return refuse("which is not two tokens and a space between them");
    const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
    std::string merged(left);
    merged += right;
    for (const std::string_view piece : {left, right, std::string_view(merged)}) {
      const auto known = ids_.find(piece);
      if (known == ids_.end() || !IsPiece(known->second)) return refuse(absl::StrCat("but ", Quoted(piece), " is no normal token"));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<json> Config(const PreTokenizerKind& pre) const {
    json config = json::object();
    for (const char* which : {"bos", "eos"}) {
      const std::string id_key = absl::StrCat("tokenizer.ggml.", which, "_token_id"), add_key = absl::StrCat("tokenizer.ggml.add_", which, "_token");
      if (const GgufValue* value = Find(id_key); value != nullptr) {
        const std::optional<int64_t> id = GgufInteger(*value);
        if (!id) return Refuse(id_key, "is no integer");
        if (*id < 0 || static_cast<uint64_t>(*id) >= tokens_->length || TypeOf(static_cast<size_t>(*id)) == kUnused)
          return Refuse(id_key, absl::StrCat("is ", *id, ", none of the ", tokens_->length, " tokens that are in use"));
        const std::string& text = tokens_->strings[static_cast<size_t>(*id)];
        if (text.empty()) return Refuse(id_key, absl::StrCat("is ", *id, ", a token without a text"));
        config[absl::StrCat(which, "_token")] = text;
      }
      if (const GgufValue* value = Find(add_key); value != nullptr) {
        const bool* add = std::get_if<bool>(value);
        if (add == nullptr) return Refuse(add_key, "is neither true nor false");
        if (*add && Find(id_key) == nullptr) return Refuse(add_key, absl::StrCat("is true, but ", id_key, " is missing"));
        config[absl::StrCat("add_", which, "_token")] = *add;
      }
    }
    if (pre.add_bos && config.contains("bos_token") && !config.contains("add_bos_token")) config["add_bos_token"] = true;
    if (Find(kGgufChatTemplate) != nullptr) {
      ASSIGN_OR_RETURN(config["chat_template"], String(kGgufChatTemplate));
    }
    return config;
  }

  // JSON is UTF-8, a GGUF string may be anything.
  absl::StatusOr<std::string> Text(const json& value) const {
    try {
      return value.dump();
    } catch (const json::type_error&) {
      return Refuse("tokenizer.*", "holds text that is not UTF-8");
    }
  }

  const GgufModel& model_;
  const GgufArray* tokens_ = nullptr;
  const GgufArray* types_ = nullptr;                  // null: all are normal
  std::unordered_map<std::string_view, size_t> ids_;  // of all tokens in use, by their texts
};

}  // namespace

absl::StatusOr<TokenizerTexts> GgufTokenizerTexts(const GgufModel& model) { return TokenizerReader(model).Read(); }

absl::Status RefuseGgufTokenizer(const GgufModel& model, std::string_view key, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(model.files[0].path, ": metadata key ", Sv(key), " ", Sv(what),
                                                 "; put the model's own tokenizer.json and tokenizer_config.json beside the file"));
}

absl::StatusOr<std::optional<TokenizerTexts>> ReadGgufTokenizer(const ModelFiles& files) {
  std::error_code error;
  if (!files.gguf.has_value() || std::filesystem::exists(absl::StrCat(ModelFilesDir(files.path), "/tokenizer.json"), error))
    return std::optional<TokenizerTexts>();
  ASSIGN_OR_RETURN(TokenizerTexts texts, GgufTokenizerTexts(*files.gguf));
  return std::optional<TokenizerTexts>(std::move(texts));
}

}  // namespace hearth
