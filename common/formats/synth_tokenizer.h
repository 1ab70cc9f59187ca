// The tokenizer of a random model: ids 0-2 are <s>, </s> and <pad>, id 3 + b is byte b, the rest are filler words that
// text never encodes to but that a random model will say.
// Room: common/formats, internal.
#pragma once

#include <cstdint>
#include <string>

namespace hearth {

inline constexpr int64_t kByteTokenizerIds = 3 + 256;

// tokenizer.json, in the published format of Hugging Face's tokenizers: a byte-level BPE without merges.
std::string ByteTokenizerJson(int64_t vocab_size);
// tokenizer_config.json: special tokens by name, and a chat template that writes "role: content" lines.
std::string ByteTokenizerConfigJson(int64_t max_position_embeddings);

}  // namespace hearth
