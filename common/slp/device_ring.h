// The device ring (DESIGN 3.3): slots of one size that weights pass through, in device memory that the owner allocated once.
// Room: common/slp. May touch: common/{device,base}. Single producer, single consumer: AwaitFree and Take belong to the loader, GiveBack to the unloader,
// Wake to anybody, the rest to whoever runs while neither is in. A credit names its slot, so that slots come back in any order: one that nobody reads
// need not wait for one that is read for long.
// Between passes, when nobody is in, Place says where the slots are and how many; it makes every slot free, whatever an actor that died left.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/align.h"
#include "common/base/status.h"
#include "common/device/device.h"

namespace hearth {

class DeviceRing {
 public:
  struct Slot {
    uint8_t* data = nullptr;
    std::unique_ptr<Event> loaded;    // on the copy stream: the bytes are there
    std::unique_ptr<Event> consumed;  // on the compute stream: the last work that reads them is done
  };

  static constexpr uint64_t kSlotAlign = 256;
  // What a slot takes of memory.
  static constexpr uint64_t SlotStep(uint64_t slot_bytes) { return AlignUp(slot_bytes, kSlotAlign); }

  // Without slots before Place.
  DeviceRing(Device& device, uint64_t slot_bytes) : device_(device), step_(SlotStep(slot_bytes)), returned_signal_(device.MakeSignal()) {}

  // num_slots * SlotStep(slot_bytes) of device memory, which stay the caller's. All slots are free.
  void Place(uint8_t* memory, int64_t num_slots);
  int64_t num_slots() const { return static_cast<int64_t>(credits_.size()); }
  Slot& slot(int64_t index) { return slots_[static_cast<size_t>(index)]; }

  // Waits until the next slot is free; false: stopped.
  bool AwaitFree(const StopToken& stop);
  // A slot; there is a free one.
  int64_t Take();
  void GiveBack(int64_t slot);
  // AwaitFree looks at its stop token now.
  void Wake() { returned_signal_->Notify(); }

 private:
  bool HasFree() const { return taken_ < returned_.load(std::memory_order_acquire); }

  Device& device_;
  const uint64_t step_;
  std::vector<Slot> slots_;       // as many as there ever were
  std::vector<int64_t> credits_;  // [slots]: the i-th credit, i modulo slots, names a free slot; written before returned_ says so, read after
  std::unique_ptr<HostSignal> returned_signal_;
  uint64_t taken_ = 0;                 // the loader's
  std::atomic<uint64_t> returned_{0};  // credits given, the first of them at the start
};

}  // namespace hearth
