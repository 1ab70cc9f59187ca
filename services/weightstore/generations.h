// The generations of a node: found at start and adopted, loaded, switched to, retired.
// Room: services/weightstore. May touch: common/{image,formats,shm,numa,base}. Not: gRPC, leases' processes (only whether one is alive).
// Threads: any; Load runs in its caller's thread, one at a time. A Generation lives as long as somebody holds its pointer.
//
//   LOADING --all bytes checked--> READY (newest) --a newer one is READY--> READY, superseded --its last lease and row are gone--> RETIRED --> gone
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/base/node_config.h"
#include "common/base/status.h"
#include "common/image/image_builder.h"
#include "common/shm/kv_pool.h"
#include "common/shm/region.h"
#include "common/shm/store_table.h"
#include "common/shm/turn_board.h"
#include "common/shm/weight_image.h"
#include "services/weightstore/page_table.h"

namespace hearth {

struct Generation {
  Hash128 id;
  uint64_t sequence = 0;  // the higher is the newer
  bool adopted = false;
  std::optional<RegionLock> lock;
  std::shared_ptr<const WeightImage> image;
  std::shared_ptr<KvPool> pool;
  std::shared_ptr<StoreTable> table;
  std::shared_ptr<TurnBoard> turns;
  std::unique_ptr<PageTable> pages;
  std::atomic<bool> superseded{false};
};
using GenerationPtr = std::shared_ptr<Generation>;

struct LoadState {
  bool active = false;
  std::string model_dir;
  std::string phase;  // "planning", "draining", "allocating", "loading", "flushing", "publishing", "ready"
  LoadProgress progress;
};

struct LoadRequestOptions {
  std::string model_dir;
  bool replace = false;  // where both don't fit: drain the present one and drop it first
  std::function<bool()> cancelled;
  std::function<void(const LoadState&)> progress;  // this caller's; events().on_progress comes as well
};

class Generations {
 public:
  struct Events {
    std::function<void(const LoadState&)> on_progress;
    std::function<void(const GenerationPtr&)> on_ready;  // it is the newest now; older ones are superseded
    std::function<void()> on_drain;                      // all present ones are superseded, and the next fits only without them
    // Whether a process that an adopted table names still counts as there.
    std::function<bool(const Hash128& generation, const ProcessId& process)> lives;
  };

  Generations(const NodeConfig& config, Events events);

  // Refuses beside a living store (FailedPrecondition, with its pid), adopts READY generations, removes what dead stores left. Reads no
  // weights. `needs_load`: nothing that is here is what the configuration asks for.
  absl::Status Adopt(bool* needs_load);
  // Blocks until the generation is READY or refused. FailedPrecondition while another load runs.
  absl::StatusOr<GenerationPtr> Load(const LoadRequestOptions& options);

  GenerationPtr Find(const Hash128& id) const;
  GenerationPtr Newest() const;  // null: none is READY
  // Decode: the oldest generation with streams, which only it can end; prefill, and decode where no streams are: the newest. Null: wait for the
  // next.
  GenerationPtr ForNewWorker(LeaseKind kind) const;
  std::vector<GenerationPtr> All() const;  // oldest first
  LoadState loading() const;
  bool draining() const { return draining_.load(); }

  void RetireIdle();  // superseded ones without lease and row
  std::vector<std::string> notes() const;
  const RegionPlace& place() const { return place_; }

 private:
  struct Sizes {
    KvGeometry geometry;
    StoreTableSpec table;
    uint64_t bytes = 0;
  };
  absl::StatusOr<Sizes> SizesFor(const std::string& config_json, const std::string& generation_config_json) const;
  // What a generation's table remembers of its making. It belongs to the image, and goes on when pool and table are made anew. 0: not known.
  struct Origin {
    uint64_t sequence = 0;
    uint64_t source_stamp = 0;
    uint64_t config_stamp = 0;
  };
  // In place of those that are there.
  absl::Status MakePoolAndTable(const Hash128& generation, const Sizes& sizes, const Origin& origin, const AllocationHook& on_allocated) const;
  // Makes it where it is missing or no such board.
  absl::StatusOr<std::shared_ptr<TurnBoard>> OpenTurns(const Hash128& generation) const;
  absl::StatusOr<GenerationPtr> Open(const Hash128& generation, bool adopted);
  bool IsWanted(const Generation& generation, std::string* why_not) const;
  absl::Status CheckAlone() const;
  absl::StatusOr<Hash128> Build(const LoadRequestOptions& options, const std::function<void(std::string_view, const LoadProgress&)>& report);
  void Retire(const GenerationPtr& generation);
  uint64_t ConfigStamp() const;
  int NumShards() const;
  // For `status`. What speaks of one generation goes with it.
  void Note(const std::string& text, const std::optional<Hash128>& generation = std::nullopt);

  const NodeConfig& config_;
  const Events events_;
  const RegionPlace place_;
  std::atomic<bool> draining_{false};
  mutable std::mutex mutex_;
  std::vector<GenerationPtr> generations_;  // by sequence
  std::vector<Hash128> leftovers_;          // RETIRED, with a living worker: removed when he is gone
  uint64_t last_sequence_ = 0;
  LoadState loading_;
  struct NoteOf {
    std::string text;
    std::optional<Hash128> generation;
    friend bool operator==(const NoteOf&, const NoteOf&) = default;
  };
  std::vector<NoteOf> notes_;
};

}  // namespace hearth
