#include "common/slp/device_ring.h"

#include <numeric>

#include "common/base/check.h"

namespace hearth {

void DeviceRing::Place(uint8_t* memory, int64_t num_slots) {
  while (static_cast<int64_t>(slots_.size()) < num_slots) slots_.push_back({.loaded = device_.MakeEvent(), .consumed = device_.MakeEvent()});
  for (int64_t i = 0; i < num_slots; ++i) slots_[static_cast<size_t>(i)].data = memory + static_cast<uint64_t>(i) * step_;
  taken_ = 0;
  credits_.resize(static_cast<size_t>(num_slots));
  std::iota(credits_.begin(), credits_.end(), int64_t{0});
  returned_.store(static_cast<uint64_t>(num_slots), std::memory_order_relaxed);
}

bool DeviceRing::AwaitFree(const StopToken& stop) {
  while (!stop.stopped()) {
    const uint64_t seen = returned_signal_->Current();
    if (HasFree()) return true;
    device_.HostWait(*returned_signal_, seen, {.stop = &stop});
  }
  return false;
}

int64_t DeviceRing::Take() {
  HEARTH_CHECK(HasFree());
  return credits_[taken_++ % credits_.size()];
}

void DeviceRing::GiveBack(int64_t slot) {
  const uint64_t returned = returned_.load(std::memory_order_relaxed);
  credits_[returned % credits_.size()] = slot;
  returned_.store(returned + 1, std::memory_order_release);
  returned_signal_->Notify();
}

}  // namespace hearth
