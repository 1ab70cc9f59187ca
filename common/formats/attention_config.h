// The attention part of a config.json, of either kind.
// Room: common/formats, internal.
#pragma once

#include "common/base/status.h"
#include "common/formats/config_keys.h"
#include "common/formats/families.h"
#include "common/formats/model_config.h"

namespace hearth {

// Fills heads, head dimensions, biases, norms and rotary positions. Needs hidden_size and max_position_embeddings.
absl::Status ParseAttention(const ConfigKeys& keys, const Family& family, ModelConfig& config);

}  // namespace hearth
