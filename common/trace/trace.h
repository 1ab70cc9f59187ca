// Spans of a running process: what ran when, on which track, for `hearth trace`. Off, a span is one relaxed load.
// Room: common/trace. May touch: common/base. Threads: all of it from any thread.
//
// Recording is on while somebody reads (TraceReader). Each thread writes to a ring of its own (trace_ring.h), made at its first span and given on to a
// later thread when it ends. Like the log, the recorder is one a process: whoever has something to say needs no way to it.
// Times are CLOCK_MONOTONIC, the same for all processes of a machine. Tracks are named as the simulator names them: after streams and actors.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/hash.h"
#include "common/base/time.h"
#include "common/trace/trace_ring.h"

namespace hearth {

enum class TraceLevel : int {
  kOff = 0,
  kPhases = 1,  // what a step or pass is made of: some spans a layer
  kOps = 2,     // each op of a stream as well, as the simulator shows them
};

// A row of the picture: a stream, an actor. The same name gives the same track.
struct TraceTrack {
  int32_t index = -1;  // -1: none, nothing is recorded
};
TraceTrack TraceTrackNamed(std::string_view name);

// A stream or request as the value of a "stream" key: the first eight digits of its id.
inline int64_t TraceId(const Hash128& id) { return static_cast<int64_t>(id.high >> 32); }

namespace trace_internal {
inline std::atomic<int> level{0};
void Write(const TraceRecord& record);
}  // namespace trace_internal

inline bool TraceIsOn(TraceLevel level) { return trace_internal::level.load(std::memory_order_relaxed) >= static_cast<int>(level); }

// A span that is over, for who has taken the times anyhow. `name` and `keys`: of static storage (trace_ring.h).
inline void TraceSpanAt(TraceTrack track, const char* name, int64_t begin_ns, int64_t end_ns, const char* keys = nullptr, int64_t value0 = 0,
                        int64_t value1 = 0, int64_t value2 = 0) {
  if (!TraceIsOn(TraceLevel::kPhases) || track.index < 0) return;
  trace_internal::Write({begin_ns, end_ns, name, keys, track.index, {value0, value1, value2}});
}

// From here to the end of the scope.
class TraceSpan {
 public:
  TraceSpan() = default;
  explicit TraceSpan(TraceTrack track, const char* name, const char* keys = nullptr, int64_t value0 = 0, int64_t value1 = 0, int64_t value2 = 0) {
    if (TraceIsOn(TraceLevel::kPhases)) Begin(track, name, keys, {value0, value1, value2});
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;
  ~TraceSpan() {
    if (record_.begin_ns != 0) End();
  }

  // For who has looked at the level itself.
  void Begin(TraceTrack track, const char* name, const char* keys, const std::array<int64_t, 3>& values) {
    if (track.index >= 0) record_ = {MonotonicNowNs(), 0, name, keys, track.index, values};
  }
  // A value that is known only now.
  void SetValue(size_t i, int64_t value) { record_.values[i] = value; }

 private:
  void End() {
    record_.end_ns = MonotonicNowNs();
    trace_internal::Write(record_);
  }
  TraceRecord record_{};
};

// Spans without a gap between them, each from where the one before ended: one look at the clock a span.
class TraceLaps {
 public:
  explicit TraceLaps(TraceTrack track) : track_(track), lap_ns_(TraceIsOn(TraceLevel::kPhases) && track.index >= 0 ? MonotonicNowNs() : 0) {}
  // What ran since the one before, or since the beginning.
  void Lap(const char* name, const char* keys = nullptr, int64_t value0 = 0, int64_t value1 = 0, int64_t value2 = 0) {
    if (lap_ns_ == 0) return;
    const int64_t begin_ns = lap_ns_;
    lap_ns_ = MonotonicNowNs();
    TraceSpanAt(track_, name, begin_ns, lap_ns_, keys, value0, value1, value2);
  }

 private:
  const TraceTrack track_;
  int64_t lap_ns_;  // 0: nobody was reading at the beginning
};

// Recording is on while one lives; each reads for itself.
class TraceReader {
 public:
  explicit TraceReader(TraceLevel level);
  ~TraceReader();
  TraceReader(const TraceReader&) = delete;
  TraceReader& operator=(const TraceReader&) = delete;

  // Appends what has been recorded since the last call, a thread's spans in the order of their ends. Returns how many were overwritten before it came.
  uint64_t Take(std::vector<TraceRecord>& out);
  // Names of the tracks with an index of `from` or more.
  static std::vector<std::string> TracksFrom(size_t from);

 private:
  const TraceLevel level_;
  std::vector<uint64_t> next_;  // by ring
};

}  // namespace hearth
