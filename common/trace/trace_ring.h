// A thread's last spans, in memory of its own process: fixed-size records, one writer, newest win.
// Room: common/trace. May touch: common/base. Threads: Write from the ring's one writer at a time, Read from any; neither ever waits for the other.
//
// The writer says which record it begins before it touches a word, and that it is whole after the last. A reader copies words first and looks at what
// was begun meanwhile after: each word is stored with release and loaded with acquire, so a reader that saw a word of a later record also sees that it
// was begun, and leaves out whatever that one may have overwritten. On x86 these are plain moves.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace hearth {

// What ran from begin to end (CLOCK_MONOTONIC). One cache line.
struct TraceRecord {
  int64_t begin_ns;
  int64_t end_ns;
  const char* name;  // "attention"; of static storage, as keys are: an address is all that is kept
  const char* keys;  // "layer rows": what the values are, in their order; null: there are none
  int64_t track;     // TraceTrack::index
  std::array<int64_t, 3> values;
};

class TraceRing {
 public:
  static constexpr uint64_t kCapacity = 1 << 16;  // 4 MB: more than the smallest model records between two looks at it, with all its ops

  explicit TraceRing(uint64_t capacity = kCapacity);  // a power of two

  void Write(const TraceRecord& record);

  // Records ever written.
  uint64_t written() const { return written_.load(std::memory_order_acquire); }
  // Appends the whole records from number `next` on, which moves behind the last of them. Returns how many of them were overwritten before.
  uint64_t Read(uint64_t& next, std::vector<TraceRecord>& out) const;

 private:
  static constexpr size_t kWords = sizeof(TraceRecord) / sizeof(uint64_t);
  using Slot = std::array<std::atomic<uint64_t>, kWords>;

  const uint64_t capacity_;
  const std::unique_ptr<Slot[]> slots_;
  std::atomic<uint64_t> begun_{0};    // records whose words may have been touched
  std::atomic<uint64_t> written_{0};  // records that are whole
};

}  // namespace hearth
