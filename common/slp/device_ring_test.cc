#include "common/slp/device_ring.h"

#include <gtest/gtest.h>

#include <deque>
#include <set>

#include "common/device/host/host_device.h"

namespace hearth {
namespace {

TEST(DeviceRing, SlotsAreAllocatedOnceApartAndAligned) {
  auto device = HostDevice::Create({.num_threads = 1, .memory_budget_bytes = 4096});
  ASSERT_TRUE(device.ok()) << device.status();
  auto ring = DeviceRing::Make(**device, 3, 300);
  ASSERT_TRUE(ring.ok()) << ring.status();
  EXPECT_EQ((*device)->memory().used_bytes, 3u * 512);
  std::set<int64_t> slots;
  for (int i = 0; i < 3; ++i) slots.insert((*ring)->Take());
  EXPECT_EQ(slots, (std::set<int64_t>{0, 1, 2}));
  EXPECT_EQ((*ring)->slot(1).data - (*ring)->slot(0).data, 512);
  EXPECT_EQ((*device)->memory().peak_bytes, 3u * 512);
  EXPECT_EQ(DeviceRing::Make(**device, 9, 512).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(DeviceRing, ASlotComesBackByNameInAnyOrder) {
  auto device = HostDevice::Create({.num_threads = 1});
  ASSERT_TRUE(device.ok());
  auto ring = *DeviceRing::Make(**device, 3, 64);
  StopToken stop;
  const int64_t a = ring->Take(), b = ring->Take(), c = ring->Take();
  ring->GiveBack(b);
  ASSERT_TRUE(ring->AwaitFree(stop));
  EXPECT_EQ(ring->Take(), b);
  ring->GiveBack(c);
  ring->GiveBack(a);
  EXPECT_EQ(ring->Take(), c);
  EXPECT_EQ(ring->Take(), a);
  ring->Reset();
  EXPECT_EQ((std::set<int64_t>{ring->Take(), ring->Take(), ring->Take()}), (std::set<int64_t>{0, 1, 2}));
}

// A loader and an unloader with a pause in either: no slot is ever held twice, and the loader never runs ahead of the credits.
TEST(DeviceRing, LoaderAndUnloaderPassAMillionBytesOfCredits) {
  auto device = HostDevice::Create({.num_threads = 1});
  ASSERT_TRUE(device.ok());
  auto ring = *DeviceRing::Make(**device, 2, 64);
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
  auto ring = *DeviceRing::Make(**device, 2, 64);
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
