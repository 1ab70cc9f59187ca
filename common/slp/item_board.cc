#include "common/slp/item_board.h"

namespace hearth {

ItemBoard::ItemBoard(Device& device, int64_t num_items)
    : device_(device),
      loaded_signal_(device.MakeSignal()),
      ended_signal_(device.MakeSignal()),
      items_(static_cast<size_t>(num_items)),
      items_left_(num_items) {}

bool ItemBoard::Begin(int64_t item) {
  std::lock_guard lock(mutex_);
  if (At(item).skipped) return false;
  At(item).begun = true;
  return true;
}

void ItemBoard::Loaded(int64_t item, int64_t slot) {
  {
    std::lock_guard lock(mutex_);
    At(item).loaded = true;
    At(item).slot = slot;
    if (At(item).skipped) Ended(item);
  }
  loaded_signal_->Notify();
}

std::optional<int64_t> ItemBoard::AwaitLoaded(int64_t item) {
  while (!stop_.stopped()) {
    const uint64_t seen = loaded_signal_->Current();
    {
      std::lock_guard lock(mutex_);
      if (At(item).loaded) return At(item).slot;
    }
    device_.HostWait(*loaded_signal_, seen, {.stop = &stop_});
  }
  return std::nullopt;
}

void ItemBoard::Consumed(int64_t item) {
  std::lock_guard lock(mutex_);
  At(item).consumed = true;
  Ended(item);
}

void ItemBoard::Skip(const std::vector<int64_t>& items) {
  std::lock_guard lock(mutex_);
  for (const int64_t item : items) {
    At(item).skipped = true;
    if (!At(item).begun || At(item).loaded) Ended(item);
  }
}

void ItemBoard::Ended(int64_t item) {
  --items_left_;
  if (At(item).loaded) ends_.push_back({.item = item, .slot = At(item).slot, .consumed = At(item).consumed});
  ended_signal_->Notify();
}

std::optional<ItemBoard::End> ItemBoard::AwaitEnd() {
  while (!stop_.stopped()) {
    const uint64_t seen = ended_signal_->Current();
    {
      std::lock_guard lock(mutex_);
      if (!ends_.empty()) {
        const End end = ends_.front();
        ends_.pop_front();
        return end;
      }
      if (items_left_ == 0) return std::nullopt;
    }
    device_.HostWait(*ended_signal_, seen, {.stop = &stop_});
  }
  return std::nullopt;
}

void ItemBoard::Stop(const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (status_.ok()) status_ = status;
  }
  stop_.Stop();
  loaded_signal_->Notify();
  ended_signal_->Notify();
}

absl::Status ItemBoard::status() const {
  std::lock_guard lock(mutex_);
  return status_;
}

}  // namespace hearth
