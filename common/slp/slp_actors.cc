// The loader's and the unloader's part of a pass.
#include "common/slp/slp_pass.h"
#include "common/trace/trace.h"

namespace hearth {

void SlpPass::ExpectExperts() {
  if (c_.experts == nullptr) return;
  std::vector<ExpertId> order;
  for (const PlannedItem& item : c_.plan.items()) {
    if (item.expert >= 0) order.push_back({item.layer, item.expert});
  }
  c_.experts->Expect(order, &board_.stop());
}

void SlpPass::Load() {
  for (int64_t item = 0; item < c_.plan.num_items(); ++item) {
    DeviceRing& ring = RingOf(item);
    const int64_t begin_ns = c_.device.Now();
    const bool is_free = ring.AwaitFree(board_.stop());
    const int64_t end_ns = c_.device.Now();
    stats_.loader_waited_ns += end_ns - begin_ns;
    if (end_ns - begin_ns >= kWaitShownNs) TraceSpanAt(copy_->trace_track(), "wait for slot", begin_ns, end_ns);
    if (!is_free) break;
    if (!board_.Begin(item)) continue;
    const int64_t slot = ring.Take();
    Copy(item, slot);
    if (!copy_->status().ok()) break;
    if (c_.experts != nullptr && !c_.experts->status().ok()) {
      Stop(Annotate(c_.experts->status(), "loading experts"));
      break;
    }
    ring.slot(slot).loaded->Record(*copy_);
    board_.Loaded(item, slot);
  }
  if (const absl::Status status = copy_->Synchronize(); !status.ok()) Stop(Annotate(status, "loading weights"));
  while (!being_copied_.empty()) ReleaseOldest();
}

void SlpPass::Copy(int64_t item, int64_t slot) {
  const PlannedItem& planned = c_.plan.item(item);
  const TraceSpan span(copy_->trace_track(), "load", "layer expert", planned.layer, planned.expert);
  uint8_t* to = RingOf(item).slot(slot).data;
  const auto copy = [&](const void* from, uint64_t offset, uint64_t bytes) {
    ops_.ToDevice(*copy_, {.host = from, .device = to + offset, .bytes = bytes, .stop = &board_.stop()});
    stats_.bytes_loaded += bytes;
  };
  if (planned.expert < 0) {
    for (const SubLayer::Run& run : planned.sub_layer.runs()) copy(run.host, run.offset, run.bytes);
    return;
  }
  ReleaseCopied(c_.experts->max_held() - 1);
  being_copied_.push_back({item, slot});
  std::vector<ExpertView>& shards = slot_shards_[static_cast<size_t>(slot)];
  shards.clear();
  uint64_t offset = 0;
  for (int64_t shard = 0; shard < c_.model.num_shards(); ++shard) {
    const ExpertView view = c_.experts->Acquire(planned.layer, planned.expert, shard);
    if (view.record_bytes > 0) copy(view.record, offset, view.record_bytes);
    shards.push_back(view.record_bytes > 0 ? MovedTo(view, to + offset) : view);
    offset += WeightPlan::RecordRoom(view);
  }
  ++stats_.experts_loaded;
}

// A slot's `loaded` is recorded anew only by a later copy, before which whatever has been copied is given back: so here it still speaks of the expert.
void SlpPass::ReleaseCopied(int64_t held_max) {
  while (!being_copied_.empty()) {
    Event& loaded = *c_.memory.experts->slot(being_copied_.front().slot).loaded;
    if (!loaded.Query()) {
      if (static_cast<int64_t>(being_copied_.size()) <= held_max) return;
      loaded.Wait(*held_);
      if (!held_->Synchronize().ok()) return;  // the device is broken, as the next copy will say
    }
    ReleaseOldest();
  }
}

void SlpPass::ReleaseOldest() {
  const PlannedItem& planned = c_.plan.item(being_copied_.front().item);
  for (int64_t shard = 0; shard < c_.model.num_shards(); ++shard) c_.experts->Release(planned.layer, planned.expert, shard);
  being_copied_.pop_front();
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
    ring.GiveBack(end->slot);
  }
}

void SlpPass::Stop(const absl::Status& status) {
  board_.Stop(status);
  c_.memory.sub_layers->Wake();
  if (c_.memory.experts != nullptr) c_.memory.experts->Wake();
}

}  // namespace hearth
