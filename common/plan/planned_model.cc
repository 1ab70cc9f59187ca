#include "common/plan/planned_model.h"

#include "common/image/image_plan.h"

namespace hearth {

absl::StatusOr<PlannedModel> PlanModel(const ModelTexts& texts, int num_shards) {
  PlannedModel model;
  ASSIGN_OR_RETURN(model.config, ParseModelConfig(texts.config_json, texts.generation_config_json));
  ASSIGN_OR_RETURN(Manifest manifest, DescribeImage(texts, num_shards));
  uint32_t first_layer = 0;
  for (const ExpertRow& row : manifest.experts) {
    if (model.expert_bytes == 0) first_layer = row.layer;
    model.expert_bytes += row.bytes;
    if (row.layer == first_layer) model.layer_bytes += row.bytes;
    if (row.layer == first_layer && row.expert == 0) model.record_bytes += row.bytes;
  }
  ASSIGN_OR_RETURN(model.image, WeightImage::WithoutWeights(std::move(manifest)));
  model.image_bytes = model.image->total_bytes();
  return model;
}

}  // namespace hearth
