// What `hearth trace` was sent, as one timeline.
// Room: services/cli. May touch: proto, common/{trace,rpc,base}. Threads: one at a time.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/trace/timeline.h"
#include "hearth/v1/trace.pb.h"

namespace hearth {

class TraceReport {
 public:
  // InvalidArgument for spans whose names were never said: another version's.
  absl::Status Add(const v1::TraceChunk& chunk);

  // Times from the first span's begin on; streams that still run end with the last span.
  Timeline ToTimeline() const;
  // From the first request's arrival to the last one's end on the timeline's clock; all of it where no request ran.
  std::pair<int64_t, int64_t> RequestsWindow() const;
  // What is missing, a line each.
  std::vector<std::string> Notes() const;
  void AddNote(std::string note) { notes_.push_back(std::move(note)); }
  bool empty() const { return spans_.empty() && streams_.empty(); }

 private:
  struct Process {
    std::string name;
    int32_t pid = 0;
    std::map<uint64_t, std::string> names, tracks;
    uint64_t lost = 0;
  };
  struct Span {
    size_t process = 0;
    std::string track, name, detail;
    int64_t begin_ns = 0, end_ns = 0;
  };
  Process& ProcessOf(const v1::TraceChunk& chunk, size_t& index);
  int64_t FirstNs() const;
  int64_t LastNs() const;

  std::vector<Process> processes_;
  std::vector<Span> spans_;
  std::vector<v1::TraceChunk::Stream> streams_;
  std::vector<std::string> notes_;
};

}  // namespace hearth
