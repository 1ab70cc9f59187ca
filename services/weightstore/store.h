// Who is attached, with which lease, to which generation; and the page calls of a caller, checked against that. The store's policy between
// generations, page tables and the watch over processes.
// Room: services/weightstore. May touch: common/{shm,base}. Not: gRPC, proto. Threads: any.
// Lock order: mutex_ -> Generations -> PageTable, and mutex_ -> LeaseWatch, RingKeeper, GroupKeeper. Sinks are called with no lock held.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/base/node_config.h"
#include "common/base/process.h"
#include "services/weightstore/generations.h"
#include "services/weightstore/group_keeper.h"
#include "services/weightstore/lease_watch.h"
#include "services/weightstore/page_table.h"
#include "services/weightstore/ring_keeper.h"

namespace hearth {

// One Attach stream, as the policy sees it. Calls return at once; what can't be sent is dropped with the stream.
class AttachSink {
 public:
  virtual ~AttachSink() = default;
  virtual void SendReady(const GenerationPtr& generation) = 0;
  virtual void SendSwitch(const GenerationPtr& generation) = 0;  // null: drain
  virtual void SendLoading(const LoadState& loading) = 0;
};

struct Caller {
  uint64_t connection = 0;
  ProcessId process;
  uid_t uid = 0;
};

struct Hello {
  bool router = false;
  PageTable::LeaseSpec spec;  // without the process, which is the caller's
  uint64_t lease_id = 0;
  std::optional<Hash128> generation;
  std::vector<PageTable::Stream> holds;
  uint64_t attempt = 0;
};

struct Welcome {
  uint64_t lease_id = 0;
  GenerationPtr generation;  // null: none is READY for it yet
  LoadState loading;
  bool drain = false;  // its generation is superseded: a switch follows
  GenerationPtr newest;
};

class Store {
 public:
  explicit Store(const NodeConfig& config);
  ~Store();

  Generations& generations() { return generations_; }
  // Adopted leases are watched and their rings filled from here on; before it, page calls and Attach find what is there.
  void WatchAdopted();

  absl::StatusOr<Welcome> Attach(const Caller& caller, const Hello& hello, const std::shared_ptr<AttachSink>& sink);
  void Beat(const AttachSink* sink);
  void Goodbye(const AttachSink* sink);  // the lease ends
  void Detach(const AttachSink* sink);   // the stream has ended; without a goodbye the lease becomes suspect

  absl::StatusOr<int64_t> Peek(const Hash128& generation, const std::vector<int32_t>& token_ids);
  absl::StatusOr<std::vector<PageTable::Row>> Match(const Caller& caller, uint64_t lease, const Hash128& request,
                                                    const std::vector<int32_t>& token_ids);
  absl::StatusOr<std::vector<PageTable::Row>> Alloc(const Caller& caller, uint64_t lease, const Hash128& request, int32_t first_index, int32_t count,
                                                    int32_t at_least);
  absl::Status Seal(const Caller& caller, uint64_t lease, const Hash128& request, const std::vector<int32_t>& indexes);
  absl::Status Offer(const Caller& caller, uint64_t lease, const Hash128& request);
  absl::StatusOr<std::vector<PageTable::Row>> Take(const Caller& caller, uint64_t lease, const Hash128& request);
  absl::Status Free(const Caller& caller, uint64_t lease, const Hash128& request, int32_t from_index);
  // Expert rings for a lease that is attached on the caller's connection. Blocks while they are allocated. Errors: RingKeeper::Make.
  absl::Status MakeRings(const Caller& caller, uint64_t lease, int64_t slots);

  // The group of prefill workers in which the lease is `rank`. Errors: GroupKeeper::Join.
  absl::StatusOr<uint64_t> JoinGroup(const Caller& caller, uint64_t lease, uint32_t rank, uint32_t size, uint64_t exchange_bytes);

  struct RouterView {
    uint64_t lease_id;
    std::string name;
    ProcessId process;
    double seconds_since_beat;
  };
  std::vector<RouterView> Routers() const;
  LeaseWatch::View Look(uint64_t lease) const { return watch_->Look(lease); }
  std::vector<GroupKeeper::View> Groups() const { return groups_.Look(); }
  std::vector<RingKeeper::View> Rings() const { return rings_.Look(); }
  int64_t ticks() const { return ticks_.load(); }  // rises while the watch and the tables' locks move: what the watchdog believes

 private:
  struct Session {
    std::shared_ptr<AttachSink> sink;
    Caller caller;
    bool router = false;
    PageTable::LeaseSpec spec;
    uint64_t lease_id = 0;
    uint64_t attempt = 0;
    GenerationPtr generation;  // null: waits for one, has no lease yet
    LeaseWatch::Clock::time_point last_beat = LeaseWatch::Clock::now();
  };

  absl::Status CheckNotOvertaken(const Session& session) const;
  void ReplaceOlder(const Session& session);
  absl::Status AttachRouter(const Hello& hello, Session* session, Welcome* welcome);
  absl::Status Reattach(const Hello& hello, Session* session, Welcome* welcome);
  absl::Status AttachNew(Session* session, Welcome* welcome);
  absl::Status ReleaseName(const Session& session);
  absl::Status GiveLease(Session* session);
  // The generation of a lease that is attached on the caller's connection.
  absl::StatusOr<GenerationPtr> Attached(const Caller& caller, uint64_t lease) const;
  // Ends the lease, unless another rank of its group may still be writing into its pages: then it is tried again later.
  bool TryEndLease(uint64_t lease);
  void NeedSuspects(const Generation& generation, const std::string& why);
  std::vector<std::shared_ptr<AttachSink>> Sinks(const std::function<bool(const Session&)>& which) const;
  void OnReady(const GenerationPtr& generation);
  void OnExit(uint64_t lease);
  void OnTick();

  const NodeConfig& config_;
  mutable std::mutex mutex_;
  std::map<const AttachSink*, Session> sessions_;
  std::set<uint64_t> ending_;  // leases whose process is gone, and whose pages another rank may still be writing into
  GroupKeeper groups_;
  Generations generations_;
  RingKeeper rings_;
  std::atomic<int64_t> ticks_{0};
  std::unique_ptr<LeaseWatch> watch_;  // last made, first to go: its thread calls the others
};

}  // namespace hearth
