#include "common/trace/trace_ring.h"

#include <algorithm>
#include <bit>

#include "common/base/check.h"

namespace hearth {

TraceRing::TraceRing(uint64_t capacity) : capacity_(capacity), slots_(new Slot[capacity]) { HEARTH_CHECK(std::has_single_bit(capacity)); }

void TraceRing::Write(const TraceRecord& record) {
  const uint64_t number = written_.load(std::memory_order_relaxed);
  const auto words = std::bit_cast<std::array<uint64_t, kWords>>(record);
  Slot& slot = slots_[number & (capacity_ - 1)];
  begun_.store(number + 1, std::memory_order_relaxed);
  for (size_t i = 0; i < kWords; ++i) slot[i].store(words[i], std::memory_order_release);
  written_.store(number + 1, std::memory_order_release);
}

uint64_t TraceRing::Read(uint64_t& next, std::vector<TraceRecord>& out) const {
  const uint64_t end = written();
  const uint64_t from = std::max(next, end > capacity_ ? end - capacity_ : 0);
  const size_t before = out.size();
  for (uint64_t number = from; number < end; ++number) {
    std::array<uint64_t, kWords> words;
    const Slot& slot = slots_[number & (capacity_ - 1)];
    for (size_t i = 0; i < kWords; ++i) words[i] = slot[i].load(std::memory_order_acquire);
    out.push_back(std::bit_cast<TraceRecord>(words));
  }
  // What was begun while we copied has taken the place of the oldest.
  const uint64_t begun = begun_.load(std::memory_order_relaxed);
  const uint64_t whole_from = std::clamp(begun > capacity_ ? begun - capacity_ : 0, from, end);
  out.erase(out.begin() + static_cast<int64_t>(before), out.begin() + static_cast<int64_t>(before + (whole_from - from)));
  const uint64_t lost = whole_from - next;
  next = end;
  return lost;
}

}  // namespace hearth
