// A model as the router knows it: names, context, tokenizer, template, end tokens. No weights.
// Room: services/router. May touch: common/{text,formats,base}. Threads: any; const after Load. Requests share the one that they were parsed
// with; which is the node's own now is for served_model.h to say.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/base/node_config.h"
#include "common/base/status.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"

namespace hearth::router {

struct ModelInfo {
  std::string name;  // as clients call it
  std::string architecture;
  Hash128 fingerprint;               // of the weights that these ids are for, as the store says; zero: not known yet
  int32_t model_context_tokens = 0;  // the checkpoint's own
  int32_t context_tokens = 0;        // prompt and answer together, as this node can hold them
  int32_t vocab_size = 0;            // ids from 0 to this are the model's; the tokenizer may know fewer
  std::vector<int32_t> eos_ids;
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const ChatTemplate> chat_template;  // null: the checkpoint has none, and chat is refused
  int64_t created_seconds = 0;                        // of its loading here

  // Ids from 0 to this can be turned into text: the model's, and those that only the tokenizer knows.
  int32_t known_ids() const { return std::max(vocab_size, tokenizer->vocab_size()); }

  // Errors name the file. `fingerprint` is the caller's to set.
  static absl::StatusOr<ModelInfo> Load(const NodeConfig& config, const std::string& model_dir);
  // The same model in a generation whose KV pool holds `kv_tokens` (0: not known): a stream can't be longer than the pool that holds its pages.
  std::shared_ptr<const ModelInfo> In(const Hash128& generation_fingerprint, int64_t kv_tokens) const;
};

}  // namespace hearth::router
