#include "services/router/model_info.h"

#include <algorithm>

#include "common/base/logging.h"
#include "common/base/time.h"
#include "common/formats/model_config.h"

namespace hearth::router {

absl::StatusOr<std::unique_ptr<ModelInfo>> ModelInfo::Load(const NodeConfig& config) {
  auto info = std::make_unique<ModelInfo>();
  ASSIGN_OR_RETURN(const ModelConfig model, ReadModelConfig(config.model_path));
  for (const std::string& note : model.notes) spdlog::info("{}", note);
  info->name = config.model_name;
  info->architecture = model.architecture;
  info->vocab_size = static_cast<int32_t>(model.vocab_size);
  int64_t context = model.max_position_embeddings;
  // A stream can't be longer than the pool that holds its pages.
  if (config.kv_pool_tokens > 0 && config.kv_pool_bytes == 0) context = std::min(context, config.kv_pool_tokens);
  info->context_tokens = static_cast<int32_t>(context);
  ASSIGN_OR_RETURN(info->tokenizer, Tokenizer::Load(config.model_path));
  info->eos_ids = model.eos_token_ids;
  if (const auto eos = info->tokenizer->eos_id(); eos && std::find(info->eos_ids.begin(), info->eos_ids.end(), *eos) == info->eos_ids.end()) {
    info->eos_ids.push_back(*eos);
  }
  if (const std::string_view source = info->tokenizer->chat_template(); !source.empty()) {
    auto parsed = ChatTemplate::Parse(source);
    if (!parsed.ok()) return Annotate(parsed.status(), absl::StrCat(config.model_path, ": chat template"));
    info->chat_template = *std::move(parsed);
  }
  info->created_seconds = UnixNowSeconds();
  return info;
}

}  // namespace hearth::router
