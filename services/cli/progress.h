// A progress bar with rate and time left: redrawn in place on a terminal, a line every few seconds elsewhere.
// Room: services/cli.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>

#include "common/base/progress.h"
#include "common/base/time.h"

namespace hearth {

class ProgressBar {
 public:
  explicit ProgressBar(std::string what) : what_(std::move(what)), terminal_(isatty(STDERR_FILENO)) {}
  ~ProgressBar() {
    if (terminal_ && drawn_) std::cerr << "\n";
  }

  void Update(uint64_t done, uint64_t total) {
    const int64_t now = MonotonicNowNs();
    if (total == 0 || (done < total && now - last_ns_ < (terminal_ ? 100'000'000 : 5'000'000'000))) return;
    if (done >= total && complete_) return;
    complete_ = done >= total;
    last_ns_ = now;
    // What was done before the bar came (another process may have begun it) has no rate.
    if (!drawn_) {
      drawn_ = true;
      done_before_ = done;
      start_ns_ = now;
    }
    const double seconds = static_cast<double>(now - start_ns_) / 1e9;
    const double rate = seconds > 0 ? static_cast<double>(done - std::min(done, done_before_)) / seconds : 0;
    const double left = rate > 0 && seconds > kRateSeconds ? static_cast<double>(total - done) / rate : 0;
    std::cerr << (terminal_ ? "\r\033[K" : "") << what_ << " " << FormatProgress(done, total, rate, left, /*with_bar=*/true)
              << (terminal_ ? "" : "\n") << std::flush;
  }

 private:
  static constexpr double kRateSeconds = 0.5;  // before it a rate says nothing about the time left

  const std::string what_;
  const bool terminal_;
  int64_t start_ns_ = 0;
  uint64_t done_before_ = 0;
  int64_t last_ns_ = 0;
  bool drawn_ = false;
  bool complete_ = false;
};

}  // namespace hearth
