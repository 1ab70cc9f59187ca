#include "common/formats/synth_tokenizer.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace hearth {
namespace {

using nlohmann::ordered_json;

constexpr const char* kSpecialTokens[] = {"<s>", "</s>", "<pad>"};

std::string Utf8(uint32_t code_point) {
  if (code_point < 0x80) return std::string(1, static_cast<char>(code_point));
  return {static_cast<char>(0xc0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3f))};
}

// The byte-level alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 upwards in
// order.
std::string ByteLetter(int byte) {
  const auto is_printable = [](int b) { return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae; };
  if (is_printable(byte)) return Utf8(static_cast<uint32_t>(byte));
  uint32_t rank = 0;
  for (int b = 0; b < byte; ++b) rank += is_printable(b) ? 0 : 1;
  return Utf8(0x100 + rank);
}

}  // namespace

std::string ByteTokenizerJson(int64_t vocab_size) {
  ordered_json added = ordered_json::array();
  // As text: a JSON tree of 130,000 entries takes far longer to build than to write.
  std::string vocab_text = "{";
  const auto put = [&vocab_text](const std::string& token, int64_t id) {
    absl::StrAppend(&vocab_text, id == 0 ? "" : ", ", nlohmann::json(token).dump(), ": ", id);
  };
  for (int64_t id = 0; id < 3; ++id) {
    put(kSpecialTokens[id], id);
    added.push_back({{"id", id},
                     {"content", kSpecialTokens[id]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  for (int byte = 0; byte < 256; ++byte) put(ByteLetter(byte), 3 + byte);
  const std::string blank = ByteLetter(' ');
  for (int64_t id = kByteTokenizerIds; id < vocab_size; ++id) put(absl::StrCat(blank, "w", id), id);
  vocab_text += "}";

  const ordered_json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  const std::string head = ordered_json{{"version", "1.0"},      {"truncation", nullptr},       {"padding", nullptr},        {"added_tokens", added},
                                        {"normalizer", nullptr}, {"pre_tokenizer", byte_level}, {"post_processor", nullptr}, {"decoder", byte_level}}
                               .dump();
  const std::string model = ordered_json{{"type", "BPE"},
                                         {"dropout", nullptr},
                                         {"unk_token", nullptr},
                                         {"continuing_subword_prefix", nullptr},
                                         {"end_of_word_suffix", nullptr},
                                         {"fuse_unk", false},
                                         {"byte_fallback", false},
                                         {"ignore_merges", false},
                                         {"merges", ordered_json::array()}}
                                .dump();
  return absl::StrCat(head.substr(0, head.size() - 1), ",\"model\":", model.substr(0, model.size() - 1), ",\"vocab\":", vocab_text, "}}\n");
}

std::string ByteTokenizerConfigJson(int64_t max_position_embeddings) {
  return ordered_json{{"tokenizer_class", "PreTrainedTokenizerFast"},
                      {"bos_token", kSpecialTokens[0]},
                      {"eos_token", kSpecialTokens[1]},
                      {"pad_token", kSpecialTokens[2]},
                      {"add_bos_token", false},
                      {"clean_up_tokenization_spaces", false},
                      {"model_max_length", max_position_embeddings},
                      {"chat_template",
                       "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] "
                       "}}\n{% endfor %}"
                       "{% if add_generation_prompt %}assistant:{% endif %}"}}
             .dump(1) +
         "\n";
}

}  // namespace hearth
