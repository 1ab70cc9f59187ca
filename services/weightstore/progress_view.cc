#include "services/weightstore/progress_view.h"

#include <stdio.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/base/logging.h"
#include "common/base/process.h"
#include "common/base/time.h"

namespace hearth {
namespace {

constexpr int kBarWidth = 30;
constexpr int64_t kLineEveryNs = 3'000'000'000;
constexpr int64_t kNotifyEveryNs = 1'000'000'000;
// Told every second while bytes move: a load that really hangs is ended by the manager half a minute later.
constexpr int64_t kExtendUs = 30'000'000;

}  // namespace

std::string FormatProgress(const LoadProgress& p, bool with_bar) {
  const double fraction = p.total_bytes == 0 ? 0 : std::min(1.0, static_cast<double>(p.done_bytes) / static_cast<double>(p.total_bytes));
  std::string bar;
  if (with_bar) {
    const int filled = static_cast<int>(fraction * kBarWidth);
    bar = absl::StrCat("[", std::string(static_cast<size_t>(filled), '#'), std::string(static_cast<size_t>(kBarWidth - filled), '.'), "] ");
  }
  return absl::StrFormat("%s%3.0f %%  %s of %s, %.2f GB/s, %s left", bar, fraction * 100, HumanBytes(static_cast<double>(p.done_bytes)),
                         HumanBytes(static_cast<double>(p.total_bytes)), p.bytes_per_second * 1e-9, HumanDuration(p.eta_seconds));
}

ProgressView::ProgressView() : terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressView::~ProgressView() {
  if (line_open_) fputc('\n', stderr);
}

void ProgressView::Show(const LoadState& state) {
  const int64_t now = MonotonicNowNs();
  const bool moves = state.phase == "loading" && state.progress.total_bytes > 0;
  if (now - last_notify_ns_ >= kNotifyEveryNs) {
    last_notify_ns_ = now;
    NotifyExtendTimeout(kExtendUs);
    NotifyStatus(moves ? absl::StrCat("loading ", state.model_dir, ": ", FormatProgress(state.progress, false)) : absl::StrCat(state.phase, " ", state.model_dir));
  }
  if (moves && terminal_) {
    fprintf(stderr, "\r%s\033[K", FormatProgress(state.progress, true).c_str());
    fflush(stderr);
    line_open_ = true;
  } else if (moves ? now - last_line_ns_ >= kLineEveryNs : state.phase != last_phase_) {
    if (line_open_) fputc('\n', stderr);
    line_open_ = false;
    spdlog::info("{} {}{}{}", state.phase, state.model_dir, moves ? ": " : "", moves ? FormatProgress(state.progress, false) : "");
    last_line_ns_ = now;
  }
  last_phase_ = state.phase;
}

}  // namespace hearth
