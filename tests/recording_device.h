// A Device that computes nothing: ops leave a line (name, shapes, cost), the clock is virtual, and actors run one at a time in an order that
// does not depend on the machine. So an engine's whole schedule can be listed, and listed again to the byte.
// Room: tests. Threads: the test's own is actor 0; spawned ones get the baton when the others wait or end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/device/device.h"

namespace hearth {

struct RecordingOptions {
  uint64_t seed = 1;               // of the gate's choices
  double flops_per_second = 1e12;  // an op lasts as long as the slower of its arithmetic and its bytes
  double bytes_per_second = 1e11;
  std::string failing_op;  // the one of this name that so many came before ends its stream
  int64_t failing_at = 0;
  uint64_t memory_budget_bytes = UINT64_MAX;
};

class RecordingDevice : public Device {
 public:
  static std::unique_ptr<RecordingDevice> Make(const RecordingOptions& options);

  // One line an op, in the order of enqueueing: "<start ns> <stream> <op> <shapes> <cost>".
  virtual std::vector<std::string> Lines() const = 0;
};

}  // namespace hearth
