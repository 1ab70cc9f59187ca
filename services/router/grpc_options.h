// inference.proto's options and messages -> a request, with the checks that HTTP's have. Room: services/router. Threads: any; pure.
#pragma once

#include <memory>

#include "hearth/v1/inference.pb.h"
#include "services/router/model_info.h"
#include "services/router/request.h"

namespace hearth::router {

absl::StatusOr<std::shared_ptr<Request>> FromGenerate(const v1::GenerateRequest& message, const ModelInfo& model, int64_t max_tokens_default);
absl::StatusOr<std::shared_ptr<Request>> FromChat(const v1::ChatRequest& message, const ModelInfo& model, int64_t max_tokens_default);

}  // namespace hearth::router
