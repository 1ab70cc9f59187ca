// A GGUF file's own tokenizer in Hugging Face's words: tokenizer.json and tokenizer_config.json made from its metadata.
// Room: common/formats. May touch: common/base. Threads: any.
//
// Keys (ggml's docs/gguf.md; convert_hf_to_gguf.py writes them): tokenizer.ggml.model, "gpt2" for byte-level BPE, the one kind that is read; .pre, the
// name of the pre-tokenizer, which is a pattern and no data of the file; .tokens and .merges; .token_type (1 normal, 2 unknown, 3 control, 4 user-defined,
// 5 unused, 6 byte); .bos_token_id, .eos_token_id, .add_bos_token, .add_eos_token; tokenizer.chat_template.
// What the file does not keep: whether an added token strips spaces or waits for normalized text. None does, as in the families that are read.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "common/base/status.h"
#include "common/formats/gguf.h"
#include "common/formats/model_files.h"

namespace hearth {

struct TokenizerTexts {
  std::string tokenizer_json;
  std::string tokenizer_config_json;
};

inline constexpr char kGgufChatTemplate[] = "tokenizer.chat_template";

// `model`: read with its arrays' values. What it gives, a Tokenizer takes: all that one would refuse is refused here, by the metadata's own keys.
// Errors: InvalidArgument names the key, what is supported and, as the remedy, a tokenizer.json beside the file.
absl::StatusOr<TokenizerTexts> GgufTokenizerTexts(const GgufModel& model);
// The error for a key of that metadata, in the words of the others. `what` goes on from the key: "is missing".
absl::Status RefuseGgufTokenizer(const GgufModel& model, std::string_view key, std::string_view what);

// Nothing for other models than GGUF's and where ModelFilesDir holds a tokenizer.json, which is believed before the metadata.
absl::StatusOr<std::optional<TokenizerTexts>> ReadGgufTokenizer(const ModelFiles& files);

}  // namespace hearth
