// The forward pass, written once against Ops and used by prefill, decode, tests and the simulator.
// Room: common/model. May touch: common/{experts,device,kernels,formats,shm,base}. Not: threads, clocks, gRPC.
// Threads: a Model is const after Bind; a Workspace belongs to one step loop.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "common/base/status.h"
#include "common/device/device.h"
#include "common/device/ops.h"
#include "common/formats/model_config.h"
#include "common/shm/kv_pool.h"
#include "common/shm/weight_image.h"

namespace hearth {

struct ModelWeights;  // model_weights.h

// One batch of one form. Rows are grouped by stream, in the order of `sequences`.
struct ForwardBatch {
  Form form = Form::kDecode;
  std::vector<int32_t> token_ids;     // [M]
  std::vector<KvSequence> sequences;  // their rows cover [0, M) without gap
  std::vector<int32_t> logit_rows;    // rows whose logits are wanted; empty for prefill chunks
  // With an MTP module: a sequence's hidden state (Model::ReadHidden, [hidden] f32 on the host) at the position before its first row, from which
  // the first row's MTP slot is written. Null at position 0, and where that slot is not written because the row is only queried.
  std::vector<const float*> prior_hidden;  // [sequences]
};

// For tests and status: looks at what passes by. Called in order, on the thread of Forward, after the op has completed. Host pointers.
struct ForwardHooks {
  std::function<void(int64_t layer, const int32_t* ids, const float* weights, int64_t m, int64_t top_k)> on_gate;
  std::function<void(int64_t layer, const float* residual, int64_t m, int64_t hidden)> on_layer;  // -1: after the embedding
  // Layer's KV of every sequence is written; a prefill engine publishes progress here. Also where cancellation is looked at: false ends the pass.
  std::function<bool(int64_t layer)> on_layer_done;
  // Around a layer's routed experts, with everything before done: where micro-batches take turns (step_runner.h). May wait.
  std::function<void(int64_t layer)> before_experts;
  std::function<void(int64_t layer)> after_experts;
};

class Model {
 public:
  // Finds every tensor of `config` in the image (errors name what is missing), converts the norms to F32, makes the rotary table. The image is kept mapped.
  static absl::StatusOr<std::unique_ptr<Model>> Bind(const ModelConfig& config, std::shared_ptr<const WeightImage> image, Device& device);
  virtual ~Model() = default;

  virtual const ModelConfig& config() const = 0;
  virtual int64_t num_shards() const = 0;
  // Whether the image has the checkpoint's MTP module (DeepSeek-V3 section 2.2). Then Forward also writes the MTP layer's KV, whose slot j is made
  // from the hidden state at j - 1 and token j (so slot 0 is empty): a position is complete when all of its slots are.
  virtual bool has_mtp() const = 0;
  // A pool of this geometry (num_pages left 0) holds this model's KV.
  virtual KvGeometry kv_geometry() const = 0;
  // For who walks the layers in another order (common/slp).
  virtual const ModelWeights& weights() const = 0;
  virtual const RopeTable& rope() const = 0;

  // Buffers for batches of up to max_rows rows and max_logit_rows logit rows.
  class Workspace {
   public:
    virtual ~Workspace() = default;
    virtual int64_t max_rows() const = 0;
  };
  virtual absl::StatusOr<std::unique_ptr<Workspace>> MakeWorkspace(int64_t max_rows, int64_t max_logit_rows) const = 0;

  // logits [logit_rows, vocab] f32 in host memory (may be null when none are wanted). Returns after the stream has run.
  // Errors: InvalidArgument for a batch that contradicts itself (ids outside the vocabulary, too many rows); Cancelled when a hook ended the pass.
  virtual absl::Status Forward(Stream& stream, Workspace& workspace, const KvPool& kv, const ForwardBatch& batch, float* logits,
                               const ForwardHooks* hooks) const = 0;

  // One draft for each sequence by the MTP module: its one row is the token at start_position, prior_hidden the hidden state at the position before; the
  // logits are of the token at start_position + 1. The decode form. Writes the row's MTP slot, which is the slot's right content where prior_hidden
  // is of the main model; to go on from a draft, prior_hidden is the module's own state of the call before (ReadHidden), and what that leaves in the
  // slot must be written again before it is believed.
  virtual absl::Status Draft(Stream& stream, Workspace& workspace, const KvPool& kv, const ForwardBatch& batch, float* logits) const = 0;
  // The hidden state of a row of the workspace's last Forward or Draft, out [hidden] f32 on the host. Only with an MTP module.
  virtual absl::Status ReadHidden(Stream& stream, const Workspace& workspace, int64_t row, float* out) const = 0;
};

}  // namespace hearth
