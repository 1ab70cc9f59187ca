#include "common/model/forward.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/model/batch_check.h"
#include "common/model/decoder_pass.h"
#include "common/model/model_weights.h"
#include "common/model/workspace.h"

namespace hearth {
namespace {

// cos and sin for every position the model has: [max_positions, rope/2], computed in double.
struct RotaryTable {
  Buffer cos;
  Buffer sin;
  RopeTable view;
};

absl::StatusOr<RotaryTable> MakeRotaryTable(const ModelConfig& config, Device& device) {
  const std::vector<double> frequencies = config.RopeInverseFrequencies();
  const double factor = config.RopeAttentionFactor();
  const int64_t half = static_cast<int64_t>(frequencies.size());
  const size_t bytes = static_cast<size_t>(config.max_position_embeddings * half) * sizeof(float);
  RotaryTable table;
  ASSIGN_OR_RETURN(table.cos, device.Allocate(bytes));
  ASSIGN_OR_RETURN(table.sin, device.Allocate(bytes));
  float* cos = table.cos.as<float>();
  float* sin = table.sin.as<float>();
  for (int64_t position = 0; position < config.max_position_embeddings; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * frequencies[static_cast<size_t>(i)];
      *cos++ = static_cast<float>(std::cos(angle) * factor);
      *sin++ = static_cast<float>(std::sin(angle) * factor);
    }
  }
  table.view = {.cos = table.cos.as<float>(), .sin = table.sin.as<float>(), .half = half, .max_positions = config.max_position_embeddings};
  return table;
}

class BoundModel : public Model {
 public:
  BoundModel(const ModelConfig& config, std::shared_ptr<const WeightImage> image, Device& device, ModelWeights weights, RotaryTable rope)
      : config_(config), image_(std::move(image)), device_(device), weights_(std::move(weights)), rope_(std::move(rope)) {}

  const ModelConfig& config() const override { return config_; }
  int64_t num_shards() const override { return image_->num_shards(); }
  bool has_mtp() const override { return weights_.mtp.has_value(); }
  KvGeometry kv_geometry() const override {
    return {.layers = static_cast<uint32_t>(weights_.layers.size()),
            .row_elements = static_cast<uint32_t>(config_.KvRow(device_.caps().kv_dtype, device_.caps().activation_terms)),
            .dtype = device_.caps().kv_dtype};
  }

  const ModelWeights& weights() const override { return weights_; }
  const RopeTable& rope() const override { return rope_.view; }

  absl::StatusOr<std::unique_ptr<Workspace>> MakeWorkspace(int64_t max_rows, int64_t max_logit_rows) const override {
    ASSIGN_OR_RETURN(std::unique_ptr<Workspace> workspace, ForwardWorkspace::Make(config_, has_mtp(), device_, max_rows, max_logit_rows));
    return workspace;
  }

  absl::Status Forward(Stream& stream, Workspace& workspace, const KvPool& kv, const ForwardBatch& batch, float* logits,
                       const ForwardHooks* hooks) const override {
    ForwardWorkspace& buffers = static_cast<ForwardWorkspace&>(workspace);
    RETURN_IF_ERROR(CheckBatch(config_, kv_geometry(), kv.geometry(), buffers.rows, buffers.logit_rows, batch));
    if (has_mtp()) RETURN_IF_ERROR(CheckPriorHidden(batch));
    const WeightImage::Mark mark = image_->BeginReads();
    RETURN_IF_ERROR(Pass(stream, buffers, kv, batch, hooks).Run(logits));
    return image_->LostSince(mark);
  }

  absl::Status Draft(Stream& stream, Workspace& workspace, const KvPool& kv, const ForwardBatch& batch, float* logits) const override {
    ForwardWorkspace& buffers = static_cast<ForwardWorkspace&>(workspace);
    if (!has_mtp()) return absl::FailedPreconditionError("this checkpoint has no MTP module to draft with");
    RETURN_IF_ERROR(CheckBatch(config_, kv_geometry(), kv.geometry(), buffers.rows, buffers.logit_rows, batch));
    RETURN_IF_ERROR(CheckDraft(batch));
    const WeightImage::Mark mark = image_->BeginReads();
    RETURN_IF_ERROR(Pass(stream, buffers, kv, batch, nullptr).Draft(logits));
    return image_->LostSince(mark);
  }

  absl::Status ReadHidden(Stream& stream, const Workspace& workspace, int64_t row, float* out) const override {
    const ForwardWorkspace& buffers = static_cast<const ForwardWorkspace&>(workspace);
    if (!has_mtp() || row < 0 || row >= buffers.rows) return absl::InvalidArgumentError(absl::StrCat("no hidden state is kept of row ", row));
    device_.ops().ToHost(stream, {.device = buffers.hidden.as<float>() + row * config_.hidden_size,
                                  .host = out,
                                  .bytes = static_cast<uint64_t>(config_.hidden_size) * sizeof(float)});
    return stream.Synchronize();
  }

 private:
  DecoderPass Pass(Stream& stream, ForwardWorkspace& buffers, const KvPool& kv, const ForwardBatch& batch, const ForwardHooks* hooks) const {
    return DecoderPass({.config = config_,
                        .weights = weights_,
                        .rope = rope_.view,
                        .num_shards = num_shards(),
                        .ops = device_.ops(),
                        .stream = stream,
                        .workspace = buffers,
                        .kv = kv,
                        .batch = batch,
                        .hooks = hooks});
  }

  const ModelConfig config_;
  const std::shared_ptr<const WeightImage> image_;
  Device& device_;
  const ModelWeights weights_;
  const RotaryTable rope_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> Model::Bind(const ModelConfig& config, std::shared_ptr<const WeightImage> image, Device& device) {
  if (config.attention == AttentionKind::kMla && !config.rope_interleave) {
    return absl::UnimplementedError(
        "rope_interleave = false in config.json: only interleaved rotary pairs are supported, as DeepSeek's own checkpoints have them");
  }
  auto weights = BindWeights(config, image, device);
  if (!weights.ok()) return Annotate(weights.status(), absl::StrCat("binding ", config.architecture));
  ASSIGN_OR_RETURN(RotaryTable rope, MakeRotaryTable(config, device));
  return std::make_unique<BoundModel>(config, std::move(image), device, *std::move(weights), std::move(rope));
}

}  // namespace hearth
