#include "services/router/health.h"

#include "absl/strings/str_format.h"
#include "common/base/time.h"

namespace hearth::router {

absl::Status Health::StoreReadiness() {
  const StoreView view = store_->View();
  const int64_t now_ns = MonotonicNowNs();
  if (view.attached) {
    was_attached_ = true;
    attached_at_ns_ = now_ns;
    if (view.generation) return absl::OkStatus();
    return absl::UnavailableError(absl::StrFormat("the model's weights are loading: %s, %.0f %%, about %s left",
                                                  view.phase.empty() ? "starting" : view.phase, 100 * view.load_fraction,
                                                  view.load_eta_seconds > 0 ? HumanDuration(view.load_eta_seconds) : "an unknown time"));
  }
  if (was_attached_ && absl::Nanoseconds(now_ns - attached_at_ns_) < store_grace_) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the weight store is away: ", view.away_reason.empty() ? "not attached yet" : view.away_reason));
}

HealthView Health::Check() {
  HealthView health;
  const StoreView view = store_->View();
  if (view.attached && !view.generation) {
    health.loading = true;
    health.phase = view.phase;
    health.progress = view.load_fraction;
    health.eta_seconds = view.load_eta_seconds;
  }
  absl::Status status = StoreReadiness();
  if (status.ok()) status = scheduler_->DecodeReadiness();
  if (scheduler_->draining()) status = absl::UnavailableError("the node is stopping");
  health.ready = status.ok();
  if (!status.ok()) health.reason = std::string(status.message());
  return health;
}

}  // namespace hearth::router
