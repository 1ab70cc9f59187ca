#include "common/slp/slp_pass.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/trace/trace.h"

namespace hearth {

SlpPass::SlpPass(const Context& context)
    : c_(context),
      config_(context.model.config()),
      weights_(context.model.weights()),
      ops_(context.device.ops()),
      rank_(context.group == nullptr ? 0 : context.group->rank()),
      ranks_(context.group == nullptr ? 1 : context.group->size()),
      stripes_(CutIntoStripes(context.batch.sequences, ranks_)),
      own_rows_(stripes_.rank_rows[static_cast<size_t>(rank_)]),
      all_rows_(static_cast<int64_t>(context.batch.token_ids.size())),
      board_(context.device, context.plan.num_items()),
      compute_(context.device.MakeStream("slp compute")),
      copy_(context.device.MakeStream("slp copy")),
      unload_(context.device.MakeStream("slp unload")),
      held_(context.device.MakeStream("slp held")),
      stripe_ends_(stripes_.all.size()),
      last_hidden_(context.batch.sequences.size()) {
  stats_.rows = own_rows_;
  c_.memory.own_begin = 0;
  if (!alone() && !dispatches()) c_.memory.own_begin = std::accumulate(stripes_.rank_rows.begin(), stripes_.rank_rows.begin() + rank_, int64_t{0});
}

absl::Status SlpPass::Run(float* logits) {
  const TraceSpan span(compute_->trace_track(), "pass", "rows prompts", stats_.rows, static_cast<int64_t>(c_.batch.sequences.size()));
  if (alone()) return RunActors(logits);
  absl::Status status = c_.group->Begin(board_.stop(), c_.hooks.wanted);
  // At the fullest rank, so that all say the same.
  const int64_t most_rows = *std::max_element(stripes_.rank_rows.begin(), stripes_.rank_rows.end());
  if (status.ok() && !c_.memory.HasRoomFor(Shape(most_rows))) {
    status = absl::InvalidArgumentError(absl::StrCat("batch: its sequences are too many and too uneven for ", ranks_, " ranks: one would have ",
                                                     most_rows, " of ", all_rows_, " rows"));
  }
  if (status.ok()) status = RunActors(logits);
  c_.group->End(status);
  stats_.traffic = c_.group->traffic();
  return status;
}

PassShape SlpPass::Shape(int64_t own_rows) const {
  return {.own_rows = own_rows, .all_rows = all_rows_, .ranks = ranks_, .experts = c_.plan.experts_end() - c_.plan.experts_begin()};
}

absl::Status SlpPass::RunActors(float* logits) {
  c_.memory.Arrange(Shape(own_rows_));
  stats_.expert_slots = c_.memory.experts != nullptr ? c_.memory.experts->num_slots() : 0;
  slot_shards_.resize(static_cast<size_t>(stats_.expert_slots));
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
  RETURN_IF_ERROR(board_.status());
  return computed;
}

void SlpPass::CutIntoChunks() {
  const ForwardBatch& whole = c_.batch;
  int64_t own_row = 0;
  for (size_t i = 0; i < stripes_.all.size(); ++i) {
    const Stripe& stripe = stripes_.all[i];
    if (stripe.rank != rank_) continue;
    const KvSequence& sequence = whole.sequences[static_cast<size_t>(stripe.sequence)];
    for (int64_t row = stripe.first_row; row < stripe.first_row + stripe.num_rows;) {
      if (own_row % c_.memory.chunk->rows == 0) chunks_.push_back({.first = own_row, .batch = {.form = Form::kPrefill}});
      Chunk& chunk = chunks_.back();
      const int64_t chunk_row = own_row - chunk.first;
      const int64_t count = std::min(stripe.first_row + stripe.num_rows - row, c_.memory.chunk->rows - chunk_row);
      KvSequence part = sequence;
      part.start_position += row - sequence.first_row;
      part.first_row = chunk_row;
      part.num_rows = count;
      chunk.batch.sequences.push_back(part);
      chunk.stripe.push_back(i);
      chunk.batch.token_ids.insert(chunk.batch.token_ids.end(), whole.token_ids.begin() + row, whole.token_ids.begin() + row + count);
      const auto logit_rows_begin = std::lower_bound(whole.logit_rows.begin(), whole.logit_rows.end(), row);
      for (auto logit = logit_rows_begin; logit != whole.logit_rows.end() && *logit < row + count; ++logit) {
        chunk.batch.logit_rows.push_back(static_cast<int32_t>(*logit - row + chunk_row));
        chunk.logit_indices.push_back(static_cast<size_t>(logit - whole.logit_rows.begin()));
      }
      row += count;
      own_row += count;
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
  const TraceSpan span(compute_->trace_track(), "layer", "layer rows", layer, stats_.rows);
  const int64_t attention_item = c_.plan.attention(layer);
  const int64_t feed_forward_item = c_.plan.feed_forward(layer);
  LayerWeights weights = weights_.layers[static_cast<size_t>(layer)];  // whose matrices will be the slots'
  const auto point_at = [&](int64_t item, int64_t slot) {
    return [this, item, slot](WeightView& view) { view = c_.plan.item(item).sub_layer.InSlot(view, SubLayerData(slot)); };
  };
  ASSIGN_OR_RETURN(const int64_t attention_slot, Await(attention_item));
  ForEachMatrix(weights.attention, point_at(attention_item, attention_slot));
  for (const Chunk& chunk : chunks_) At(chunk).CacheInput(weights.attention, layer);
  if (!alone()) {
    const uint64_t row_bytes = c_.kv.geometry().layer_bytes() / static_cast<uint64_t>(kPageTokens);
    c_.group->Barrier(*compute_, {.name = "kv", .shared_bytes = static_cast<uint64_t>(own_rows_ * (ranks_ - 1)) * row_bytes});
  }
  int64_t feed_forward_slot = -1;
  const auto await_feed_forward = [&]() -> absl::Status {
    if (feed_forward_slot >= 0) return absl::OkStatus();
    ASSIGN_OR_RETURN(feed_forward_slot, Await(feed_forward_item));
    if (weights.mlp.has_value()) ForEachMatrix(*weights.mlp, point_at(feed_forward_item, feed_forward_slot));
    if (weights.moe.has_value()) ForEachMatrix(*weights.moe, point_at(feed_forward_item, feed_forward_slot));
    return absl::OkStatus();
  };
  for (const Chunk& chunk : chunks_) {
    RETURN_IF_ERROR(StillWanted(layer));
    DecoderPass rows = At(chunk);
    rows.AttendCached(weights.attention, layer);
    RETURN_IF_ERROR(await_feed_forward());
    if (weights.mlp.has_value()) {
      rows.DenseBlock(weights.post_attention_norm, *weights.mlp);
    } else {
      rows.ChooseExperts(weights.post_attention_norm, *weights.moe);
    }
  }
  RETURN_IF_ERROR(await_feed_forward());  // a rank of a short prompt may have no rows
  Done(attention_item, attention_slot);
  if (weights.moe.has_value()) {
    RETURN_IF_ERROR(BringRows());
    RETURN_IF_ERROR(LayerDone(layer));
    RETURN_IF_ERROR(RoutedExperts(*weights.moe, layer));
    for (const Chunk& chunk : chunks_) At(chunk).AddExperts(*weights.moe);
  }
  Done(feed_forward_item, feed_forward_slot);
  return weights.moe.has_value() ? absl::OkStatus() : LayerDone(layer);
}

absl::Status SlpPass::StillWanted(int64_t layer) {
  if (c_.hooks.wanted && !c_.hooks.wanted()) return absl::CancelledError(absl::StrCat("the pass was ended in layer ", layer));
  return alone() ? absl::OkStatus() : c_.group->Check();
}

absl::Status SlpPass::LayerDone(int64_t layer) {
  RETURN_IF_ERROR(compute_->Synchronize());
  const TraceSpan span(compute_->trace_track(), "publish", "layer", layer);
  if (c_.hooks.on_layer_done && !c_.hooks.on_layer_done(layer)) return absl::CancelledError(absl::StrCat("the pass was ended after layer ", layer));
  return absl::OkStatus();
}

void SlpPass::Logits(float* logits) {
  std::vector<float> of_chunk;
  for (const Chunk& chunk : chunks_) {
    if (chunk.batch.logit_rows.empty()) continue;
    const size_t vocab = static_cast<size_t>(config_.vocab_size);
    of_chunk.resize(chunk.batch.logit_rows.size() * vocab);
    At(chunk).Logits(weights_.final_norm, weights_.head, of_chunk.data());
    if (!compute_->Synchronize().ok()) return;
    for (size_t i = 0; i < chunk.logit_indices.size(); ++i) std::copy_n(&of_chunk[i * vocab], vocab, logits + chunk.logit_indices[i] * vocab);
  }
}

// A part's first slot is made from the hidden state where the part before it ends: a part of the same stripe, or a stripe that may be another rank's.
absl::Status SlpPass::WriteMtpKv() {
  const int64_t item = c_.plan.mtp();
  ASSIGN_OR_RETURN(const int64_t slot, Await(item));
  MtpWeights mtp = *weights_.mtp;
  AttentionWeights attention = weights_.layers.back().attention;
  const auto point = [&](WeightView& view) { view = c_.plan.item(item).sub_layer.InSlot(view, SubLayerData(slot)); };
  point(mtp.eh_proj);
  ForEachKvMatrix(attention, point);
  RETURN_IF_ERROR(ReadEnds());
  if (!alone()) RETURN_IF_ERROR(ShareEnds());
  size_t part = 0;
  for (Chunk& chunk : chunks_) {
    for (size_t i = 0; i < chunk.stripe.size(); ++i, ++part) {
      const size_t stripe = chunk.stripe[i];
      const size_t sequence = static_cast<size_t>(stripes_.all[stripe].sequence);
      const float* prior = sequence < c_.batch.prior_hidden.size() ? c_.batch.prior_hidden[sequence] : nullptr;
      if (stripe > 0 && static_cast<size_t>(stripes_.all[stripe - 1].sequence) == sequence) prior = stripe_ends_[stripe - 1].data();
      const bool goes_on = i == 0 && chunk.first > 0 && chunk.stripe[0] == (&chunk)[-1].stripe.back();
      chunk.batch.prior_hidden.push_back(goes_on ? ends_[part - 1].data() : prior);
    }
    DecoderPass rows = At(chunk);
    rows.KeepHidden(weights_.final_norm);
    rows.WriteMtpKv(mtp, attention);
    RETURN_IF_ERROR(compute_->Synchronize());
  }
  Done(item, slot);
  if (!alone()) c_.group->Barrier(*compute_, {.name = "kv"});
  return LayerDone(config_.num_hidden_layers);
}

// ends_, and of them stripe_ends_ of the rank's stripes and last_hidden_.
absl::Status SlpPass::ReadEnds() {
  const size_t hidden = static_cast<size_t>(config_.hidden_size);
  for (const Chunk& chunk : chunks_) {
    At(chunk).KeepHidden(weights_.final_norm);
    for (const KvSequence& part : chunk.batch.sequences) {
      std::vector<float>& end = ends_.emplace_back(hidden);
      const float* at = c_.memory.chunk->hidden.as<float>() + (part.first_row + part.num_rows - 1) * config_.hidden_size;
      ops_.ToHost(*compute_, {.device = at, .host = end.data(), .bytes = hidden * 4});
    }
    RETURN_IF_ERROR(compute_->Synchronize());
  }
  size_t part = 0;
  for (const Chunk& chunk : chunks_) {
    for (const size_t stripe : chunk.stripe) {
      stripe_ends_[stripe] = ends_[part];
      last_hidden_[static_cast<size_t>(stripes_.all[stripe].sequence)] = ends_[part++];
    }
  }
  return absl::OkStatus();
}

// Sequence by sequence: every rank gets what its stripes' neighbours end with, and the end of each sequence.
absl::Status SlpPass::ShareEnds() {
  const uint64_t end_bytes = static_cast<uint64_t>(config_.hidden_size) * 4;
  for (size_t begin = 0, end = 0; begin < stripes_.all.size(); begin = end) {
    const int64_t sequence = stripes_.all[begin].sequence;
    while (end < stripes_.all.size() && stripes_.all[end].sequence == sequence) ++end;
    std::vector<size_t> by_rank;
    std::vector<uint64_t> bytes(static_cast<size_t>(ranks_), 0);
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      for (size_t i = begin; i < end; ++i) {
        if (stripes_.all[i].rank != rank) continue;
        by_rank.push_back(i);
        bytes[static_cast<size_t>(rank)] += end_bytes;
      }
    }
    uint8_t* const ends = c_.memory.stripe_ends.as<uint8_t>();
    const auto place = [&](size_t i) { return ends + i * end_bytes; };
    for (size_t i = 0; i < by_rank.size(); ++i) {
      if (stripes_.all[by_rank[i]].rank != rank_) continue;
      ops_.ToDevice(*compute_, {.host = stripe_ends_[by_rank[i]].data(), .device = place(i), .bytes = end_bytes, .stop = &board_.stop()});
    }
    c_.group->AllGather(*compute_, {.name = "hidden", .data = ends, .bytes = bytes.data()});
    for (size_t i = 0; i < by_rank.size(); ++i) {
      stripe_ends_[by_rank[i]].resize(static_cast<size_t>(config_.hidden_size));
      ops_.ToHost(*compute_, {.device = place(i), .host = stripe_ends_[by_rank[i]].data(), .bytes = end_bytes});
    }
    RETURN_IF_ERROR(compute_->Synchronize());
    last_hidden_[static_cast<size_t>(sequence)] = stripe_ends_[end - 1];
  }
  return absl::OkStatus();
}

std::vector<uint64_t> SlpPass::RankBytes(int64_t row_bytes) const {
  std::vector<uint64_t> bytes;
  for (const int64_t rows : stripes_.rank_rows) bytes.push_back(static_cast<uint64_t>(rows * row_bytes));
  return bytes;
}

absl::StatusOr<int64_t> SlpPass::Await(int64_t item) {
  const int64_t begin_ns = c_.device.Now();
  const std::optional<int64_t> slot = board_.AwaitLoaded(item);
  const int64_t end_ns = c_.device.Now();
  stats_.waited_ns += end_ns - begin_ns;
  if (end_ns - begin_ns >= kWaitShownNs) {
    TraceSpanAt(compute_->trace_track(), "wait for copy", begin_ns, end_ns, "layer expert", c_.plan.item(item).layer, c_.plan.item(item).expert);
  }
  if (!slot.has_value()) return board_.status();
  RingOf(item).slot(*slot).loaded->Wait(*compute_);
  return *slot;
}

void SlpPass::Done(int64_t item, int64_t slot) {
  RingOf(item).slot(slot).consumed->Record(*compute_);
  board_.Consumed(item);
}

}  // namespace hearth
