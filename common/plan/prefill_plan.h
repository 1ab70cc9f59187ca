// What computing a prompt will cost on a machine that need not be there, by either path: the weights streamed past a GPU (common/slp), or chunks through
// the plain forward pass, whose experts the CPU computes. The engines' own code, in virtual time.
// Room: common/plan. May touch: common/{sim,slp,model,image,formats,roofline,device,shm,base}. Threads: one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/status.h"
#include "common/model/forward.h"
#include "common/plan/planned_model.h"
#include "common/sim/sim_world.h"
#include "common/slp/slp_engine.h"

namespace hearth {

enum class PrefillPath { kChunked, kStreamed };
const char* PrefillPathName(PrefillPath path);  // "chunked", "slp"

struct PrefillPoint {
  int64_t prompt = 0;  // tokens
  PrefillPath path = PrefillPath::kStreamed;
  double seconds = 0;         // to the KV of all of it
  int64_t passes = 1;         // over the weights: of a prompt longer than the GPU has room for
  uint64_t bytes_loaded = 0;  // over the link
  int64_t expert_slots = 0;   // of the device's ring, where weights are streamed
  std::vector<ResourceUse> busy;
};

class PrefillPlan {
 public:
  struct Options {
    int64_t chunk_rows = 0;  // rows worked on at once; 0: as the device likes
    int64_t max_prompt = 0;  // KV of so many tokens is kept on the device
  };
  // On the machine's last GPU: where there are two, the first one decodes. The chunked path also runs on a CPU alone.
  // Errors: those of Model::Bind; ResourceExhausted when a path's buffers don't fit.
  static absl::StatusOr<std::unique_ptr<PrefillPlan>> Make(const PlannedModel& model, std::shared_ptr<SimWorld> world, PrefillPath path,
                                                           const Options& options);

  absl::StatusOr<PrefillPoint> Run(int64_t prompt);

  // Tokens of a pass of the streamed path; rows that either works on at once.
  int64_t max_rows() const { return slp_->max_rows(); }
  int64_t chunk_rows() const { return chunk_rows_; }
  uint64_t device_bytes() const { return device_.memory().peak_bytes; }
  const SimWorld& world() const { return *world_; }

 private:
  PrefillPlan(std::shared_ptr<SimWorld> world, PrefillPath path);
  // Tokens [first, first + rows) of the prompt.
  absl::Status RunRows(int64_t first, int64_t rows, PrefillPoint& point);

  const std::shared_ptr<SimWorld> world_;
  const PrefillPath path_;
  Device& device_;
  std::unique_ptr<Model> model_;
  std::shared_ptr<KvPool> kv_;
  std::vector<int32_t> pages_;
  Buffer kv_on_device_;  // counted, never touched
  std::unique_ptr<SlpEngine> slp_;
  std::unique_ptr<Stream> stream_;  // of the chunked path, with its workspace
  std::unique_ptr<Model::Workspace> workspace_;
  int64_t chunk_rows_ = 0;
};

}  // namespace hearth
