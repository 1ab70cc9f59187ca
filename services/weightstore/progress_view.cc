#include "services/weightstore/progress_view.h"

#include <stdio.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "common/base/logging.h"
#include "common/base/process.h"
#include "common/base/progress.h"
#include "common/base/time.h"

namespace hearth {
namespace {

constexpr int64_t kLineEveryNs = 3'000'000'000;
constexpr int64_t kNotifyEveryNs = 1'000'000'000;
// Told every second while bytes move: a load that really hangs is ended by the manager half a minute later.
constexpr int64_t kExtendUs = 30'000'000;

std::string Line(const LoadProgress& p, bool with_bar) {
  return FormatProgress(p.done_bytes, p.total_bytes, p.bytes_per_second, p.eta_seconds, with_bar);
}

}  // namespace

ProgressView::ProgressView() : terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressView::~ProgressView() {
  if (line_open_) fputc('\n', stderr);
}

void ProgressView::Show(const LoadState& state) {
  const int64_t now = MonotonicNowNs();
  const bool moves = (state.phase == "loading" || state.phase == "allocating") && state.progress.total_bytes > 0;
  if (now - last_notify_ns_ >= kNotifyEveryNs) {
    last_notify_ns_ = now;
    NotifyExtendTimeout(kExtendUs);
    NotifyStatus(absl::StrCat(state.phase, " ", state.model_dir, moves ? absl::StrCat(": ", Line(state.progress, false)) : ""));
  }
  if (moves && terminal_) {
    fprintf(stderr, "\r%s %s\033[K", state.phase.c_str(), Line(state.progress, true).c_str());
    fflush(stderr);
    line_open_ = true;
  } else if (state.phase != last_phase_ || (moves && now - last_line_ns_ >= kLineEveryNs)) {
    if (line_open_) fputc('\n', stderr);
    line_open_ = false;
    spdlog::info("{} {}{}{}", state.phase, state.model_dir, moves ? ": " : "", moves ? Line(state.progress, false) : "");
    last_line_ns_ = now;
  }
  last_phase_ = state.phase;
}

}  // namespace hearth
