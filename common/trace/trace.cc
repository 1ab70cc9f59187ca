#include "common/trace/trace.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

namespace hearth {
namespace {

class Recorder {
 public:
  TraceTrack TrackNamed(std::string_view name) {
    std::lock_guard lock(mutex_);
    const auto [it, added] = index_of_.try_emplace(std::string(name), static_cast<int32_t>(tracks_.size()));
    if (added) tracks_.push_back(it->first);
    return {it->second};
  }

  TraceRing* Borrow() {
    std::lock_guard lock(mutex_);
    if (unused_.empty()) return rings_.emplace_back(std::make_unique<TraceRing>()).get();
    TraceRing* ring = unused_.back();
    unused_.pop_back();
    return ring;
  }
  void GiveBack(TraceRing* ring) {
    std::lock_guard lock(mutex_);
    unused_.push_back(ring);
  }

  // What the rings hold already is nobody's any more.
  std::vector<uint64_t> AddReader(TraceLevel level) {
    std::lock_guard lock(mutex_);
    ++readers_[static_cast<size_t>(level)];
    SetLevel();
    std::vector<uint64_t> next;
    for (const auto& ring : rings_) next.push_back(ring->written());
    return next;
  }
  void RemoveReader(TraceLevel level) {
    std::lock_guard lock(mutex_);
    --readers_[static_cast<size_t>(level)];
    SetLevel();
  }

  // Rings are only ever added, and never freed.
  std::vector<const TraceRing*> Rings() const {
    std::lock_guard lock(mutex_);
    std::vector<const TraceRing*> rings;
    for (const auto& ring : rings_) rings.push_back(ring.get());
    return rings;
  }
  std::vector<std::string> TracksFrom(size_t from) const {
    std::lock_guard lock(mutex_);
    if (from >= tracks_.size()) return {};
    return {tracks_.begin() + static_cast<int64_t>(from), tracks_.end()};
  }

 private:
  void SetLevel() {
    const TraceLevel level = readers_[2] > 0 ? TraceLevel::kOps : readers_[1] > 0 ? TraceLevel::kPhases : TraceLevel::kOff;
    trace_internal::level.store(static_cast<int>(level), std::memory_order_relaxed);
  }

  mutable std::mutex mutex_;  // guards all below
  std::map<std::string, int32_t> index_of_;
  std::deque<std::string> tracks_;
  std::deque<std::unique_ptr<TraceRing>> rings_;
  std::vector<TraceRing*> unused_;  // whose threads have ended
  int readers_[3] = {};             // by level
};

// Never destroyed: threads may end after main's statics.
Recorder& TheRecorder() {
  static Recorder& recorder = *new Recorder;
  return recorder;
}

struct ThreadsRing {
  TraceRing* ring = TheRecorder().Borrow();
  ~ThreadsRing() { TheRecorder().GiveBack(ring); }
};

}  // namespace

namespace trace_internal {

void Write(const TraceRecord& record) {
  static thread_local const ThreadsRing own;
  own.ring->Write(record);
}

}  // namespace trace_internal

TraceTrack TraceTrackNamed(std::string_view name) { return TheRecorder().TrackNamed(name); }

TraceReader::TraceReader(TraceLevel level) : level_(level), next_(TheRecorder().AddReader(level)) {}

TraceReader::~TraceReader() { TheRecorder().RemoveReader(level_); }

uint64_t TraceReader::Take(std::vector<TraceRecord>& out) {
  const std::vector<const TraceRing*> rings = TheRecorder().Rings();
  next_.resize(rings.size(), 0);
  uint64_t lost = 0;
  for (size_t i = 0; i < rings.size(); ++i) lost += rings[i]->Read(next_[i], out);
  return lost;
}

std::vector<std::string> TraceReader::TracksFrom(size_t from) { return TheRecorder().TracksFrom(from); }

}  // namespace hearth
