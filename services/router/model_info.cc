#include "services/router/model_info.h"

#include <algorithm>

#include "common/base/logging.h"
#include "common/base/time.h"
#include "common/formats/model_config.h"
#include "common/text/model_text.h"

namespace hearth::router {

absl::StatusOr<ModelInfo> ModelInfo::Load(const NodeConfig& config, const std::string& model_dir) {
  ModelInfo info;
  ASSIGN_OR_RETURN(const ModelFiles files, OpenModelFiles(model_dir, GgufArrays::kValues));
  ASSIGN_OR_RETURN(const ModelConfig model, ReadModelConfig(files));
  for (const std::string& note : model.notes) spdlog::info("{}", note);
  info.name = config.model_name_is_default ? DefaultModelName(model_dir) : config.model_name;
  info.architecture = model.architecture;
  info.vocab_size = static_cast<int32_t>(model.vocab_size);
  info.model_context_tokens = static_cast<int32_t>(model.max_position_embeddings);
  info.context_tokens = info.model_context_tokens;
  // What the pool holds once it is there is the store's to say; until then, what was asked for.
  if (config.kv_pool_tokens > 0 && config.kv_pool_bytes == 0) {
    info.context_tokens = static_cast<int32_t>(std::min(model.max_position_embeddings, config.kv_pool_tokens));
  }
  ASSIGN_OR_RETURN(const ModelText text, ReadModelText(files));
  info.tokenizer = text.tokenizer;
  info.chat_template = text.chat_template;
  info.eos_ids = model.eos_token_ids;
  if (const auto eos = info.tokenizer->eos_id(); eos && std::find(info.eos_ids.begin(), info.eos_ids.end(), *eos) == info.eos_ids.end()) {
    info.eos_ids.push_back(*eos);
  }
  info.created_seconds = UnixNowSeconds();
  return info;
}

std::shared_ptr<const ModelInfo> ModelInfo::In(const Hash128& generation_fingerprint, int64_t kv_tokens) const {
  auto info = std::make_shared<ModelInfo>(*this);
  info->fingerprint = generation_fingerprint;
  if (kv_tokens > 0) info->context_tokens = static_cast<int32_t>(std::min<int64_t>(model_context_tokens, kv_tokens));
  return info;
}

}  // namespace hearth::router
