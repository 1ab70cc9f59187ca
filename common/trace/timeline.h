// What ran when, simulated or real, for people: a trace that Perfetto and chrome://tracing open, and a picture.
// Room: common/trace. May touch: common/base. Threads: one; the file's bytes depend on the spans alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
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

// "layer=3 rows=1" of the keys "layer rows" and their values; a "stream" is shown as the first digits of its id.
std::string DetailText(std::string_view keys, std::span<const int64_t> values);

class Timeline {
 public:
  // The same names give the same track.
  int AddTrack(const std::string& process, const std::string& name);
  void AddSpan(TimelineSpan span) { spans_.push_back(std::move(span)); }
  // What is missing, for who looks at it.
  void AddNote(std::string note) { notes_.push_back(std::move(note)); }
  const std::vector<TimelineTrack>& tracks() const { return tracks_; }
  const std::vector<TimelineSpan>& spans() const { return spans_; }  // in the order of AddSpan

  // Trace Event Format, "X" events, microseconds with nanoseconds as decimals.
  std::string ToPerfettoJson() const;
  // A row for each track that has spans within [begin_ns, end_ns), in the tracks' order; widths are true to time, each name has a colour of its own that is the same everywhere, with a
  // legend.
  // A span that lies within another is drawn on it, lower; what is too narrow to be seen beside its neighbour is left out.
  std::string ToSvg(const std::string& title, int64_t begin_ns, int64_t end_ns) const;

 private:
  std::vector<TimelineTrack> tracks_;
  std::vector<TimelineSpan> spans_;
  std::vector<std::string> notes_;
};

}  // namespace hearth
