#include "common/formats/rope_config.h"

#include <array>

#include "absl/strings/str_cat.h"

namespace hearth {
namespace {

constexpr double kThetaMax = 1e15;
constexpr char kSupportedTypes[] = "supported: \"default\" (or null) and \"yarn\"";

struct Dialect {
  std::optional<double> theta;
  std::optional<double> partial_rotary_factor;
  std::optional<RopeScaling> scaling;
};

absl::StatusOr<double> ParseTheta(const ConfigKeys& keys) {
  // Above 1, because YaRN divides by its logarithm and a base of 1 turns nothing.
  return keys.Double("rope_theta", 1.0 + 1e-6, kThetaMax);
}

// One of the two spellings of the type, or both when they agree. Empty: none was given.
absl::StatusOr<std::string> ParseType(const ConfigKeys& keys) {
  std::string type;
  for (const char* key : {"rope_type", "type"}) {
    if (!keys.HasValue(key)) continue;
    ASSIGN_OR_RETURN(std::string given, keys.StringOr(key, ""));
    if (!type.empty() && given != type) {
      return keys.Refuse(key, absl::StrCat("contradicts rope_type \"", type, "\": remove one of the two"));
    }
    if (given != "default" && given != "yarn") return keys.Refuse(key, kSupportedTypes);
    type = std::move(given);
  }
  return type;
}

absl::StatusOr<RopeScaling> ParseYarn(const ConfigKeys& keys, int64_t max_position_embeddings) {
  RopeScaling yarn;
  ASSIGN_OR_RETURN(yarn.factor, keys.Double("factor", 1.0, 1e6));
  if (keys.HasValue("original_max_position_embeddings")) {
    ASSIGN_OR_RETURN(yarn.original_max_position_embeddings, keys.Int("original_max_position_embeddings", {1, int64_t{1} << 31}));
  } else {
    yarn.original_max_position_embeddings = max_position_embeddings;
    keys.Note(absl::StrCat(keys.path(), "original_max_position_embeddings is missing: max_position_embeddings ", max_position_embeddings, " taken"));
  }
  ASSIGN_OR_RETURN(yarn.beta_fast, keys.DoubleOr("beta_fast", 32.0, 1e-6, 1e6, /*note=*/false));
  ASSIGN_OR_RETURN(yarn.beta_slow, keys.DoubleOr("beta_slow", 1.0, 1e-6, 1e6, /*note=*/false));
  if (yarn.beta_fast < yarn.beta_slow) return keys.Refuse("beta_fast", absl::StrCat("need at least beta_slow, ", yarn.beta_slow));
  if (keys.HasValue("mscale")) {
    ASSIGN_OR_RETURN(yarn.mscale, keys.Double("mscale", 0.0, 1e3));
  }
  if (keys.HasValue("mscale_all_dim")) {
    ASSIGN_OR_RETURN(yarn.mscale_all_dim, keys.Double("mscale_all_dim", 0.0, 1e3));
  }
  if (keys.HasValue("attention_factor")) {
    ASSIGN_OR_RETURN(yarn.attention_factor, keys.Double("attention_factor", 1e-6, 1e6));
  }
  ASSIGN_OR_RETURN(const bool truncate, keys.BoolOr("truncate", true));
  if (!truncate) return keys.Refuse("truncate", "only true is supported");
  return yarn;
}

absl::StatusOr<Dialect> ParseDialect(const ConfigKeys& config, const char* key, int64_t max_position_embeddings, double partial_rotary_factor_min,
                                     std::vector<std::string>* notes) {
  Dialect dialect;
  if (!config.HasValue(key)) return dialect;
  const nlohmann::json& object = *config.Find(key);
  if (!object.is_object()) return config.Refuse(key, "need an object or null");
  const ConfigKeys keys(object, absl::StrCat(config.path(), key, "."), notes);
  if (keys.HasValue("rope_theta")) {
    ASSIGN_OR_RETURN(dialect.theta, ParseTheta(keys));
  }
  if (keys.HasValue("partial_rotary_factor")) {
    ASSIGN_OR_RETURN(dialect.partial_rotary_factor, keys.Double("partial_rotary_factor", partial_rotary_factor_min, 1.0));
  }
  ASSIGN_OR_RETURN(const std::string type, ParseType(keys));
  if (type == "yarn") {
    ASSIGN_OR_RETURN(dialect.scaling, ParseYarn(keys, max_position_embeddings));
  } else if (type.empty()) {
    // {} and {"rope_theta": ...} scale nothing; anything else without a type would be a guess.
    for (const auto& [name, value] : object.items()) {
      if (name != "rope_theta" && name != "partial_rotary_factor" && !value.is_null()) {
        return keys.Refuse("rope_type", absl::StrCat("but ", name, " is given; ", kSupportedTypes));
      }
    }
  }
  return dialect;
}

bool SameScaling(const std::optional<RopeScaling>& a, const std::optional<RopeScaling>& b) {
  const auto fields = [](const RopeScaling& s) {
    return std::array<double, 7>{s.factor,
                                 static_cast<double>(s.original_max_position_embeddings),
                                 s.beta_fast,
                                 s.beta_slow,
                                 s.mscale,
                                 s.mscale_all_dim,
                                 s.attention_factor.value_or(0.0)};
  };
  if (!a || !b) return !a && !b;
  return fields(*a) == fields(*b);
}

}  // namespace

absl::StatusOr<RopeConfig> ParseRopeConfig(const ConfigKeys& config, int64_t max_position_embeddings, double partial_rotary_factor_min,
                                           std::vector<std::string>* notes) {
  ASSIGN_OR_RETURN(const Dialect scaling, ParseDialect(config, "rope_scaling", max_position_embeddings, partial_rotary_factor_min, notes));
  ASSIGN_OR_RETURN(const Dialect parameters, ParseDialect(config, "rope_parameters", max_position_embeddings, partial_rotary_factor_min, notes));
  if (config.HasValue("rope_scaling") && config.HasValue("rope_parameters") && !SameScaling(scaling.scaling, parameters.scaling)) {
    return config.Refuse("rope_parameters",
                         absl::StrCat("contradicts rope_scaling ", Shown(*config.Find("rope_scaling")), ": remove one of the two"));
  }
  std::optional<double> theta;
  if (config.HasValue("rope_theta")) {
    ASSIGN_OR_RETURN(theta, ParseTheta(config));
  }
  for (const Dialect* dialect : {&scaling, &parameters}) {
    if (!dialect->theta) continue;
    if (theta && *theta != *dialect->theta) {
      return absl::InvalidArgumentError(absl::StrCat(config.path(), "rope_theta is given as ", *theta, " and as ", *dialect->theta, " inside ",
                                                     dialect == &scaling ? "rope_scaling" : "rope_parameters", ": remove one of the two"));
    }
    theta = dialect->theta;
  }
  if (!theta) config.Note(absl::StrCat(config.path(), "rope_theta is missing: 10000 taken, as Transformers does"));
  std::optional<double> partial;
  if (config.HasValue("partial_rotary_factor")) {
    ASSIGN_OR_RETURN(partial, config.Double("partial_rotary_factor", partial_rotary_factor_min, 1.0));
  }
  for (const Dialect* dialect : {&scaling, &parameters}) {
    if (!dialect->partial_rotary_factor) continue;
    if (partial && *partial != *dialect->partial_rotary_factor) {
      return absl::InvalidArgumentError(absl::StrCat(config.path(), "partial_rotary_factor is given as ", *partial, " and as ",
                                                     *dialect->partial_rotary_factor, ": remove one of the two"));
    }
    partial = dialect->partial_rotary_factor;
  }
  return RopeConfig{theta.value_or(10000.0), scaling.scaling ? scaling.scaling : parameters.scaling, partial};
}

}  // namespace hearth
