// A process's standing connection to the weight store: one Attach stream with a beat, re-attached for ever with back-off, and the page calls.
// Room: common/rpc. May touch: proto, common/{shm,base}. Threads: any; callbacks come on a thread of the client's own.
// If the store dies: the worker keeps its mappings and spare pages; calls give Unavailable; the client re-attaches with its lease, its
// generation and all that it holds. It remembers that by itself, in the step in which a caller gets the answer: a call whose answer got lost
// leaves nothing behind, and a Free counts from the moment it is asked for. If the store refuses (generation gone): `on_lost` - drain and exit.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/rpc/page_store.h"
#include "common/shm/region.h"

namespace hearth {

enum class ClientKind { kPrefill = 1, kDecode = 2, kRouter = 3 };

struct StoreClientOptions {
  std::string socket_path;
  ClientKind kind = ClientKind::kDecode;
  std::string name;       // "decode.0"
  uint64_t numerics = 0;  // see AttachRequest.Hello
  // A newer generation is READY; zero: the present one must go before the next one fits. May be said again after a re-attach.
  std::function<void(const Hash128& generation)> on_switch;
  std::function<void(const absl::Status& why)> on_lost;  // the store says that our generation or lease is gone
};

// How far the store is, for health and status.
struct StoreView {
  bool attached = false;
  std::optional<Hash128> generation;  // READY
  std::string model_dir;              // of `generation`
  Hash128 fingerprint;                // of its model
  int64_t kv_tokens = 0;              // that its KV pool holds
  RegionPlace place;
  double load_fraction = 0;  // while loading
  double load_eta_seconds = 0;
  std::string phase;
  std::string away_reason;  // when not attached
};

class StoreClient : public PageStore {
 public:
  static std::unique_ptr<StoreClient> Start(StoreClientOptions options);
  ~StoreClient() override = default;  // ends the stream; the store sees a clean goodbye

  virtual StoreView View() const = 0;
  // Until a generation is READY, `stopped` says true, or the deadline (CLOCK_MONOTONIC ns) passes.
  virtual absl::StatusOr<Hash128> WaitForGeneration(const std::function<bool()>& stopped, int64_t deadline_ns) = 0;
  // The store makes this worker's expert rings (common/shm/expert_ring.h), one a shard; returns the lease that names them. Waits for the store as long as
  // it takes. Cancelled once `stopped` says true; other errors are the store's refusal, with its numbers.
  virtual absl::StatusOr<uint64_t> MakeRings(int64_t slots, const std::function<bool()>& stopped) = 0;
  // The id of the group of `size` prefill workers in which this one is `rank` (common/shm/group_region.h). Unavailable, with what is missing, until all of
  // them have asked; other errors are the store's refusal.
  virtual absl::StatusOr<uint64_t> JoinGroup(int32_t rank, int32_t size, uint64_t exchange_bytes) = 0;
  virtual absl::StatusOr<int32_t> Peek(const Hash128& generation, const std::vector<int32_t>& token_ids) = 0;
};

}  // namespace hearth
