// Whether this node would serve a request now, and if not, why and for how long: one judgement for /health, gRPC health, admission and status.
// Room: services/router. Threads: the loop only.
// Ready means: a decode worker answered Status within the last seconds and says it is ready, the weight store is attached, and the tokenizer of
// the model that it has is read. A store that
// was there and is away for a moment (a restart is adopted in well under a second) is forgiven for `store_grace`.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/rpc/store_client.h"
#include "services/router/scheduler.h"

namespace hearth::router {

struct HealthView {
  bool ready = false;
  std::string reason;      // when not
  std::string phase;       // while weights are loading
  double progress = 0;     // 0 to 1
  double eta_seconds = 0;  // 0: unknown
  bool loading = false;
};

class Health {
 public:
  Health(const StoreClient* store, ServedModel* model, const Scheduler* scheduler, absl::Duration store_grace)
      : store_(store), model_(model), scheduler_(scheduler), store_grace_(store_grace) {}
  HealthView Check();
  // The store's part alone: OK or Unavailable.
  absl::Status StoreReadiness();

 private:
  const StoreClient* store_;
  ServedModel* model_;
  const Scheduler* scheduler_;
  const absl::Duration store_grace_;
  bool was_attached_ = false;
  int64_t attached_at_ns_ = 0;  // last seen
};

}  // namespace hearth::router
