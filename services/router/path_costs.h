// What the router has learned of the ways that prompts take: each worker's cost of a pass, and how its own predictions compare with what came.
// Room: services/router. May touch: proto, common/roofline. Threads: the loop.
// Costs come from the passes that workers report with their status; before the first one, from the roofline where node.hardware names this machine's
// profile (StartFrom). A way is "decode" or "prefill" with what its worker calls its path: "decode chunked", "prefill slp".
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/roofline/pass_cost.h"
#include "hearth/v1/worker.pb.h"
#include "services/router/metrics.h"

namespace hearth::router {

class PathCosts {
 public:
  // Of workers of this way that are seen from now on or were already. `shape_only`: see PassFit.
  void StartFrom(const std::string& way, const PassCost& cost, bool shape_only);
  void OnWorkerStatus(const std::string& worker, const v1::WorkerStatus& status);

  // Empty: it has not said yet.
  std::string WayOf(const std::string& worker) const;
  std::optional<PassCost> CostOf(const std::string& worker) const;
  // Of passes that the ranks of its prefill group compute together: its way with their number, "prefill slp x2". None: none was measured.
  std::optional<PassCost> SharedCostOf(const std::string& worker) const;
  // What first tokens of this way took beside what passes and steps explain: hand-over, calls of the store. At most a tenth of a second: what grows with
  // a prompt belongs to its passes.
  double ExtraSeconds(const std::string& way) const;

  // A first token that came without a detour (no lost worker, no second choice of the path). `extra_s` is what ExtraSeconds had put into the prediction.
  void OnFirstToken(const std::string& way, double predicted_s, double extra_s, double real_s);

  struct Line {
    std::string worker, way;
    PassCost cost;
    int64_t passes = 0;  // 0: from the roofline
  };
  std::vector<Line> lines() const;
  struct Trust {
    std::string way;
    uint64_t count = 0;
    double ratio_p50 = 0;                 // real over predicted
    double error_p50 = 0, error_p90 = 0;  // |real - predicted| over real
  };
  std::vector<Trust> trust() const;

 private:
  struct Worker {
    int32_t pid = 0;
    std::string generation;
    uint64_t last_pass = 0;  // seen of this process
    std::string way, shared_way;
    std::map<std::string, PassFit> fits;  // by way: a restarted worker may take another
  };
  struct Start {
    PassCost cost;
    bool shape_only = false;
  };
  struct Predictions {
    RecentValues ratio, error;
    std::deque<double> extra_s;  // the newest
  };
  std::map<std::string, Start> starts_;
  std::map<std::string, Worker> workers_;
  std::map<std::string, Predictions> predictions_;
};

}  // namespace hearth::router
