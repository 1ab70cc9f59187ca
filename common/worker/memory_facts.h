// What a worker finds out about its image and machine before it begins, so that nothing of it is assumed: whether software prefetch pays, what pages the
// image lies in, and on which NUMA nodes.
// Room: common/worker. May touch: proto, common/{experts,formats,device,shm,numa,base}. Threads: made by one, const then.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "common/experts/fetch_ahead_probe.h"
#include "common/formats/model_config.h"
#include "common/numa/page_survey.h"
#include "common/shm/weight_image.h"
#include "hearth/v1/worker.pb.h"

namespace hearth {

struct MemoryFacts {
  PageSurvey pages;
  std::optional<FetchAheadProbe> fetch_ahead;  // none: a prefill worker, whose kernels have no use for it

  void Tell(v1::WorkerStatus::Memory& out) const;
};

// homes: by shard, where its segment was meant to lie.
PageSurvey SurveyImage(const WeightImage& image, const Topology& topology, const std::vector<ShardHome>& homes);

// On the first layer that has routed experts, for at most a quarter of a second. Errors are the image's.
absl::StatusOr<FetchAheadProbe> ProbeImage(std::shared_ptr<const WeightImage> image, const ModelConfig& config, HostDevice& device);

}  // namespace hearth
