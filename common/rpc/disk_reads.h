// A disk reader's counters as a message. Room: common/rpc. May touch: proto, common/{disk,base}. Threads: any.
#pragma once

#include "common/disk/disk_reader.h"
#include "hearth/v1/worker.pb.h"

namespace hearth {

inline void Tell(const DiskReader::View& view, v1::DiskReads& out) {
  out.set_kind(view.kind);
  out.set_note(view.note);
  out.set_records(view.records);
  out.set_bytes(view.bytes);
  if (view.busy_seconds > 0) out.set_bytes_per_second(static_cast<double>(view.bytes) / view.busy_seconds);
  out.set_under_way_bytes(view.under_way_bytes);
  out.set_errors(view.errors);
}

}  // namespace hearth
