// What decoding will cost on a machine that need not be there: the step loop's own StepRunner and the model's own forward pass, run in virtual time.
// Room: common/plan. May touch: common/{sim,model,image,formats,roofline,device,shm,base}. Threads: one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/status.h"
#include "common/model/step_runner.h"
#include "common/plan/planned_kv.h"
#include "common/plan/planned_model.h"
#include "common/sim/sim_world.h"

namespace hearth {

struct DecodePoint {
  int64_t batch = 1;    // streams, one token a step each
  int64_t context = 0;  // tokens that each has behind it
  StepOrder order = StepOrder::kJoint;

  double step_ms = 0;             // also the time per output token of each stream
  std::vector<ResourceUse> busy;  // of a step
  double tokens_per_s() const { return static_cast<double>(batch) * 1e3 / step_ms; }
};

class DecodePlan {
 public:
  // On the machine's first GPU, or on its CPU where it has none. For batches and contexts up to these.
  // Errors: those of Model::Bind and StepRunner::Make; ResourceExhausted when the buffers don't fit.
  static absl::StatusOr<std::unique_ptr<DecodePlan>> Make(const PlannedModel& model, std::shared_ptr<SimWorld> world, int64_t max_batch,
                                                          int64_t max_context);

  // The mean of a few steps, whose tokens choose their experts anew. A batch of one runs joint whatever the order.
  absl::StatusOr<DecodePoint> Run(int64_t batch, int64_t context, StepOrder order);

  // Device memory of buffers, weights and KV apart; and KV of a token.
  uint64_t workspace_bytes() const { return device_.memory().peak_bytes; }
  double kv_bytes_per_token() const { return static_cast<double>(kv_.pool->geometry().page_bytes()) / kPageTokens; }
  const SimWorld& world() const { return *world_; }

 private:
  explicit DecodePlan(std::shared_ptr<SimWorld> world);

  const std::shared_ptr<SimWorld> world_;
  Device& device_;
  std::unique_ptr<Model> model_;
  PlannedKv kv_;  // of every stream: nothing is written, so they may share
  std::unique_ptr<Stream> stream_;
  std::array<std::unique_ptr<StepRunner>, kNumStepOrders> runners_;  // by order
  std::vector<float> logits_;
};

}  // namespace hearth
