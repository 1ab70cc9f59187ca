// A model that is there as its config.json alone: shapes, sizes and places of all weights, no byte of them.
// Room: common/plan. May touch: common/{sim,model,image,formats,roofline,device,shm,base}. Threads: any; const once made.
#pragma once

#include <cstdint>
#include <memory>

#include "common/base/status.h"
#include "common/formats/model_config.h"
#include "common/shm/weight_image.h"

namespace hearth {

struct PlannedModel {
  ModelConfig config;
  std::shared_ptr<const WeightImage> image;

  uint64_t image_bytes = 0;   // of the whole image: what DRAM must hold
  uint64_t expert_bytes = 0;  // of the routed experts in it
  uint64_t record_bytes = 0;  // of one routed expert, all shards; 0: a model without
  uint64_t layer_bytes = 0;   // of all routed experts of a layer

  // What a GPU holds that decodes: all but the routed experts.
  uint64_t dense_bytes() const { return image_bytes - expert_bytes; }
};

// Without the MTP module. Errors: those of ParseModelConfig; InvalidArgument for num_shards; ResourceExhausted for addresses.
absl::StatusOr<PlannedModel> PlanModel(const ModelTexts& texts, int num_shards);

}  // namespace hearth
