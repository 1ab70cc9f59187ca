// Ordered work on the host: an op has run when the enqueueing call returns, so a stream holds no queue, only its first error and scratch memory.
// Room: common/device/host. May touch: common/{trace,base}. Threads: one at a time, as device.h says of streams.
#pragma once

#include <string>
#include <vector>

#include "common/device/device.h"
#include "common/device/host/scratch.h"

namespace hearth {

class HostStream : public Stream {
 public:
  explicit HostStream(std::string name) : name_(std::move(name)), track_(TraceTrackNamed(name_)) {}
  std::string_view name() const override { return name_; }
  absl::Status Synchronize() override { return status_; }
  absl::Status status() const override { return status_; }
  TraceTrack trace_track() const override { return track_; }

  // The first error kills the stream: later ops do nothing.
  bool alive() const { return status_.ok(); }
  void Fail(const absl::Status& status) {
    if (status_.ok()) status_ = Annotate(status, "stream " + name_);
  }

  Scratch scratch;

 private:
  const std::string name_;
  const TraceTrack track_;
  absl::Status status_;
};

// On the host a recorded point has passed already: what was enqueued before it has run.
class HostEvent : public Event {
 public:
  void Record(Stream&) override {}
  void Wait(Stream&) override {}
  bool Query() const override { return true; }
};

}  // namespace hearth
