// How a load is shown to people and to the service manager: a bar on a terminal, else a line every few seconds; systemd is told to wait on.
// Room: services/weightstore. May touch: common/base. Threads: one at a time.
#pragma once

#include <cstdint>
#include <string>

#include "services/weightstore/generations.h"

namespace hearth {

class ProgressView {
 public:
  ProgressView();
  ~ProgressView();  // leaves the terminal's line
  void Show(const LoadState& state);

 private:
  const bool terminal_;
  bool line_open_ = false;
  int64_t last_line_ns_ = 0;
  int64_t last_notify_ns_ = 0;
  std::string last_phase_;
};

}  // namespace hearth
