#include "common/slp/device_ring.h"

#include <numeric>

#include "common/base/check.h"

namespace hearth {

absl::StatusOr<std::unique_ptr<DeviceRing>> DeviceRing::Make(Device& device, int64_t num_slots, uint64_t slot_bytes) {
  auto ring = std::unique_ptr<DeviceRing>(new DeviceRing(device));
  const uint64_t step = (slot_bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
  ASSIGN_OR_RETURN(ring->memory_, device.Allocate(static_cast<uint64_t>(num_slots) * step));
  for (int64_t i = 0; i < num_slots; ++i) {
    ring->slots_.push_back(
        {.data = ring->memory_.as<uint8_t>() + static_cast<uint64_t>(i) * step, .loaded = device.MakeEvent(), .consumed = device.MakeEvent()});
  }
  ring->Reset();
  return ring;
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
  return credits_[taken_++ % slots_.size()];
}

void DeviceRing::GiveBack(int64_t slot) {
  const uint64_t returned = returned_.load(std::memory_order_relaxed);
  credits_[returned % slots_.size()] = slot;
  returned_.store(returned + 1, std::memory_order_release);
  returned_signal_->Notify();
}

void DeviceRing::Reset() {
  taken_ = 0;
  credits_.resize(slots_.size());
  std::iota(credits_.begin(), credits_.end(), int64_t{0});
  returned_.store(slots_.size(), std::memory_order_relaxed);
}

}  // namespace hearth
