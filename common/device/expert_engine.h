// What runs the Experts and ExpertRows ops on the host: declared here so that common/experts can implement it without an arrow that points up.
// Room: common/device. May touch: common/base. Threads: any; Runs take turns.
#pragma once

#include "common/base/status.h"
#include "common/device/ops.h"

namespace hearth {

class ExpertEngine {
 public:
  virtual ~ExpertEngine() = default;
  // Returns once args.out is complete. Errors (workspace past the device's budget) end the stream that asked.
  virtual absl::Status Run(const ExpertsArgs& args) = 0;
  // Returns once args.sum has this expert's share. InvalidArgument: a workspace that holds no row.
  virtual absl::Status RunRows(const ExpertRowsArgs& args) = 0;
};

}  // namespace hearth
