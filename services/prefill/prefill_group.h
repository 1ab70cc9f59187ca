// A prefill worker's part in its group: it joins through the store, hears of shared passes, and takes its rank in them (ADR 0014).
// Room: services/prefill. May touch: common/{slp,model,device,rpc,shm,base}. Threads: the loop's, and an actor of its own that joins and listens; Look: any.
//
//   alone --all ranks are there--> whole --a rank exits or stops--> alone
// In a whole group rank 0 leads: it holds the prompts' pages and tells the others of the pass; they follow when their own pass, if any, has ended.
// A shared pass is two passes of the collectives: the call, in which rank 0 tells what is to be done, and the work. Who leaves the call leaves the work too,
// so that all ranks always count alike.
// If a rank dies: the others' pass ends within a second, and each goes on alone. When it is back, the store makes a new group. If the store dies: nothing
// here waits for it; a group that is whole goes on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/process.h"
#include "common/base/status.h"
#include "common/device/collectives.h"
#include "common/device/device.h"
#include "common/rpc/store_client.h"
#include "common/shm/group_region.h"
#include "common/slp/slp_engine.h"

namespace hearth {

class PrefillGroup {
 public:
  struct Options {
    int64_t rank = 0;
    int64_t size = 2;
  };
  PrefillGroup(Device& device, const Model& model, StoreClient& store, Options options);
  ~PrefillGroup();  // leaves

  // Once, before the loop runs. `wake`: something has changed, look at Refresh and called.
  void Start(std::function<void()> wake);
  // No shared pass is begun or joined any more, and the store is asked nothing. The loop has ended.
  void Leave();

  // The loop's:
  // Takes up a group that has come together, lets go of one that has lost a rank. Errors: the model can't be shared.
  absl::Status Refresh(SlpEngine& engine);
  int64_t size() const { return options_.size; }
  bool leads() const { return joined_ != nullptr && options_.rank == 0; }
  bool called() const { return joined_ != nullptr && options_.rank != 0 && joined_->collectives->Called(); }
  // A pass of all ranks over `batch`, as SlpEngine::RunShared; nobody writes into its pages any more when it returns.
  // Errors: as there; Cancelled also where another rank is stopping; Unavailable when one is gone or does not come.
  absl::Status Lead(SlpEngine& engine, const KvPool& kv, const ForwardBatch& batch, const SlpHooks& hooks);
  // This rank's part of the pass that rank 0 has called for. `wanted`: looked at throughout; false ends it for all.
  absl::Status Follow(SlpEngine& engine, const KvPool& kv, const std::function<bool()>& wanted);

  struct View {
    uint64_t id = 0;  // 0: alone
    int64_t rank = 0, size = 0;
    std::string waits_for;  // when alone: why
    uint64_t passes = 0, passes_failed = 0;
    std::vector<Traffic> traffic;  // what this rank has sent, of all groups
  };
  View Look() const;

 private:
  struct Joined {
    std::unique_ptr<GroupRegion> region;
    std::vector<std::unique_ptr<ProcessWatch>> watches;  // by rank
    std::unique_ptr<Collectives> collectives;
    // All ranks live, and none is about to stop. Any thread.
    bool IsWhole() const;
  };

  void Listen();
  absl::Status Join();
  absl::Status Enter();
  void Exit(const absl::Status& status);
  void CountTraffic();
  // `message`: rank 0's, to all; another's, from rank 0.
  absl::Status Call(std::vector<uint8_t>& message, const std::function<bool()>& wanted);
  void AwaitOthersOut();

  Device& device_;
  const Model& model_;
  StoreClient& store_;
  const Options options_;
  std::function<void()> wake_;
  const std::unique_ptr<HostSignal> signal_;
  StopToken stop_;
  uint64_t last_id_ = 0;            // the listener's: of the group that it found last
  std::shared_ptr<Joined> joined_;  // the loop's
  mutable std::mutex mutex_;        // all below
  std::shared_ptr<Joined> found_;   // set by the listener, taken back by the loop, which is the only one to use it in a pass
  View view_;
  std::unique_ptr<Actor> listener_;  // last: it uses the others
};

}  // namespace hearth
