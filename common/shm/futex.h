// Waiting for another process to change a word of shared memory, without a lock: the waiter says what it has seen, so that no change is missed.
// Room: common/shm. May touch: nothing. Threads and processes: any.
#pragma once

#include <atomic>
#include <cstdint>

namespace hearth {

// Returns when `word` is not `seen`, when somebody wakes it, when `timeout_ns` has passed, or for no reason: look again.
void FutexWait(const std::atomic<uint32_t>& word, uint32_t seen, int64_t timeout_ns);
// All who wait for it. No effect on memory.
void FutexWake(std::atomic<uint32_t>& word);

}  // namespace hearth
