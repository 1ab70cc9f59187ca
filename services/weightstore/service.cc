// Each unary call: ids decoded, one call of the policy, rows encoded.
#include "services/weightstore/service.h"

#include <unistd.h>

#include "common/base/time.h"
#include "common/rpc/rpc.h"
#include "services/weightstore/status_report.h"

namespace hearth {
namespace {

using Rows = absl::StatusOr<std::vector<PageTable::Row>>;

grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

absl::Status Encode(const Rows& rows, v1::PagesResponse* response) {
  RETURN_IF_ERROR(rows.status());
  for (const PageTable::Row& row : *rows) {
    v1::PageRow& out = *response->add_rows();
    out.set_index(row.index);
    out.set_page(row.page);
    out.set_sealed(row.sealed);
  }
  return absl::OkStatus();
}

template <typename Field>
std::vector<int32_t> Ids(const Field& field) {
  return {field.begin(), field.end()};
}

}  // namespace

StoreService::StoreService(Store& store, const NodeConfig& config) : store_(store), config_(config), started_ns_(MonotonicNowNs()) {
  load_thread_ = std::thread([this] { RunLoads(); });
}

StoreService::~StoreService() { Stop(); }

absl::StatusOr<Caller> StoreService::CallerOf(Context* context) const {
  if (stopping_) return absl::UnavailableError("the weight store is stopping");
  const PeerListener* listener = listener_;
  if (listener == nullptr) return absl::UnavailableError("the weight store is starting");
  ASSIGN_OR_RETURN(const Peer peer, listener->Of(context->peer()));
  return Caller{peer.connection, peer.process, peer.uid};
}

grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachEvent>* StoreService::Attach(Context* context) {
  return AttachReactor::Make(store_, config_, CallerOf(context), [this](const std::shared_ptr<AttachReactor>& reactor, bool begins) {
    std::lock_guard lock(mutex_);
    if (begins) {
      streams_.insert(reactor);
    } else {
      streams_.erase(reactor);
    }
  });
}

grpc::ServerUnaryReactor* StoreService::Peek(Context* context, const v1::PeekRequest* request, v1::PeekResponse* response) {
  return Finish(context, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Hash128 generation, HashFromBytes(request->generation()));
    ASSIGN_OR_RETURN(const int64_t tokens, store_.Peek(generation, Ids(request->token_ids())));
    response->set_tokens(static_cast<int32_t>(tokens));
    return absl::OkStatus();
  }());
}

grpc::ServerUnaryReactor* StoreService::Match(Context* context, const v1::MatchRequest* request, v1::PagesResponse* response) {
  return Finish(context, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, CallerOf(context));
    ASSIGN_OR_RETURN(const Hash128 id, HashFromBytes(request->request_id()));
    return Encode(store_.Match(caller, request->lease_id(), id, Ids(request->token_ids())), response);
  }());
}

grpc::ServerUnaryReactor* StoreService::Alloc(Context* context, const v1::AllocRequest* request, v1::PagesResponse* response) {
  return Finish(context, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, CallerOf(context));
    ASSIGN_OR_RETURN(const Hash128 id, HashFromBytes(request->request_id()));
    return Encode(store_.Alloc(caller, request->lease_id(), id, request->first_index(), request->count(), request->at_least()), response);
  }());
}

grpc::ServerUnaryReactor* StoreService::Seal(Context* context, const v1::SealRequest* request, v1::SealResponse*) {
  return Finish(context, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, CallerOf(context));
    ASSIGN_OR_RETURN(const Hash128 id, HashFromBytes(request->request_id()));
    return store_.Seal(caller, request->lease_id(), id, Ids(request->indexes()));
  }());
}

grpc::ServerUnaryReactor* StoreService::Offer(Context* context, const v1::StreamRef* request, v1::Empty*) {
  return Finish(context, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, CallerOf(context));
    ASSIGN_OR_RETURN(const Hash128 id, HashFromBytes(request->request_id()));
    return store_.Offer(caller, request->lease_id(), id);
  }());
}

grpc::ServerUnaryReactor* StoreService::Take(Context* context, const v1::StreamRef* request, v1::PagesResponse* response) {
  return Finish(context, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, CallerOf(context));
    ASSIGN_OR_RETURN(const Hash128 id, HashFromBytes(request->request_id()));
    return Encode(store_.Take(caller, request->lease_id(), id), response);
  }());
}

grpc::ServerUnaryReactor* StoreService::Free(Context* context, const v1::FreeRequest* request, v1::Empty*) {
  return Finish(context, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, CallerOf(context));
    ASSIGN_OR_RETURN(const Hash128 id, HashFromBytes(request->request_id()));
    return store_.Free(caller, request->lease_id(), id, request->from_index());
  }());
}

grpc::ServerUnaryReactor* StoreService::MakeRings(Context* context, const v1::MakeRingsRequest* request, v1::MakeRingsResponse* response) {
  return Finish(context, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, CallerOf(context));
    response->set_lease_id(request->lease_id());
    return store_.MakeRings(caller, request->lease_id(), request->slots());
  }());
}

grpc::ServerUnaryReactor* StoreService::JoinGroup(Context* context, const v1::JoinGroupRequest* request, v1::JoinGroupResponse* response) {
  return Finish(context, [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const Caller caller, CallerOf(context));
    if (request->rank() < 0 || request->size() < 0) return absl::InvalidArgumentError("JoinGroup: rank and size are counted from 0");
    ASSIGN_OR_RETURN(const uint64_t id, store_.JoinGroup(caller, request->lease_id(), static_cast<uint32_t>(request->rank()),
                                                         static_cast<uint32_t>(request->size()), request->exchange_bytes()));
    response->set_group_id(id);
    return absl::OkStatus();
  }());
}

grpc::ServerUnaryReactor* StoreService::Status(Context* context, const v1::StoreStatusRequest*, v1::StoreStatus* response) {
  response->set_pid(getpid());
  response->set_uptime_seconds(static_cast<double>(MonotonicNowNs() - started_ns_) * 1e-9);
  response->set_ready_seconds(ready_seconds_);
  FillStatus(store_, response);
  return Finish(context, absl::OkStatus());
}

grpc::ServerWriteReactor<v1::LoadEvent>* StoreService::Load(Context* context, const v1::LoadRequest* request) {
  const std::shared_ptr<LoadReactor> reactor = LoadReactor::Make();
  const absl::StatusOr<Caller> caller = CallerOf(context);
  absl::Status refused = caller.status();
  if (refused.ok() && caller->uid != geteuid() && caller->uid != 0) {
    refused = absl::PermissionDeniedError(
        absl::StrCat("only the store's own user (", geteuid(), ") and root may load a model, this is user ", caller->uid));
  }
  if (refused.ok() && request->model_dir().empty()) refused = absl::InvalidArgumentError("model_dir is empty");
  if (!refused.ok()) {
    reactor->End(refused);
    return reactor.get();
  }
  {
    std::lock_guard lock(mutex_);
    if (stopping_) {
      refused = absl::UnavailableError("the weight store is stopping");
    } else if (load_.has_value()) {
      refused = absl::FailedPreconditionError(absl::StrCat("a load of ", load_->model_dir, " is under way: wait for it"));
    } else {
      load_ = LoadJob{reactor, request->model_dir(), request->replace()};
      wake_.notify_all();
    }
  }
  if (!refused.ok()) reactor->End(refused);
  return reactor.get();
}

void StoreService::RunLoads() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return load_.has_value() || stopping_; });
    if (!load_.has_value()) return;
    const LoadJob job = *load_;
    lock.unlock();
    const absl::Status status = stopping_ ? absl::UnavailableError("the weight store is stopping") : RunLoad(job);
    lock.lock();
    load_.reset();  // before its caller hears of the end, and asks for the next
    lock.unlock();
    job.caller->End(status);
    lock.lock();
  }
}

absl::Status StoreService::RunLoad(const LoadJob& job) {
  LoadRequestOptions options;
  options.model_dir = job.model_dir;
  options.replace = job.replace;
  options.cancelled = [&] { return stopping_.load() || job.caller->cancelled(); };
  options.progress = [&](const LoadState& state) {
    if (state.phase == "ready") return;  // said below, with the generation
    v1::LoadEvent event;
    FillLoadEvent(state, &event);
    job.caller->SendProgress(std::move(event));
  };
  const absl::StatusOr<GenerationPtr> generation = store_.generations().Load(options);
  if (absl::IsCancelled(generation.status()) && stopping_) return absl::UnavailableError("the weight store is stopping");
  RETURN_IF_ERROR(generation.status());
  v1::LoadEvent event;
  event.set_phase("ready");
  event.set_generation(ToBytes((*generation)->id));
  job.caller->SendReady(std::move(event));
  return absl::OkStatus();
}

void StoreService::Stop() {
  std::set<std::shared_ptr<AttachReactor>> streams;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    streams = streams_;
    wake_.notify_all();
  }
  for (const auto& stream : streams) stream->End(absl::UnavailableError("the weight store is stopping; what it holds stays in memory"));
  if (load_thread_.joinable()) load_thread_.join();
}

}  // namespace hearth
