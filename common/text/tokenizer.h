// Tokenizer from a Hugging Face tokenizer.json: byte-level BPE with regex splits, normaliser, added tokens.
// Room: common/text. May touch: common/base. Threads: any; const after load.
// O(n log n) in the text for any input: a piece is merged with a heap of pairs, never by rescanning; splits never
// recurse.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"
#include "common/text/decode_style.h"

namespace hearth {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
};

struct EncodeOptions {
  // BOS/EOS as tokenizer_config.json (add_bos_token, add_eos_token) or the post-processor ask; a text that already
  // begins with BOS gets no second one.
  bool add_special_tokens = true;
  // Texts of added tokens become their ids. False: they are ordinary text, for what a user wrote. Added tokens that are
  // not special (DeepSeek's <|User|>) are always honoured by the reference; here they too follow this flag, so that
  // user text can't forge a turn.
  bool parse_special = false;
};

// A text whose parts are trusted differently: template text honours special tokens, user text does not.
struct TextSpan {
  std::string_view text;
  bool parse_special = true;
};

class Tokenizer {
 public:
  // Reads tokenizer.json and, beside it, tokenizer_config.json when there. Errors name file and key, what was found and
  // what is supported.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& model_dir);
  // The same from the texts of both files, for models that keep them elsewhere. Errors begin with `where`.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Parse(const std::string& tokenizer_json, const std::string& tokenizer_config_json,
                                                          const std::string& where);
  virtual ~Tokenizer() = default;

  // InvalidArgument when the text is not valid UTF-8 (with the byte offset).
  virtual absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text, const EncodeOptions& options) const = 0;
  // The spans are one text: ids are those of Encode for their concatenation, but added tokens count only where they lie
  // wholly in adjacent spans that are trusted.
  virtual absl::StatusOr<std::vector<int32_t>> EncodeSpans(const std::vector<TextSpan>& spans, bool add_special_tokens) const = 0;

  // The bytes of one token, exactly (may be a part of a character). Special tokens give their text. Empty for an id
  // outside the vocabulary.
  virtual std::string_view TokenBytes(int32_t id) const = 0;
  virtual bool IsSpecial(int32_t id) const = 0;
  // Whole text, invalid UTF-8 replaced by U+FFFD as the reference does. Equals what a TextStream with decode_style()
  // makes of the same tokens' bytes.
  virtual std::string Decode(const std::vector<int32_t>& ids, bool skip_special) const = 0;
  // What Decode does to the joined text beyond that, for TextStream.
  virtual DecodeStyle decode_style() const { return {}; }

  virtual std::optional<int32_t> TokenToId(std::string_view content) const = 0;
  virtual int32_t vocab_size() const = 0;  // largest id + 1
  virtual const std::vector<AddedToken>& added_tokens() const = 0;
  virtual std::optional<int32_t> bos_id() const = 0;
  virtual std::optional<int32_t> eos_id() const = 0;
  virtual std::string_view bos_text() const = 0;
  virtual std::string_view eos_text() const = 0;
  virtual bool add_bos() const = 0;
  virtual std::string_view chat_template() const = 0;  // from tokenizer_config.json or chat_template.jinja; empty when there is none
};

}  // namespace hearth
