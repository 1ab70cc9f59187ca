#include "common/slp/slp_pass.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/experts/expert_quarters.h"

namespace hearth {

SlpPass::SlpPass(const Context& context)
    : c_(context),
      config_(context.model.config()),
      weights_(context.model.weights()),
      ops_(context.device.ops()),
      board_(context.device, context.plan.num_items()),
      compute_(context.device.MakeStream("slp compute")),
      copy_(context.device.MakeStream("slp copy")),
      unload_(context.device.MakeStream("slp unload")),
      held_(context.device.MakeStream("slp held")),
      slot_shards_(static_cast<size_t>(context.memory.sizes.expert_slots)),
      last_hidden_(context.batch.sequences.size()) {
  stats_.rows = static_cast<int64_t>(context.batch.token_ids.size());
}

absl::Status SlpPass::Run(float* logits) {
  CutIntoChunks();
  ExpectExperts();
  {
    const std::unique_ptr<Actor> loader = c_.device.Spawn("slp-loader", [this] { Load(); });
    const std::unique_ptr<Actor> unloader = c_.device.Spawn("slp-unloader", [this] { Unload(); });
    if (const absl::Status status = Walk(logits); !status.ok()) Stop(status);
  }
  stats_.experts_skipped =
      std::count_if(c_.plan.items().begin(), c_.plan.items().end(), [](const PlannedItem& i) { return i.expert >= 0; }) - stats_.experts_loaded;
  // Nothing touches a slot any more: the loader has waited for its copies, and what was enqueued before an error ends here.
  const absl::Status computed = compute_->Synchronize();
  if (c_.experts != nullptr) c_.experts->Expect({}, nullptr);
  c_.memory.sub_layers->Reset();
  if (c_.memory.experts != nullptr) c_.memory.experts->Reset();
  RETURN_IF_ERROR(board_.status());
  return computed;
}

void SlpPass::CutIntoChunks() {
  const ForwardBatch& whole = c_.batch;
  const int64_t rows = static_cast<int64_t>(whole.token_ids.size());
  const int64_t chunk_rows = c_.memory.chunk->rows;
  auto logit_row = whole.logit_rows.begin();
  for (int64_t first = 0; first < rows; first += chunk_rows) {
    const int64_t end = std::min(rows, first + chunk_rows);
    Chunk& chunk = chunks_.emplace_back();
    chunk.first = first;
    chunk.batch.form = Form::kPrefill;
    chunk.batch.token_ids.assign(whole.token_ids.begin() + first, whole.token_ids.begin() + end);
    for (size_t i = 0; i < whole.sequences.size(); ++i) {
      KvSequence part = whole.sequences[i];
      const int64_t from = std::max(part.first_row, first);
      const int64_t until = std::min(part.first_row + part.num_rows, end);
      if (until <= from) continue;
      const bool goes_on = from > part.first_row;
      chunk.begins_inside |= goes_on;
      const float* prior = goes_on || i >= whole.prior_hidden.size() ? nullptr : whole.prior_hidden[i];
      part.start_position += from - part.first_row;
      part.first_row = from - first;
      part.num_rows = until - from;
      chunk.batch.sequences.push_back(part);
      chunk.batch.prior_hidden.push_back(prior);
      chunk.sequence.push_back(static_cast<int64_t>(i));
    }
    for (; logit_row != whole.logit_rows.end() && *logit_row < end; ++logit_row) {
      chunk.batch.logit_rows.push_back(*logit_row - static_cast<int32_t>(first));
    }
  }
}

DecoderPass SlpPass::At(const Chunk& chunk) {
  c_.memory.PointChunkAt(chunk.first, static_cast<int64_t>(chunk.batch.token_ids.size()));
  return DecoderPass({.config = config_,
                      .weights = weights_,
                      .rope = c_.model.rope(),
                      .num_shards = c_.model.num_shards(),
                      .ops = ops_,
                      .stream = *compute_,
                      .workspace = *c_.memory.chunk,
                      .kv = c_.kv,
                      .batch = chunk.batch,
                      .hooks = nullptr});
}

absl::Status SlpPass::Walk(float* logits) {
  for (const Chunk& chunk : chunks_) At(chunk).Embed();
  for (int64_t layer = 0; layer < config_.num_hidden_layers; ++layer) RETURN_IF_ERROR(Layer(layer));
  if (logits != nullptr) Logits(logits);
  if (c_.model.has_mtp()) RETURN_IF_ERROR(WriteMtpKv());
  return compute_->Synchronize();
}

absl::Status SlpPass::Layer(int64_t layer) {
  const int64_t attention_item = c_.plan.attention(layer);
  const int64_t feed_forward_item = c_.plan.feed_forward(layer);
  LayerWeights weights = weights_.layers[static_cast<size_t>(layer)];  // whose matrices will be the slots'
  const auto point_at = [&](int64_t item, int64_t slot) {
    return [this, item, slot](WeightView& view) { view = c_.plan.item(item).sub_layer.InSlot(view, SubLayerData(slot)); };
  };
  ASSIGN_OR_RETURN(const int64_t attention_slot, Await(attention_item));
  ForEachMatrix(weights.attention, point_at(attention_item, attention_slot));
  int64_t feed_forward_slot = -1;
  for (const Chunk& chunk : chunks_) {
    DecoderPass rows = At(chunk);
    rows.AttentionBlock(weights.attention, layer);
    if (feed_forward_slot < 0) {
      ASSIGN_OR_RETURN(feed_forward_slot, Await(feed_forward_item));
      if (weights.mlp.has_value()) ForEachMatrix(*weights.mlp, point_at(feed_forward_item, feed_forward_slot));
      if (weights.moe.has_value()) ForEachMatrix(*weights.moe, point_at(feed_forward_item, feed_forward_slot));
    }
    if (weights.mlp.has_value()) {
      rows.DenseBlock(weights.post_attention_norm, *weights.mlp);
    } else {
      rows.ChooseExperts(weights.post_attention_norm, *weights.moe);
    }
  }
  Done(attention_item, attention_slot);
  if (weights.moe.has_value()) {
    RETURN_IF_ERROR(ReadGate());
    RETURN_IF_ERROR(LayerDone(layer));
    RETURN_IF_ERROR(RoutedExperts(*weights.moe, layer));
    for (const Chunk& chunk : chunks_) At(chunk).AddExperts(*weights.moe);
  }
  Done(feed_forward_item, feed_forward_slot);
  return weights.moe.has_value() ? absl::OkStatus() : LayerDone(layer);
}

absl::Status SlpPass::LayerDone(int64_t layer) {
  RETURN_IF_ERROR(compute_->Synchronize());
  if (c_.hooks.on_layer_done && !c_.hooks.on_layer_done(layer)) return absl::CancelledError(absl::StrCat("the pass was ended after layer ", layer));
  return absl::OkStatus();
}

// Who chose what, to the host, sorted by expert, and back.
absl::Status SlpPass::ReadGate() {
  const int64_t pairs = stats_.rows * config_.num_experts_per_tok;
  const uint64_t bytes = static_cast<uint64_t>(pairs) * 4;
  ids_.resize(static_cast<size_t>(pairs));
  gate_weights_.resize(static_cast<size_t>(pairs));
  ops_.ToHost(*compute_, {.device = c_.memory.expert_ids.data(), .host = ids_.data(), .bytes = bytes});
  ops_.ToHost(*compute_, {.device = c_.memory.expert_weights.data(), .host = gate_weights_.data(), .bytes = bytes});
  RETURN_IF_ERROR(compute_->Synchronize());
  GroupByExpert(ids_.data(), stats_.rows, config_.num_experts_per_tok, config_.n_routed_experts, groups_);
  pair_weights_.resize(gate_weights_.size());
  for (size_t i = 0; i < gate_weights_.size(); ++i) pair_weights_[static_cast<size_t>(groups_.pair_of[i])] = gate_weights_[i];
  ops_.ToDevice(*compute_, {.host = groups_.rows.data(), .device = c_.memory.rows_by_expert.data(), .bytes = bytes, .stop = &board_.stop()});
  ops_.ToDevice(*compute_, {.host = pair_weights_.data(), .device = c_.memory.weights_by_expert.data(), .bytes = bytes, .stop = &board_.stop()});
  return absl::OkStatus();
}

// Experts ascending inside each quarter, then (q0 + q1) + (q2 + q3): the order of DESIGN section 7, in three sums.
absl::Status SlpPass::RoutedExperts(const MoeWeights& weights, int64_t layer) {
  const int64_t experts = config_.n_routed_experts;
  const int64_t elements = stats_.rows * config_.hidden_size;
  std::vector<int64_t> unchosen;
  for (int64_t expert = 0; expert < experts; ++expert) {
    if (groups_.count(expert) == 0) unchosen.push_back(c_.plan.expert(layer, expert));
  }
  board_.Skip(unchosen);
  const auto add = [&](int from, int to) {
    ops_.Add(*compute_,
             {.x = c_.memory.sums[static_cast<size_t>(from)].as<float>(), .y = c_.memory.sums[static_cast<size_t>(to)].as<float>(), .n = elements});
  };
  constexpr int kSumOf[kExpertQuarters] = {0, 1, 1, 2};
  for (int64_t quarter = 0; quarter < kExpertQuarters; ++quarter) {
    float* sum = c_.memory.sums[static_cast<size_t>(kSumOf[quarter])].as<float>();
    ops_.Clear(*compute_, {.x = sum, .n = elements});
    for (int64_t expert = ExpertQuarterBegin(quarter, experts); expert < ExpertQuarterBegin(quarter + 1, experts); ++expert) {
      if (groups_.count(expert) == 0) continue;
      if (c_.hooks.wanted && !c_.hooks.wanted()) return absl::CancelledError(absl::StrCat("the pass was ended in layer ", layer));
      const int64_t item = c_.plan.expert(layer, expert);
      ASSIGN_OR_RETURN(const int64_t slot, Await(item));
      const int64_t first = groups_.begin[static_cast<size_t>(expert)];
      ops_.ExpertRows(*compute_, {.form = Form::kPrefill,
                                  .shards = slot_shards_[static_cast<size_t>(slot)].data(),
                                  .num_shards = c_.model.num_shards(),
                                  .hidden = config_.hidden_size,
                                  .intermediate = config_.moe_intermediate_size,
                                  .weight_dtypes = weights.expert_dtypes,
                                  .terms = c_.memory.chunk->terms,
                                  .x = c_.memory.normed.as<bf16>(),
                                  .rows = c_.memory.rows_by_expert.as<int32_t>() + first,
                                  .weights = c_.memory.weights_by_expert.as<float>() + first,
                                  .n = groups_.count(expert),
                                  .sum = sum,
                                  .workspace = c_.memory.expert_room.data(),
                                  .workspace_bytes = c_.memory.expert_room.bytes()});
      Done(item, slot);
    }
    if (quarter == 1) add(1, 0);
  }
  add(2, 1);
  add(1, 0);
  return absl::OkStatus();
}

void SlpPass::Logits(float* logits) {
  for (const Chunk& chunk : chunks_) {
    if (chunk.batch.logit_rows.empty()) continue;
    At(chunk).Logits(weights_.final_norm, weights_.head, logits);
    logits += static_cast<int64_t>(chunk.batch.logit_rows.size()) * config_.vocab_size;
  }
}

// Chunk by chunk, each with the hidden state that the one before ended with.
absl::Status SlpPass::WriteMtpKv() {
  const int64_t item = c_.plan.mtp();
  ASSIGN_OR_RETURN(const int64_t slot, Await(item));
  MtpWeights mtp = *weights_.mtp;
  AttentionWeights attention = weights_.layers.back().attention;
  const auto point = [&](WeightView& view) { view = c_.plan.item(item).sub_layer.InSlot(view, SubLayerData(slot)); };
  point(mtp.eh_proj);
  ForEachKvMatrix(attention, point);
  const int64_t hidden = config_.hidden_size;
  const auto read = [&](int64_t row, std::vector<float>& to) {
    to.resize(static_cast<size_t>(hidden));
    ops_.ToHost(*compute_,
                {.device = c_.memory.chunk->hidden.as<float>() + row * hidden, .host = to.data(), .bytes = static_cast<uint64_t>(hidden) * 4});
  };
  for (Chunk& chunk : chunks_) {
    if (chunk.begins_inside) chunk.batch.prior_hidden[0] = carried_hidden_.data();
    DecoderPass rows = At(chunk);
    rows.KeepHidden(weights_.final_norm);
    rows.WriteMtpKv(mtp, attention);
    for (size_t i = 0; i < chunk.sequence.size(); ++i) {
      const KvSequence& part = chunk.batch.sequences[i];
      read(part.first_row + part.num_rows - 1, last_hidden_[static_cast<size_t>(chunk.sequence[i])]);
    }
    read(static_cast<int64_t>(chunk.batch.token_ids.size()) - 1, carried_hidden_);
    RETURN_IF_ERROR(compute_->Synchronize());
  }
  Done(item, slot);
  return LayerDone(config_.num_hidden_layers);
}

absl::StatusOr<int64_t> SlpPass::Await(int64_t item) {
  const int64_t begin_ns = c_.device.Now();
  const std::optional<int64_t> slot = board_.AwaitLoaded(item);
  stats_.waited_ns += c_.device.Now() - begin_ns;
  if (!slot.has_value()) return board_.status();
  RingOf(item).slot(*slot).loaded->Wait(*compute_);
  return *slot;
}

void SlpPass::Done(int64_t item, int64_t slot) {
  RingOf(item).slot(slot).consumed->Record(*compute_);
  board_.Consumed(item);
}

}  // namespace hearth
