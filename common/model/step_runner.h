// A decode step from batch to logits: in one batch, or in two micro-batches that run one behind the other or alternate between attention and experts
// ([SLO] 3.4, dual-batch overlap; DESIGN section 6). Every order gives the same bits, so the faster one is taken, by measurement (step_order.h).
// Room: common/model. May touch: common/{device,shm,base}. Threads: Run from one step loop; the other micro-batch has an actor and a stream of its own.
//
// Alternating: there are two places, the attention stream and the expert engine, and each lets the micro-batches in by turns. A micro-batch holds one of
// them, or waits for one and holds none, and its turns pass when its pass ends, however it ends: nobody waits for good. Hooks are called by whoever holds
// the attention stream, so they never run at the same time, though on either thread. Where attention has a device of its own the two really overlap;
// on the host device both use the same cores, and only what is not parallel is hidden.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/base/status.h"
#include "common/device/device.h"
#include "common/model/forward.h"
#include "common/model/step_order.h"

namespace hearth {

class StepRunner {
 public:
  struct Options {
    int64_t max_rows = 0;
    int64_t max_logit_rows = 0;
    std::optional<StepOrder> order;  // none: measured
  };
  // Takes the workspaces of both micro-batches from the device's budget, unless it is pinned to one batch. ResourceExhausted past it.
  static absl::StatusOr<std::unique_ptr<StepRunner>> Make(Device& device, const Model& model, const Options& options);
  ~StepRunner();

  // Model::Forward in the order that is best for this batch. One status for each sequence: an error of one micro-batch leaves the other's results
  // standing. logits [logit_rows, vocab] f32 on the host; rows whose sequence failed hold nothing. batch.logit_rows must ascend.
  std::vector<absl::Status> Run(Stream& stream, const KvPool& kv, const ForwardBatch& batch, float* logits, const ForwardHooks* hooks);

  // Model::Draft, one batch whatever the order of steps: it is a single layer.
  absl::Status Draft(Stream& stream, const KvPool& kv, const ForwardBatch& batch, float* logits);
  // Model::ReadHidden of a row of the last Run's or Draft's batch.
  absl::Status ReadHidden(Stream& stream, int64_t row, float* out) const;

  std::vector<StepOrderTimes> Look() const { return chooser_.Look(); }

 private:
  class Places;
  // One micro-batch, or the whole batch.
  struct Part {
    std::unique_ptr<Model::Workspace> workspace;
    ForwardBatch batch;
    float* logits = nullptr;
    absl::Status status;
  };

  StepRunner(Device& device, const Model& model, const Options& options);
  // The first half of `batch` by rows and the second, into parts_.
  void Cut(const ForwardBatch& batch, float* logits);
  void RunPart(Part& part, Stream& stream, const KvPool& kv, const ForwardHooks* hooks);
  void RunAlternating(Stream& stream, const KvPool& kv, const ForwardHooks* hooks);
  // Micro-batch `who`, in turns with the other.
  void RunInTurns(int who, Stream& stream, const KvPool& kv, const ForwardHooks* hooks);
  void SecondActor();

  Device& device_;
  const Model& model_;
  StepOrderChooser chooser_;
  std::array<Part, 2> parts_;
  int64_t cut_row_ = 0;  // the second part's first row in the last batch; 0: there was one part
  std::unique_ptr<Places> places_;

  // The second micro-batch's job, handed over by `asked_` and back by `done_`.
  struct Job {
    const KvPool* kv = nullptr;
    const ForwardHooks* hooks = nullptr;
  };
  std::unique_ptr<Stream> second_stream_;
  std::unique_ptr<HostSignal> asked_, done_;
  std::mutex mutex_;  // guards job_
  std::optional<Job> job_;
  StopToken stop_;
  std::unique_ptr<Actor> second_;  // made at the first alternating step
};

}  // namespace hearth
