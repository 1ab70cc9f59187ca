// What this machine can do, whatever our kernels make of it: plain reads of memory, arithmetic on registers. Shared machines swing by a factor of two
// within minutes, so a figure counts beside others of the same minute.
// Room: common/device/host. May touch: common/{kernels,base}. Threads: the given pool's.
#pragma once

#include <cstdint>
#include <span>

#include "common/device/host/thread_pool.h"

namespace hearth {

struct MemoryRun {
  const uint8_t* data;
  int64_t bytes;
};

// Seconds that reading all of it takes with all threads of the pool, each run cut into pieces of 256 KiB.
double SecondsToRead(ThreadPool& pool, std::span<const MemoryRun> runs);

// GFLOP/s of VDPBF16PS on registers alone, all threads of the pool; 0 where the CPU lacks it.
double DotPeak(ThreadPool& pool);

}  // namespace hearth
