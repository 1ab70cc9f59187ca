// The loader's and the unloader's part of a pass.
#include "common/slp/slp_pass.h"

namespace hearth {

void SlpPass::Load() {
  for (int64_t item = 0; item < c_.plan.num_items(); ++item) {
    DeviceRing& ring = RingOf(item);
    if (!ring.AwaitFree(board_.stop())) break;
    if (!board_.Begin(item)) continue;
    const int64_t slot = ring.Take();
    Copy(item, slot);
    if (!copy_->status().ok()) break;
    ring.slot(slot).loaded->Record(*copy_);
    board_.Loaded(item, slot);
  }
  if (const absl::Status status = copy_->Synchronize(); !status.ok()) Stop(Annotate(status, "loading weights"));
}

void SlpPass::Copy(int64_t item, int64_t slot) {
  const PlannedItem& planned = c_.plan.item(item);
  uint8_t* to = RingOf(item).slot(slot).data;
  const auto copy = [&](const void* from, uint64_t offset, uint64_t bytes) {
    ops_.ToDevice(*copy_, {.host = from, .device = to + offset, .bytes = bytes, .stop = &board_.stop()});
    stats_.bytes_loaded += bytes;
  };
  if (planned.expert < 0) {
    for (const SubLayer::Run& run : planned.sub_layer.runs()) copy(run.host, run.offset, run.bytes);
    return;
  }
  acquired_[static_cast<size_t>(item)] = true;
  std::vector<ExpertView>& shards = slot_shards_[static_cast<size_t>(slot)];
  shards.clear();
  uint64_t offset = 0;
  for (int64_t shard = 0; shard < c_.model.num_shards(); ++shard) {
    const ExpertView view = weights_.experts->Acquire(planned.layer, planned.expert, shard);
    if (view.record_bytes > 0) copy(view.record, offset, view.record_bytes);
    shards.push_back(view.record_bytes > 0 ? MovedTo(view, to + offset) : view);
    offset += WeightPlan::RecordRoom(view);
  }
  ++stats_.experts_loaded;
}

void SlpPass::Unload() {
  for (std::optional<ItemBoard::End> end = board_.AwaitEnd(); end.has_value(); end = board_.AwaitEnd()) {
    DeviceRing& ring = RingOf(end->item);
    DeviceRing::Slot& slot = ring.slot(end->slot);
    (end->consumed ? slot.consumed : slot.loaded)->Wait(*unload_);
    if (const absl::Status status = unload_->Synchronize(); !status.ok()) {
      Stop(Annotate(status, "waiting for the work that reads a slot"));
      return;
    }
    ReleaseExpert(end->item);
    ring.GiveBack(end->slot);
  }
}

void SlpPass::ReleaseExpert(int64_t item) {
  const PlannedItem& planned = c_.plan.item(item);
  if (planned.expert < 0 || !acquired_[static_cast<size_t>(item)] || released_[static_cast<size_t>(item)]) return;
  for (int64_t shard = 0; shard < c_.model.num_shards(); ++shard) weights_.experts->Release(planned.layer, planned.expert, shard);
  released_[static_cast<size_t>(item)] = true;
}

void SlpPass::Stop(const absl::Status& status) {
  board_.Stop(status);
  c_.memory.sub_layers->Wake();
  if (c_.memory.experts != nullptr) c_.memory.experts->Wake();
}

}  // namespace hearth
