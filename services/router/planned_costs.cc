#include "services/router/planned_costs.h"

#include "common/formats/file_io.h"
#include "common/formats/model_config.h"
#include "common/plan/pass_cost_plan.h"

namespace hearth::router {
namespace {

constexpr uint64_t kProfileBytesMax = 1 << 20;

// A socket of a few years ago: near enough for the proportions between reading weights, multiplying and attention.
HardwareProfile SomeMachine() {
  HardwareProfile machine{.name = "some machine", .source = "nominal", .cpu = {}, .num_gpus = 0, .gpu = {}};
  machine.cpu = {.name = "nominal",
                 .sockets = 1,
                 .cores = 32,
                 .channels = 8,
                 .memory_gib = 1 << 20,  // no model is too large for it
                 .cache_mib = 64,
                 .channel_gb_per_s = 38.4,
                 .core_gb_per_s = 15,
                 .bf16_gflops_per_core = 200,
                 .memory_efficiency = 0.7,
                 .compute_efficiency = 0.5,
                 .op_us = 10};
  return machine;
}

absl::StatusOr<HardwareProfile> ReadHardware(const NodeConfig& config) {
  if (config.hardware.empty()) return SomeMachine();
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(config.hardware, kProfileBytesMax));
  ASSIGN_OR_RETURN(HardwareProfile profile, ParseHardwareProfile(text, config.hardware));
  profile.num_gpus = 0;
  return profile;
}

}  // namespace

absl::Status CheckHardware(const NodeConfig& config) { return Annotate(ReadHardware(config).status(), "node.hardware"); }

absl::StatusOr<std::vector<PlannedCost>> PlanCosts(const NodeConfig& config, const std::string& model_dir) {
  ASSIGN_OR_RETURN(const HardwareProfile hardware, ReadHardware(config));
  ASSIGN_OR_RETURN(const ModelTexts texts, ReadModelTexts(model_dir));
  ASSIGN_OR_RETURN(const PlannedModel model, PlanModel(texts, 1));
  ASSIGN_OR_RETURN(const PassCost cost, PlanPassCost(model, hardware, {}, PrefillPath::kChunked, config.prefill_chunk_tokens));
  const bool shape_only = config.hardware.empty();
  return std::vector<PlannedCost>{{"decode chunked", cost, shape_only}, {"prefill chunked", cost, shape_only}};
}

}  // namespace hearth::router
