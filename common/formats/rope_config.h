// The dialects in which configs spell rotary positions: rope_scaling with type or rope_type, rope_parameters with theta
// inside, null, {}.
// Room: common/formats, internal. All spellings of one model give one result; what contradicts itself
// or isn't known is refused.
#pragma once

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/formats/config_keys.h"
#include "common/formats/model_config.h"

namespace hearth {

struct RopeConfig {
  double theta = 10000.0;
  std::optional<RopeScaling> scaling;
  std::optional<double> partial_rotary_factor;  // the share of a head that is rotated
};

// partial_rotary_factor_min: 1 where the family rotates all of its rotary part.
absl::StatusOr<RopeConfig> ParseRopeConfig(const ConfigKeys& config, int64_t max_position_embeddings, double partial_rotary_factor_min,
                                           std::vector<std::string>* notes);

}  // namespace hearth
