// What ran when, for people: a trace that Perfetto and chrome://tracing open, and a picture.
// Room: common/sim. May touch: common/base. Threads: one; the file's bytes depend on the spans alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hearth {

struct TimelineTrack {
  std::string process;  // "gpu 0"
  std::string name;     // "copy"
};

struct TimelineSpan {
  int track = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  std::string name;
  std::string detail;
};

class Timeline {
 public:
  // The same names give the same track.
  int AddTrack(const std::string& process, const std::string& name);
  void AddSpan(TimelineSpan span) { spans_.push_back(std::move(span)); }
  const std::vector<TimelineTrack>& tracks() const { return tracks_; }
  const std::vector<TimelineSpan>& spans() const { return spans_; }  // by their ends

  // Trace Event Format, "X" events, microseconds with nanoseconds as decimals.
  std::string ToPerfettoJson() const;
  // A row for each track that has spans within [begin_ns, end_ns); widths are true to time, each op name has its colour, with a legend.
  std::string ToSvg(const std::string& title, int64_t begin_ns, int64_t end_ns) const;

 private:
  std::vector<TimelineTrack> tracks_;
  std::vector<TimelineSpan> spans_;
};

}  // namespace hearth
