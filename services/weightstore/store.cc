// A page call and the check that its lease is attached on its connection are one step under the mutex: a re-attach falls before both or after both.
#include "services/weightstore/store.h"

#include <unistd.h>

#include "common/base/logging.h"

namespace hearth {
namespace {

constexpr int kSweepTicks = 4;  // once a second

uint64_t NewLeaseId() {
  const uint64_t id = RandomHash128().low;
  return id == 0 ? 1 : id;
}

// One client of one process, whichever connection it comes on. A worker has one for its name, a router's is known by the lease that it had.
template <typename Session>
bool SameClient(const Session& a, const Session& b) {
  if (a.caller.process != b.caller.process || a.router != b.router) return false;
  return a.router ? a.lease_id == b.lease_id : a.spec.name == b.spec.name;
}

}  // namespace

Store::Store(const NodeConfig& config)
    : config_(config),
      groups_({config.shm_dir, config.node_name}),
      generations_(config, {.on_progress =
                                [this](const LoadState& loading) {
                                  // Who has a generation already is not interested.
                                  for (const auto& sink : Sinks([](const Session& s) { return s.generation == nullptr; })) sink->SendLoading(loading);
                                },
                            .on_ready = [this](const GenerationPtr& generation) { OnReady(generation); },
                            .on_drain =
                                [this] {
                                  for (const auto& sink : Sinks([](const Session& s) { return s.generation != nullptr; })) sink->SendSwitch(nullptr);
                                },
                            .lives =
                                [this](const Hash128& generation, const ProcessId& process) {
                                  groups_.Open(generation);
                                  return IsAlive(process) || groups_.HasWritersInto(process);
                                }}),
      rings_(generations_.place()) {
  watch_ = std::make_unique<LeaseWatch>(LeaseWatch::Callbacks{.on_exit = [this](uint64_t lease) { OnExit(lease); }, .on_tick = [this] { OnTick(); }});
}

Store::~Store() { watch_.reset(); }

void Store::WatchAdopted() {
  for (const GenerationPtr& generation : generations_.All()) {
    for (const PageTable::Lease& lease : generation->pages->Leases()) {
      if (lease.state == LeaseState::kLive) watch_->Add(lease.id, lease.spec.process, lease.spec.name);
    }
    rings_.Adopt(*generation);
  }
  groups_.Settle([this](uint64_t lease) { return watch_->Look(lease).known; });
}

// ---- Attach ----

absl::StatusOr<Welcome> Store::Attach(const Caller& caller, const Hello& hello, const std::shared_ptr<AttachSink>& sink) {
  std::lock_guard lock(mutex_);
  Session session;
  session.sink = sink;
  session.caller = caller;
  session.router = hello.router;
  session.spec = hello.spec;
  session.spec.process = caller.process;
  session.lease_id = hello.lease_id;
  session.attempt = hello.attempt;
  RETURN_IF_ERROR(CheckNotOvertaken(session));
  Welcome welcome;
  if (hello.router) {
    RETURN_IF_ERROR(AttachRouter(hello, &session, &welcome));
  } else {
    // Workers map files of mode 0600: another user's process could not, and has no business with pages.
    if (caller.uid != geteuid() && caller.uid != 0) {
      return absl::PermissionDeniedError(absl::StrCat("process ", caller.process.pid, " runs as user ", caller.uid, ", the store as user ", geteuid(),
                                                      ": store and workers must be one user"));
    }
    if (hello.lease_id != 0 && hello.generation.has_value()) {
      RETURN_IF_ERROR(Reattach(hello, &session, &welcome));
    } else {
      RETURN_IF_ERROR(AttachNew(&session, &welcome));
    }
    welcome.generation = session.generation;
    welcome.drain = session.generation != nullptr && session.generation->superseded;
  }
  welcome.lease_id = session.lease_id;
  welcome.loading = generations_.loading();
  if (const GenerationPtr newest = generations_.Newest(); newest != nullptr && !newest->superseded) welcome.newest = newest;
  ReplaceOlder(session);
  sessions_[sink.get()] = std::move(session);
  return welcome;
}

absl::Status Store::CheckNotOvertaken(const Session& session) const {
  for (const auto& [sink, other] : sessions_) {
    if (SameClient(other, session) && session.attempt != 0 && session.attempt < other.attempt) {
      return absl::CancelledError("a later Attach of this process has overtaken this one");
    }
  }
  return absl::OkStatus();
}

// The client's older sessions end here and not with their streams, which may take a while to break: from now on a call that was left in an old
// connection is refused, a session that waited for a generation gets no second lease, and the old stream's end unbinds nothing.
void Store::ReplaceOlder(const Session& session) {
  std::erase_if(sessions_, [&](const auto& entry) { return SameClient(entry.second, session); });
}

absl::Status Store::AttachRouter(const Hello& hello, Session* session, Welcome* welcome) {
  session->lease_id = hello.lease_id != 0 ? hello.lease_id : NewLeaseId();
  session->generation = generations_.Newest();
  welcome->generation = session->generation;
  return absl::OkStatus();
}

absl::Status Store::Reattach(const Hello& hello, Session* session, Welcome* welcome) {
  session->lease_id = hello.lease_id;
  session->generation = generations_.Find(*hello.generation);
  if (session->generation == nullptr) {
    return absl::NotFoundError(absl::StrCat("generation ", hello.generation->ToHex(), " is gone: end, and start anew"));
  }
  // First, so that an overtaken attempt settles nothing.
  RETURN_IF_ERROR(watch_->Bind(hello.lease_id, session->caller.connection, hello.attempt));
  return session->generation->pages->Reattach(hello.lease_id, session->caller.process, hello.holds);
}

absl::Status Store::AttachNew(Session* session, Welcome* welcome) {
  RETURN_IF_ERROR(ReleaseName(*session));
  session->lease_id = NewLeaseId();
  return GiveLease(session);
}

// Ends what the same name, or the same process under it, had before; refuses it while another living process has it.
absl::Status Store::ReleaseName(const Session& session) {
  const auto refuse = [&](const ProcessId& other) {
    return absl::AlreadyExistsError(
        absl::StrCat("'", session.spec.name, "' is process ", other.pid, ", which is alive: two workers can't share a name"));
  };
  for (const auto& [sink, other] : sessions_) {
    if (other.router || other.generation != nullptr || other.spec.name != session.spec.name) continue;
    if (other.spec.process != session.spec.process && IsAlive(other.spec.process)) return refuse(other.spec.process);
  }
  for (const GenerationPtr& generation : generations_.All()) {
    for (const PageTable::Lease& lease : generation->pages->Leases()) {
      if (lease.state != LeaseState::kLive || lease.spec.name != session.spec.name) continue;
      if (lease.spec.process != session.spec.process && IsAlive(lease.spec.process)) return refuse(lease.spec.process);
      rings_.End(lease.id);
      if (!TryEndLease(lease.id)) {
        return absl::UnavailableError(
            absl::StrCat("the pages of the former '", session.spec.name, "' are still written into by another rank of its group: ask again"));
      }
      watch_->Remove(lease.id);
    }
  }
  return absl::OkStatus();
}

absl::Status Store::GiveLease(Session* session) {
  while (true) {
    const GenerationPtr generation = generations_.ForNewWorker(session->spec.kind);
    if (generation == nullptr) return absl::OkStatus();  // waits
    RETURN_IF_ERROR(generation->pages->MakeLease(session->lease_id, session->spec));
    // It may have been retired between the choice and the lease. Found after it, it has the lease, and RetireIdle sees that.
    if (generations_.Find(generation->id) == nullptr) continue;
    watch_->Add(session->lease_id, session->spec.process, session->spec.name);
    session->generation = generation;
    return watch_->Bind(session->lease_id, session->caller.connection, session->attempt);
  }
}

void Store::Beat(const AttachSink* sink) {
  std::lock_guard lock(mutex_);
  const auto it = sessions_.find(sink);
  if (it == sessions_.end()) return;
  it->second.last_beat = LeaseWatch::Clock::now();
  if (!it->second.router) watch_->Beat(it->second.lease_id, it->second.caller.connection);
}

void Store::Goodbye(const AttachSink* sink) {
  Session session;
  {
    std::lock_guard lock(mutex_);
    const auto it = sessions_.find(sink);
    if (it == sessions_.end()) return;
    session = it->second;
    sessions_.erase(it);
  }
  if (session.router || session.generation == nullptr) return;
  spdlog::info("{} (process {}) says goodbye", session.spec.name, session.spec.process.pid);
  rings_.End(session.lease_id);  // no call on it is taken any more; while gigabytes are unmapped, others' are
  std::lock_guard lock(mutex_);
  if (TryEndLease(session.lease_id)) watch_->Remove(session.lease_id);
}

void Store::Detach(const AttachSink* sink) {
  std::lock_guard lock(mutex_);
  const auto it = sessions_.find(sink);
  if (it == sessions_.end()) return;
  if (!it->second.router) watch_->Unbind(it->second.lease_id, it->second.caller.connection);
  sessions_.erase(it);
}

// ---- Page calls ----

absl::StatusOr<GenerationPtr> Store::Attached(const Caller& caller, uint64_t lease) const {
  for (const auto& [sink, session] : sessions_) {
    if (session.lease_id != lease || session.caller.connection != caller.connection || session.router) continue;
    if (session.generation == nullptr) return absl::UnavailableError("no generation is READY yet");
    return session.generation;
  }
  return absl::UnavailableError(absl::StrCat("lease ", lease, " is not attached on this connection: attach first"));
}

absl::StatusOr<int64_t> Store::Peek(const Hash128& id, const std::vector<int32_t>& token_ids) {
  const GenerationPtr generation = generations_.Find(id);
  if (generation == nullptr) return absl::NotFoundError(absl::StrCat("generation ", id.ToHex(), " is gone"));
  return generation->pages->Peek(token_ids);
}

absl::StatusOr<std::vector<PageTable::Row>> Store::Match(const Caller& caller, uint64_t lease, const Hash128& request,
                                                         const std::vector<int32_t>& token_ids) {
  std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const GenerationPtr generation, Attached(caller, lease));
  return generation->pages->Match(lease, request, token_ids);
}

absl::StatusOr<std::vector<PageTable::Row>> Store::Alloc(const Caller& caller, uint64_t lease, const Hash128& request, int32_t first_index,
                                                         int32_t count, int32_t at_least) {
  std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const GenerationPtr generation, Attached(caller, lease));
  absl::StatusOr<std::vector<PageTable::Row>> rows = generation->pages->Alloc(lease, request, first_index, count, at_least);
  if (absl::IsResourceExhausted(rows.status()) || (rows.ok() && rows->size() < static_cast<size_t>(count))) {
    NeedSuspects(*generation, "the pool is full and it holds pages");
  }
  if (absl::IsResourceExhausted(rows.status())) {
    if (auto permit = LogAllowed("pool-full", 6)) {
      spdlog::warn("KV pool: {}{}", std::string(rows.status().message()), permit->Note());
    }
  }
  return rows;
}

absl::Status Store::Seal(const Caller& caller, uint64_t lease, const Hash128& request, const std::vector<int32_t>& indexes) {
  std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const GenerationPtr generation, Attached(caller, lease));
  return generation->pages->Seal(lease, request, indexes);
}

absl::Status Store::Offer(const Caller& caller, uint64_t lease, const Hash128& request) {
  std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const GenerationPtr generation, Attached(caller, lease));
  return generation->pages->Offer(lease, request);
}

absl::StatusOr<std::vector<PageTable::Row>> Store::Take(const Caller& caller, uint64_t lease, const Hash128& request) {
  std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const GenerationPtr generation, Attached(caller, lease));
  uint64_t holder = 0;
  absl::StatusOr<std::vector<PageTable::Row>> rows = generation->pages->Take(lease, request, &holder);
  if (holder != 0) watch_->Need(holder, "another worker is to go on with a stream that it holds");
  return rows;
}

absl::Status Store::Free(const Caller& caller, uint64_t lease, const Hash128& request, int32_t from_index) {
  std::lock_guard lock(mutex_);
  for (const auto& [sink, session] : sessions_) {
    if (!session.router || session.lease_id != lease || session.caller.connection != caller.connection) continue;
    for (const GenerationPtr& generation : generations_.All()) {
      uint64_t holder = 0;
      const absl::Status freed = generation->pages->FreeUnheld(request, from_index, &holder);
      if (holder != 0) watch_->Need(holder, "the router wants to free a stream that it holds");
      RETURN_IF_ERROR(freed);
    }
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const GenerationPtr generation, Attached(caller, lease));
  return generation->pages->Free(lease, request, from_index);
}

absl::Status Store::MakeRings(const Caller& caller, uint64_t lease, int64_t slots) {
  GenerationPtr generation;
  std::string worker;
  {
    std::lock_guard lock(mutex_);
    ASSIGN_OR_RETURN(generation, Attached(caller, lease));
    // A call that its process has not outlived may come after OnExit.
    if (!IsAlive(caller.process)) return absl::UnavailableError(absl::StrCat("process ", caller.process.pid, " has exited"));
    for (const PageTable::Lease& entry : generation->pages->Leases()) {
      if (entry.id == lease) worker = entry.spec.name;
    }
    rings_.Admit(lease);
  }
  return rings_.Make(*generation, lease, worker, slots);
}

absl::StatusOr<uint64_t> Store::JoinGroup(const Caller& caller, uint64_t lease, uint32_t rank, uint32_t size, uint64_t exchange_bytes) {
  std::lock_guard lock(mutex_);
  ASSIGN_OR_RETURN(const GenerationPtr generation, Attached(caller, lease));
  // A call that its process has not outlived may come after OnExit.
  if (!IsAlive(caller.process)) return absl::UnavailableError(absl::StrCat("process ", caller.process.pid, " has exited"));
  GroupKeeper::Request request{.generation = generation->id,
                               .member = {.lease_id = lease, .process = caller.process},
                               .worker = "",
                               .rank = rank,
                               .size = size,
                               .exchange_bytes = exchange_bytes};
  for (const PageTable::Lease& entry : generation->pages->Leases()) {
    if (entry.id == lease) request.worker = entry.spec.name;
  }
  return groups_.Join(request);
}

// ---- Events ----

bool Store::TryEndLease(uint64_t lease) {
  const std::vector<uint64_t> writers = groups_.WritersInto(lease);
  for (const uint64_t writer : writers) watch_->Need(writer, "it may be writing into pages of a rank that is gone");
  if (!writers.empty()) {
    ending_.insert(lease);
    return false;
  }
  ending_.erase(lease);
  for (const GenerationPtr& generation : generations_.All()) generation->pages->EndLease(lease);
  groups_.End(lease);
  return true;
}

void Store::NeedSuspects(const Generation& generation, const std::string& why) {
  for (const PageTable::Lease& lease : generation.pages->Leases()) {
    if (lease.state == LeaseState::kLive && lease.rows > 0) watch_->Need(lease.id, why);
  }
}

std::vector<std::shared_ptr<AttachSink>> Store::Sinks(const std::function<bool(const Session&)>& which) const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<AttachSink>> sinks;
  for (const auto& [key, session] : sessions_) {
    if (which(session)) sinks.push_back(session.sink);
  }
  return sinks;
}

void Store::OnReady(const GenerationPtr& generation) {
  std::vector<std::pair<std::shared_ptr<AttachSink>, GenerationPtr>> ready;
  std::vector<std::shared_ptr<AttachSink>> switched;
  {
    std::lock_guard lock(mutex_);
    for (auto& [key, session] : sessions_) {
      if (session.generation == generation) continue;  // came just now, and has it from its welcome
      if (session.generation != nullptr) {
        switched.push_back(session.sink);
        if (session.router) session.generation = generation;
        continue;
      }
      if (session.router) {
        session.generation = generation;
      } else if (const absl::Status given = GiveLease(&session); !given.ok()) {
        spdlog::error("{} (process {}) gets no lease: {}", session.spec.name, session.spec.process.pid, given.ToString());
        continue;
      }
      if (session.generation != nullptr) ready.emplace_back(session.sink, session.generation);
    }
  }
  for (const auto& [sink, given] : ready) sink->SendReady(given);
  for (const auto& sink : switched) sink->SendSwitch(generation);
}

void Store::OnExit(uint64_t lease) {
  rings_.End(lease);  // before the lease: whoever finds it ended finds its memory free
  std::lock_guard lock(mutex_);
  TryEndLease(lease);
}

void Store::OnTick() {
  const int64_t tick = ticks_.fetch_add(1);
  {
    std::lock_guard lock(mutex_);
    for (const uint64_t lease : std::set(ending_)) {
      if (TryEndLease(lease)) watch_->Remove(lease);
    }
  }
  groups_.Sweep();
  if (tick % kSweepTicks != 0) return;
  for (const GenerationPtr& generation : generations_.All()) {
    generation->pages->Sweep();
    // What is being drained waits for its last worker; one that is stopped for good must not hold up the next model for ever.
    if (generations_.draining()) {
      std::lock_guard lock(mutex_);
      for (const PageTable::Lease& lease : generation->pages->Leases()) {
        if (lease.state == LeaseState::kLive) watch_->Need(lease.id, "the next generation fits only without its own");
      }
    }
  }
  generations_.RetireIdle();
}

std::vector<Store::RouterView> Store::Routers() const {
  std::lock_guard lock(mutex_);
  std::vector<RouterView> views;
  for (const auto& [key, session] : sessions_) {
    if (!session.router) continue;
    views.push_back({session.lease_id, session.spec.name, session.spec.process,
                     std::chrono::duration<double>(LeaseWatch::Clock::now() - session.last_beat).count()});
  }
  return views;
}

}  // namespace hearth
