// Refuses a batch that contradicts itself, the workspace, the pool or the model, before the first op is enqueued.
// Room: common/model. May touch: common/{device,formats,shm,base}. Threads: any; a pure function.
#pragma once

#include "common/base/status.h"
#include "common/formats/model_config.h"
#include "common/model/forward.h"

namespace hearth {

absl::Status CheckBatch(const ModelConfig& config, const KvGeometry& expected, const KvGeometry& pool, int64_t max_rows, int64_t max_logit_rows,
                        const ForwardBatch& batch);
// Of a model with an MTP module: each sequence that writes its first row's slot brings the hidden state that it is made from.
absl::Status CheckPriorHidden(const ForwardBatch& batch);
// Of Model::Draft: one row a sequence, not at position 0, each with a hidden state, all logits wanted.
absl::Status CheckDraft(const ForwardBatch& batch);

}  // namespace hearth
