#include "common/base/progress.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/time.h"

namespace hearth {

std::string FormatProgress(uint64_t done_bytes, uint64_t total_bytes, double bytes_per_second, double eta_seconds, bool with_bar) {
  constexpr int kBarWidth = 30;
  const double fraction = total_bytes == 0 ? 0 : std::min(1.0, static_cast<double>(done_bytes) / static_cast<double>(total_bytes));
  std::string bar;
  if (with_bar) {
    const int filled = static_cast<int>(fraction * kBarWidth);
    bar = absl::StrCat("[", std::string(static_cast<size_t>(filled), '#'), std::string(static_cast<size_t>(kBarWidth - filled), '.'), "] ");
  }
  return absl::StrFormat("%s%3.0f %%  %s of %s%s%s", bar, fraction * 100, HumanBytes(static_cast<double>(done_bytes)),
                         HumanBytes(static_cast<double>(total_bytes)),
                         bytes_per_second > 0 ? absl::StrFormat(", %.2f GB/s", bytes_per_second * 1e-9) : "",
                         eta_seconds > 0 ? absl::StrCat(", ", HumanDuration(eta_seconds), " left") : "");
}

}  // namespace hearth
