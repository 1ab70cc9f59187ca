#include "services/prefill/prefill_group.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/logging.h"
#include "common/base/process.h"
#include "common/device/host/shm_collectives.h"
#include "services/prefill/pass_message.h"

namespace hearth {
namespace {

constexpr int64_t kAskNs = 500'000'000;         // the store, while the group is not whole
constexpr int64_t kListenNs = 200'000'000;      // so often a group that nobody calls looks whether its ranks live
constexpr uint64_t kMessageBytesMax = 1 << 30;  // far above what a context's tokens and pages take
constexpr int64_t kOutLookNs = 2'000'000;
// A rank leaves a pass that has ended within the time of one expert. One that does not is stopped (a debugger, SIGSTOP) while it may write, and only its
// end, or ours, frees the pages.
constexpr int64_t kOutWaitNs = 20'000'000'000;

}  // namespace

bool PrefillGroup::Joined::IsWhole() const {
  for (size_t rank = 0; rank < watches.size(); ++rank) {
    if (watches[rank]->Exited() || region->state(rank) == RankState::kLeft) return false;
  }
  return true;
}

PrefillGroup::PrefillGroup(Device& device, const Model& model, StoreClient& store, Options options)
    : device_(device), model_(model), store_(store), options_(options), signal_(device.MakeSignal()) {
  view_.rank = options.rank;
  view_.size = options.size;
}

PrefillGroup::~PrefillGroup() { Leave(); }

void PrefillGroup::Start(std::function<void()> wake) {
  wake_ = std::move(wake);
  listener_ = device_.Spawn("prefill-group", [this] { Listen(); });
}

void PrefillGroup::Leave() {
  stop_.Stop();
  signal_->Notify();
  listener_.reset();
  std::lock_guard lock(mutex_);
  if (found_ != nullptr) found_->region->SetState(static_cast<size_t>(options_.rank), RankState::kLeft);
  joined_.reset();
  found_.reset();
}

PrefillGroup::View PrefillGroup::Look() const {
  std::lock_guard lock(mutex_);
  return view_;
}

// ---- The listener ----

void PrefillGroup::Listen() {
  uint32_t calls = 0;
  while (!stop_.stopped()) {
    std::shared_ptr<Joined> found;
    {
      std::lock_guard lock(mutex_);
      found = found_;
    }
    const uint64_t seen = signal_->Current();
    if (found == nullptr) {
      if (Join().ok()) {
        wake_();
        continue;
      }
      device_.HostWait(*signal_, seen, {.deadline_ns = device_.Now() + kAskNs, .stop = &stop_});
    } else if (!found->IsWhole()) {
      // The loop lets go of it, once no pass of its own uses it.
      wake_();
      device_.HostWait(*signal_, seen, {.deadline_ns = device_.Now() + kListenNs, .stop = &stop_});
    } else {
      const uint32_t now = found->collectives->AwaitCall(calls, kListenNs);
      if (std::exchange(calls, now) != now) wake_();
    }
  }
}

absl::Status PrefillGroup::Join() {
  const absl::StatusOr<uint64_t> id = store_.JoinGroup(static_cast<int32_t>(options_.rank), static_cast<int32_t>(options_.size),
                                                       ShmCollectivesBytes(static_cast<int>(options_.size)));
  const auto join = [&]() -> absl::StatusOr<std::shared_ptr<Joined>> {
    RETURN_IF_ERROR(id.status());
    // A rank has said that it leaves, and the store has not seen it go.
    if (*id == last_id_) return absl::UnavailableError("the former group is ending");
    const StoreView view = store_.View();
    if (!view.generation.has_value()) return absl::UnavailableError(view.away_reason);
    auto joined = std::make_shared<Joined>();
    ASSIGN_OR_RETURN(joined->region, GroupRegion::Open(view.place, *view.generation, *id));
    for (const GroupMember& member : joined->region->spec().members) joined->watches.push_back(std::make_unique<ProcessWatch>(member.process));
    ASSIGN_OR_RETURN(
        joined->collectives,
        JoinShmCollectives({.rank = static_cast<int>(options_.rank), .size = static_cast<int>(options_.size), .memory = joined->region->exchange()}));
    return joined;
  };
  absl::StatusOr<std::shared_ptr<Joined>> joined = join();
  if (joined.ok()) last_id_ = *id;
  std::lock_guard lock(mutex_);
  view_.waits_for = joined.ok() ? "" : std::string(joined.status().message());
  if (!joined.ok()) {
    // Not there yet, or the store is away: both pass. Whatever else it is will be in `status`, and is said once a minute.
    if (!absl::IsUnavailable(joined.status())) {
      if (auto permit = LogAllowed("prefill-group", 1)) spdlog::warn("prefill group: {}{}", joined.status().ToString(), permit->Note());
    }
    return joined.status();
  }
  found_ = *std::move(joined);
  view_.id = *id;
  return absl::OkStatus();
}

// ---- The loop ----

absl::Status PrefillGroup::Refresh(SlpEngine& engine) {
  std::unique_lock lock(mutex_);
  if (found_ != nullptr && !found_->IsWhole()) {
    spdlog::info("the prefill group is whole no more: prompts are computed alone until its ranks are back");
    if (joined_ != nullptr) RETURN_IF_ERROR(engine.SetGroup(nullptr));
    joined_.reset();
    found_.reset();
    view_.id = 0;
    view_.waits_for = "a rank is gone";
    lock.unlock();
    signal_->Notify();
    return absl::OkStatus();
  }
  if (found_ == nullptr || joined_ == found_) return absl::OkStatus();
  RETURN_IF_ERROR(engine.SetGroup(found_->collectives.get()));
  joined_ = found_;
  spdlog::info("rank {} of a prefill group of {}", options_.rank, options_.size);
  return absl::OkStatus();
}

// From here on the store gives what rank 0 holds to nobody, whatever becomes of rank 0; but only if it lived when that had been said.
absl::Status PrefillGroup::Enter() {
  joined_->region->SetState(static_cast<size_t>(options_.rank), RankState::kComputing);
  if (joined_->IsWhole()) return absl::OkStatus();
  joined_->region->SetState(static_cast<size_t>(options_.rank), RankState::kIdle);
  return absl::UnavailableError("a rank of the prefill group is gone or stopping");
}

void PrefillGroup::Exit(const absl::Status& status) {
  joined_->region->SetState(static_cast<size_t>(options_.rank), RankState::kIdle);
  CountTraffic();
  std::lock_guard lock(mutex_);
  ++view_.passes;
  if (!status.ok()) ++view_.passes_failed;
}

// Of the collectives' last pass.
void PrefillGroup::CountTraffic() {
  std::lock_guard lock(mutex_);
  for (const Traffic& sent : joined_->collectives->traffic()) {
    auto total = std::find_if(view_.traffic.begin(), view_.traffic.end(), [&](const Traffic& t) { return t.name == sent.name; });
    if (total == view_.traffic.end()) total = view_.traffic.insert(total, {.name = sent.name});
    total->calls += sent.calls;
    total->bytes += sent.bytes;
  }
}

absl::Status PrefillGroup::Call(std::vector<uint8_t>& message, const std::function<bool()>& wanted) {
  Collectives& group = *joined_->collectives;
  const StopToken never;
  const bool leads = options_.rank == 0;
  const std::unique_ptr<Stream> stream = device_.MakeStream("group call");
  absl::Status status = group.Begin(never, [&] { return (!wanted || wanted()) && joined_->IsWhole(); });
  if (status.ok()) {
    std::vector<uint64_t> bytes(static_cast<size_t>(options_.size), 0);
    uint64_t size = message.size();
    bytes[0] = sizeof(size);
    group.AllGather(*stream, {.name = "call", .data = &size, .bytes = bytes.data(), .steers = true});
    status = stream->status();
    if (status.ok() && size > kMessageBytesMax) status = absl::DataLossError(absl::StrCat("a call of ", size, " bytes"));
    if (status.ok() && !leads) message.resize(size);
    bytes[0] = size;
    if (status.ok()) group.AllGather(*stream, {.name = "call", .data = message.data(), .bytes = bytes.data(), .steers = true});
    if (status.ok()) status = stream->Synchronize();
  }
  group.End(status);
  if (!status.ok()) {
    group.End(status);  // of the work that it called for
    return status;
  }
  CountTraffic();
  return absl::OkStatus();
}

absl::Status PrefillGroup::Lead(SlpEngine& engine, const KvPool& kv, const ForwardBatch& batch, const SlpHooks& hooks) {
  RETURN_IF_ERROR(Enter());
  std::vector<uint8_t> message = EncodePass(batch, model_.config().hidden_size);
  absl::Status status = Call(message, hooks.wanted);
  if (status.ok()) status = engine.RunShared(kv, batch, nullptr, hooks);
  if (!status.ok()) AwaitOthersOut();
  Exit(status);
  if (status.ok() || absl::IsCancelled(status) || absl::IsInvalidArgument(status)) return status;
  return absl::UnavailableError(absl::StrCat("the shared pass has ended: ", status.message()));
}

absl::Status PrefillGroup::Follow(SlpEngine& engine, const KvPool& kv, const std::function<bool()>& wanted) {
  RETURN_IF_ERROR(Enter());
  std::vector<uint8_t> bytes;
  absl::Status status = Call(bytes, wanted);
  if (status.ok()) {
    const absl::StatusOr<PassMessage> message = DecodePass(bytes, model_.config().hidden_size);
    if (message.ok()) {
      status = engine.RunShared(kv, message->batch, nullptr, {.on_layer_done = [&](int64_t) { return wanted(); }, .wanted = wanted});
    } else {
      status = message.status();
      joined_->collectives->End(status);
    }
  }
  Exit(status);
  return status;
}

void PrefillGroup::AwaitOthersOut() {
  const std::unique_ptr<HostSignal> pause = device_.MakeSignal();
  const int64_t deadline_ns = device_.Now() + kOutWaitNs;
  for (size_t rank = 1; rank < joined_->watches.size(); ++rank) {
    while (joined_->region->state(rank) == RankState::kComputing && !joined_->watches[rank]->Exited()) {
      if (device_.Now() > deadline_ns) {
        // The store knows what a process that has exited may have left writing, and gives the pages to nobody before it.
        spdlog::critical("rank {} of the prefill group (process {}) does not leave a pass that has ended: ending, so that the store sees to it", rank,
                         joined_->region->spec().members[rank].process.pid);
        spdlog::default_logger()->flush();
        _exit(kExitFailure);
      }
      device_.HostWait(*pause, pause->Current(), {.deadline_ns = device_.Now() + kOutLookNs});
    }
  }
}

}  // namespace hearth
