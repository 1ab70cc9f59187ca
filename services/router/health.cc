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
    std::string where = view.phase.empty() ? "starting" : view.phase;
    if (view.load_eta_seconds > 0) {
      absl::StrAppendFormat(&where, ", %.0f %%, about %s left", 100 * view.load_fraction, HumanDuration(view.load_eta_seconds));
    }
    return absl::UnavailableError(absl::StrCat("the model is being made ready: ", where));
  }
  if (was_attached_ && absl::Nanoseconds(now_ns - attached_at_ns_) < store_grace_) return absl::OkStatus();
  // Why is for the operator, in the log of the store's client: it names sockets, and a client can do nothing with it.
  return absl::UnavailableError(
      "the weight store is away; requests are taken again as soon as it is back (operators: `hearth status` and the log of "
      "hearth-weightstore say why)");
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
  model_->Refresh();
  absl::Status status = StoreReadiness();
  if (status.ok()) status = model_->Readiness();
  if (status.ok()) status = scheduler_->DecodeReadiness();
  if (scheduler_->draining()) status = absl::UnavailableError("the node is stopping");
  health.ready = status.ok();
  if (!status.ok()) health.reason = std::string(status.message());
  return health;
}

}  // namespace hearth::router
