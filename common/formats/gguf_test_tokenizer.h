// A directory's tokenizer in GGUF metadata, as convert_hf_to_gguf.py puts it there.
// Room: common/formats, tests only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/formats/gguf_test_util.h"

namespace hearth {

// From the tokenizer.json and tokenizer_config.json in `dir`. `pre`: tokenizer.ggml.pre. The list is filled up to `vocab_size` entries.
inline void AddTokenizer(GgufTestWriter& w, const std::string& dir, const std::string& pre, size_t vocab_size = 0) {
  using nlohmann::json;
  const auto read = [&](const char* name) { return json::parse(std::ifstream(dir + "/" + name)); };
  const json tokenizer = read("tokenizer.json"), config = read("tokenizer_config.json");
  std::map<size_t, std::pair<std::string, int32_t>> by_id;  // text and type
  for (const auto& [text, id] : tokenizer["model"]["vocab"].items()) by_id[id] = {text, 1};
  for (const json& added : tokenizer["added_tokens"]) by_id[added["id"]] = {added["content"], added["special"] ? 3 : 4};
  std::vector<std::string> tokens, merges;
  std::vector<int32_t> types;
  const auto fill_up = [&](size_t to) {
    for (; tokens.size() < to; types.push_back(5)) tokens.push_back("[PAD" + std::to_string(tokens.size()) + "]");
  };
  for (const auto& [id, token] : by_id) {
    fill_up(id);
    tokens.push_back(token.first);
    types.push_back(token.second);
    for (const char* which : {"bos", "eos"}) {
      const json& special = config.value(std::string(which) + "_token", json());
      const json text = special.is_object() ? special["content"] : special;
      if (text == token.first) w.Uint32(std::string("tokenizer.ggml.") + which + "_token_id", static_cast<uint32_t>(id));
    }
  }
  fill_up(vocab_size);
  for (const json& merge : tokenizer["model"]["merges"]) {
    merges.push_back(merge.is_string() ? merge.get<std::string>() : merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  }
  w.String("tokenizer.ggml.model", "gpt2");
  w.String("tokenizer.ggml.pre", pre);
  w.Strings("tokenizer.ggml.tokens", tokens);
  w.Int32s("tokenizer.ggml.token_type", types);
  w.Strings("tokenizer.ggml.merges", merges);
  if (config.contains("add_bos_token")) w.Bool("tokenizer.ggml.add_bos_token", config["add_bos_token"]);
  if (config.contains("chat_template")) w.String("tokenizer.chat_template", config["chat_template"]);
}

}  // namespace hearth
