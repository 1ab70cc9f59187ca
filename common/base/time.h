// Clocks: one monotonic clock for all processes of a node (CLOCK_MONOTONIC), in nanoseconds.
// Room: common/base. Engines ask their Device for the time instead (common/device/device.h), so that a simulator can own it.
#pragma once

#include <cstdint>
#include <string>

namespace hearth {

int64_t MonotonicNowNs();
int64_t UnixNowSeconds();
// "850 ms", "12.3 s", "4 min 05 s": for people.
std::string HumanDuration(double seconds);
// "512 B", "29.8 MB", "1.15 TB": powers of 1000, as disks and memory vendors count.
std::string HumanBytes(double bytes);

}  // namespace hearth
