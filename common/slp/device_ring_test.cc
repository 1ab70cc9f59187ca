#include "common/slp/device_ring.h"

#include <gtest/gtest.h>

#include <deque>
#include <set>

#include "common/device/host/host_device.h"

namespace hearth {
namespace {

// With memory of its own.
struct PlacedRing {
  PlacedRing(Device& device, int64_t num_slots, uint64_t slot_bytes)
      : memory(*device.Allocate(static_cast<uint64_t>(num_slots) * DeviceRing::SlotStep(slot_bytes))), ring(device, slot_bytes) {
    ring.Place(memory.as<uint8_t>(), num_slots);
  }
  Buffer memory;
  DeviceRing ring;
};

TEST(DeviceRing, SlotsLieApartAndAlignedWhereTheyWerePlacedLast) {
  auto device = HostDevice::Create({.num_threads = 1});
  ASSERT_TRUE(device.ok()) << device.status();
  auto memory = (*device)->Allocate(4096);
  ASSERT_TRUE(memory.ok());
  DeviceRing ring(**device, 300);
  EXPECT_EQ(ring.num_slots(), 0);
  const auto take_all = [&] {
    std::set<int64_t> slots;
    for (int64_t i = 0; i < ring.num_slots(); ++i) slots.insert(ring.Take());
    return slots;
  };
  ring.Place(memory->as<uint8_t>(), 3);
  EXPECT_EQ(take_all(), (std::set<int64_t>{0, 1, 2}));
  EXPECT_EQ(ring.slot(0).data, memory->as<uint8_t>());
  EXPECT_EQ(ring.slot(2).data - ring.slot(1).data, 512);
  ring.Place(memory->as<uint8_t>() + 1024, 2);
  EXPECT_EQ(take_all(), (std::set<int64_t>{0, 1})) << "all are free, though none came back";
  EXPECT_EQ(ring.slot(1).data, memory->as<uint8_t>() + 1536);
  ring.Place(memory->as<uint8_t>(), 7);
  EXPECT_EQ(take_all().size(), 7u);
}

TEST(DeviceRing, ASlotComesBackByNameInAnyOrder) {
  auto device = HostDevice::Create({.num_threads = 1});
  ASSERT_TRUE(device.ok());
  PlacedRing placed(**device, 3, 64);
  DeviceRing* const ring = &placed.ring;
  StopToken stop;
  const int64_t a = ring->Take(), b = ring->Take(), c = ring->Take();
  ring->GiveBack(b);
  ASSERT_TRUE(ring->AwaitFree(stop));
  EXPECT_EQ(ring->Take(), b);
  ring->GiveBack(c);
  ring->GiveBack(a);
  EXPECT_EQ(ring->Take(), c);
  EXPECT_EQ(ring->Take(), a);
  ring->Place(placed.memory.as<uint8_t>(), 3);
  EXPECT_EQ((std::set<int64_t>{ring->Take(), ring->Take(), ring->Take()}), (std::set<int64_t>{0, 1, 2}));
}

// A loader and an unloader with a pause in either: no slot is ever held twice, and the loader never runs ahead of the credits.
TEST(DeviceRing, LoaderAndUnloaderPassAMillionBytesOfCredits) {
  auto device = HostDevice::Create({.num_threads = 1});
  ASSERT_TRUE(device.ok());
  PlacedRing placed(**device, 2, 64);
  DeviceRing* const ring = &placed.ring;
  constexpr int kItems = 20'000;
  StopToken stop;
  std::mutex mutex;
  std::deque<int64_t> loaded;
  std::set<int64_t> held;
  auto signal = (*device)->MakeSignal();
  auto loader = (*device)->Spawn("loader", [&] {
    for (int i = 0; i < kItems; ++i) {
      ASSERT_TRUE(ring->AwaitFree(stop));
      const int64_t slot = ring->Take();
      {
        std::lock_guard lock(mutex);
        ASSERT_TRUE(held.insert(slot).second) << "slot " << slot << " is held already";
        loaded.push_back(slot);
      }
      signal->Notify();
    }
  });
  for (int i = 0; i < kItems;) {
    const uint64_t seen = signal->Current();
    std::optional<int64_t> slot;
    {
      std::lock_guard lock(mutex);
      if (!loaded.empty()) {
        slot = loaded.front();
        loaded.pop_front();
        held.erase(*slot);
      }
    }
    if (slot.has_value()) {
      ring->GiveBack(*slot);
      ++i;
    } else {
      (*device)->HostWait(*signal, seen, {});
    }
  }
}

TEST(DeviceRing, AStoppedLoaderDoesNotWait) {
  auto device = HostDevice::Create({.num_threads = 1});
  ASSERT_TRUE(device.ok());
  PlacedRing placed(**device, 2, 64);
  DeviceRing* const ring = &placed.ring;
  ring->Take();
  ring->Take();
  StopToken stop;
  bool was_free = true;
  auto loader = (*device)->Spawn("loader", [&] { was_free = ring->AwaitFree(stop); });
  stop.Stop();
  ring->Wake();
  loader.reset();
  EXPECT_FALSE(was_free);
}

}  // namespace
}  // namespace hearth
