// What computing a prompt will cost on machines that need not be there: the weights streamed past a GPU (common/slp), past several that share the prompt, or
// chunks through the plain forward pass, whose experts the CPU computes. The engines' own code, in virtual time.
// Room: common/plan. May touch: common/{sim,slp,model,image,formats,roofline,device,shm,base}. Threads: one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/base/status.h"
#include "common/plan/planned_kv.h"
#include "common/plan/planned_model.h"
#include "common/sim/sim_world.h"
#include "common/slp/slp_engine.h"

namespace hearth {

enum class PrefillPath { kChunked, kStreamed, kShared };
const char* PrefillPathName(PrefillPath path);  // "chunked", "slp", "dslp"

struct PrefillPoint {
  int64_t prompt = 0;  // tokens
  PrefillPath path = PrefillPath::kStreamed;
  double seconds = 0;         // to the KV of all of it
  int64_t passes = 1;         // over the weights: of a prompt longer than the GPUs have room for
  uint64_t bytes_loaded = 0;  // over the links
  uint64_t bytes_sent = 0;    // by ranks to each other
  int64_t expert_slots = 0;   // of a device's ring, where weights are streamed
  std::vector<ResourceUse> busy;
};

class PrefillPlan {
 public:
  struct Options {
    int64_t chunk_rows = 0;                  // rows worked on at once; 0: as the device likes
    int64_t max_prompt = 0;                  // KV of so many tokens is kept on the device
    std::optional<ExpertExchange> exchange;  // of ranks; none: the cheaper one for the longest prompt
  };
  // On the machine's last GPU: where there are two, the first one decodes. The chunked path also runs on a CPU alone; a shared one takes 2 or 4 GPUs.
  // Errors: those of Model::Bind; ResourceExhausted when a path's buffers don't fit; FailedPrecondition for a shared path with one GPU.
  static absl::StatusOr<std::unique_ptr<PrefillPlan>> Make(const PlannedModel& model, std::shared_ptr<SimWorld> world, PrefillPath path,
                                                           const Options& options);

  absl::StatusOr<PrefillPoint> Run(int64_t prompt);

  int64_t ranks() const { return static_cast<int64_t>(ranks_.size()); }
  // Tokens of a pass of a streamed path; rows that a device works on at once.
  int64_t max_rows() const { return ranks_.front().slp->max_rows(); }
  int64_t chunk_rows() const { return chunk_rows_; }
  // Of a shared path.
  ExpertExchange exchange() const { return exchange_; }
  // For prompts of the longest.
  const ExchangeShape& exchange_shape() const { return exchange_shape_; }
  uint64_t device_bytes() const { return ranks_.front().device->memory().peak_bytes; }
  const SimWorld& world() const { return *world_; }

 private:
  struct Rank {
    Device* device = nullptr;
    std::unique_ptr<Model> model;
    Buffer kv_on_device;                 // counted, never touched
    std::unique_ptr<Collectives> group;  // null: alone
    std::unique_ptr<SlpEngine> slp;      // of the streamed paths
  };

  PrefillPlan(std::shared_ptr<SimWorld> world, PrefillPath path) : world_(std::move(world)), path_(path) {}
  // Tokens [first, first + rows) of the prompt.
  absl::Status RunRows(int64_t first, int64_t rows, PrefillPoint& point);
  absl::Status RunStreamed(const ForwardBatch& batch, PrefillPoint& point);

  const std::shared_ptr<SimWorld> world_;
  const PrefillPath path_;
  PlannedKv kv_;
  std::vector<Rank> ranks_;
  std::unique_ptr<Stream> stream_;  // of the chunked path, with its workspace
  std::unique_ptr<Model::Workspace> workspace_;
  int64_t chunk_rows_ = 0;
  ExpertExchange exchange_ = ExpertExchange::kSmallEp;
  ExchangeShape exchange_shape_;
};

}  // namespace hearth
