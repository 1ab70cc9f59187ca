// The model as the router knows it: names, context, tokenizer, template, end tokens. No weights.
// Room: services/router. May touch: common/{text,formats,base}. Threads: any; const after Load.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/node_config.h"
#include "common/base/status.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"

namespace hearth::router {

struct ModelInfo {
  std::string name;  // as clients call it
  std::string architecture;
  int32_t context_tokens = 0;  // prompt and answer together
  int32_t vocab_size = 0;      // ids from 0 to this are the model's; the tokenizer may know fewer
  std::vector<int32_t> eos_ids;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat_template;  // null: the checkpoint has none, and chat is refused
  int64_t created_seconds = 0;                  // of the router's start

  // Errors name the file.
  static absl::StatusOr<std::unique_ptr<ModelInfo>> Load(const NodeConfig& config);
};

}  // namespace hearth::router
