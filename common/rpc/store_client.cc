// The client's own thread keeps the Attach stream; page calls run in their callers' threads over the same connection.
// What the client was given it remembers itself, in the same step in which the caller gets it, and names at each re-attach: so the
// store and the worker agree on every page after any break, and a call whose answer got lost leaves nothing behind.
#include "common/rpc/store_client.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "common/base/logging.h"
#include "common/base/time.h"
#include "common/rpc/attach_stream.h"
#include "common/rpc/rpc.h"

namespace hearth {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kBeat{500};          // the store calls a lease suspect after 2 s: three beats may get lost
constexpr milliseconds kStoreSilent{2000};  // each beat is answered: a store that says nothing for so long is stopped or stuck
constexpr milliseconds kCallDeadline{1000};
constexpr milliseconds kBackOffMin{50};
constexpr milliseconds kBackOffMax{1000};
constexpr milliseconds kGoodbyeWait{300};

// Trying again can't mend these.
bool IsFinal(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsFailedPrecondition(status) || absl::IsPermissionDenied(status) || absl::IsAborted(status) ||
         absl::IsInvalidArgument(status) || absl::IsUnimplemented(status);
}

// The answer is not known: the store may have done it or not.
bool IsAmbiguous(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::INTERNAL: return true;
    default: return false;
  }
}

struct RequestLess {
  bool operator()(const Hash128& a, const Hash128& b) const { return a.high != b.high ? a.high < b.high : a.low < b.low; }
};

class StoreClientImpl final : public StoreClient {
 public:
  explicit StoreClientImpl(StoreClientOptions options) : options_(std::move(options)) {
    away_reason_ = "not attached yet";
    away_since_ = Clock::now();
    thread_ = std::thread([this] { Run(); });
  }

  ~StoreClientImpl() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      for (grpc::ClientContext* context : calls_) context->TryCancel();
      if (stream_ != nullptr) stream_->Wake();
      changed_.notify_all();
    }
    thread_.join();
  }

  StoreView View() const override {
    std::lock_guard lock(mutex_);
    StoreView view = view_;
    view.attached = attached_;
    if (!generation_.IsZero()) view.generation = generation_;
    if (!attached_) view.away_reason = away_reason_;
    return view;
  }

  absl::StatusOr<Hash128> WaitForGeneration(const std::function<bool()>& stopped, int64_t deadline_ns) override {
    std::unique_lock lock(mutex_);
    while (true) {
      if (!generation_.IsZero()) return generation_;
      if (!lost_.ok()) return lost_;
      if (stopping_ || (stopped && stopped())) return absl::CancelledError("stopped while waiting for the weight store");
      if (MonotonicNowNs() >= deadline_ns) {
        return absl::DeadlineExceededError(absl::StrCat("no generation is READY: ", attached_ ? "the store is still loading" : away_reason_));
      }
      changed_.wait_for(lock, milliseconds(50));
    }
  }

  absl::StatusOr<uint64_t> MakeRings(int64_t slots, const std::function<bool()>& stopped) override {
    v1::MakeRingsRequest message;
    message.set_slots(static_cast<int32_t>(slots));
    while (true) {
      v1::MakeRingsResponse response;
      // Memory of gigabytes takes longer than a call may: the store goes on, and says so to whoever asks again.
      const absl::Status status = Call(&v1::Store::Stub::MakeRings, &message, &response, false, [] {});
      if (status.ok()) return response.lease_id();
      if (!absl::IsUnavailable(status)) return status;
      if (stopped()) return absl::CancelledError("stopped while the store made expert rings");
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kBackOffMin);
    }
  }

  absl::StatusOr<uint64_t> JoinGroup(int32_t rank, int32_t size, uint64_t exchange_bytes) override {
    v1::JoinGroupRequest message;
    message.set_rank(rank);
    message.set_size(size);
    message.set_exchange_bytes(exchange_bytes);
    v1::JoinGroupResponse response;
    RETURN_IF_ERROR(Call(&v1::Store::Stub::JoinGroup, &message, &response, false, [] {}));
    return response.group_id();
  }

  absl::StatusOr<int32_t> Peek(const Hash128& generation, const std::vector<int32_t>& token_ids) override {
    v1::PeekRequest request;
    request.set_generation(ToBytes(generation));
    request.mutable_token_ids()->Add(token_ids.begin(), token_ids.end());
    v1::PeekResponse response;
    RETURN_IF_ERROR(Call(&v1::Store::Stub::Peek, &request, &response, false, [] {}));
    return response.tokens();
  }

  absl::StatusOr<std::vector<PageRef>> Match(const Hash128& request, const std::vector<int32_t>& token_ids) override {
    v1::MatchRequest message;
    message.set_request_id(ToBytes(request));
    message.mutable_token_ids()->Add(token_ids.begin(), token_ids.end());
    return PagesCall(&v1::Store::Stub::Match, request, message);
  }

  absl::StatusOr<std::vector<PageRef>> Alloc(const Hash128& request, int32_t first_index, int32_t count, int32_t at_least) override {
    v1::AllocRequest message;
    message.set_request_id(ToBytes(request));
    message.set_first_index(first_index);
    message.set_count(count);
    message.set_at_least(at_least);
    return PagesCall(&v1::Store::Stub::Alloc, request, message);
  }

  absl::StatusOr<std::vector<PageRef>> Take(const Hash128& request) override {
    v1::StreamRef message;
    message.set_request_id(ToBytes(request));
    return PagesCall(&v1::Store::Stub::Take, request, message, [&] { unsure_takes_.insert(request); });
  }

  absl::Status Seal(const Hash128& request, const std::vector<int32_t>& indexes) override {
    v1::SealRequest message;
    message.set_request_id(ToBytes(request));
    message.mutable_indexes()->Add(indexes.begin(), indexes.end());
    v1::SealResponse response;
    // A seal whose answer got lost is repeated or forgotten, neither of which touches what is held.
    return Call(&v1::Store::Stub::Seal, &message, &response, false, [] {});
  }

  absl::Status Offer(const Hash128& request) override {
    v1::StreamRef message;
    message.set_request_id(ToBytes(request));
    v1::Empty response;
    return Call(&v1::Store::Stub::Offer, &message, &response, true, [&] { held_.erase(request); });
  }

  absl::Status Free(const Hash128& request, int32_t from_index) override {
    {
      // The wish alone is enough: if the call does not get through, the next re-attach does not name these pages.
      std::lock_guard lock(mutex_);
      if (auto it = held_.find(request); it != held_.end()) {
        it->second.erase(it->second.lower_bound(from_index), it->second.end());
        if (it->second.empty()) held_.erase(it);
      }
    }
    v1::FreeRequest message;
    message.set_request_id(ToBytes(request));
    message.set_from_index(from_index);
    v1::Empty response;
    return Call(&v1::Store::Stub::Free, &message, &response, true, [] {});
  }

 private:
  template <typename Method, typename Message>
  absl::StatusOr<std::vector<PageRef>> PagesCall(Method method, const Hash128& request, Message& message, const std::function<void()>& unsure = {}) {
    v1::PagesResponse response;
    const auto remember = [&] {
      auto& pages = held_[request];
      for (const v1::PageRow& row : response.rows()) pages[row.index()] = row.page();
      if (pages.empty()) held_.erase(request);
    };
    RETURN_IF_ERROR(Call(method, &message, &response, true, remember, unsure));
    std::vector<PageRef> pages;
    pages.reserve(static_cast<size_t>(response.rows_size()));
    for (const v1::PageRow& row : response.rows()) pages.push_back({row.index(), row.page(), row.sealed()});
    return pages;
  }

  // Waits for the store while it has been away for less than the deadline; later calls of a longer absence fail at once, so that a
  // worker's steps are not stretched. `remember` runs under the mutex, before the caller sees the answer, `unsure` when there
  // was none.
  template <typename Method, typename Message, typename Response, typename Remember>
  absl::Status Call(Method method, Message* message, Response* response, bool changes, const Remember& remember,
                    const std::function<void()>& unsure = {}) {
    std::shared_ptr<AttachStream> stream;
    grpc::ClientContext context;
    const Clock::time_point deadline = Clock::now() + kCallDeadline;
    {
      std::unique_lock lock(mutex_);
      changed_.wait_until(lock, std::min(deadline, away_since_ + kCallDeadline), [this] { return Usable() || stopping_ || !lost_.ok(); });
      if (!lost_.ok()) return lost_;
      if (stopping_) return absl::CancelledError("the store client is stopping");
      if (!Usable()) return absl::UnavailableError(absl::StrCat("weight store: ", attached_ ? "no generation is READY yet" : away_reason_));
      if constexpr (requires { message->set_lease_id(lease_id_); }) message->set_lease_id(lease_id_);
      stream = stream_;
      calls_.insert(&context);
    }
    context.set_deadline(std::chrono::system_clock::now() + (deadline - Clock::now()));
    const grpc::Status status = (stream->stub().*method)(&context, *message, response);
    std::lock_guard lock(mutex_);
    calls_.erase(&context);
    if (status.ok()) {
      remember();
    } else if (changes && IsAmbiguous(status)) {
      if (unsure) unsure();
      if (stream == stream_) {
        settle_ = true;
        stream_->Wake();
      }
    }
    changed_.notify_all();
    if (status.ok()) return absl::OkStatus();
    if (IsAmbiguous(status)) return absl::UnavailableError(absl::StrCat("weight store: ", status.error_message()));
    return FromGrpc(status);
  }

  bool Usable() const { return attached_ && !generation_.IsZero(); }

  void Run() {
    milliseconds back_off = kBackOffMin;
    while (true) {
      bool was_attached = false;
      const absl::Status why = RunSession(&was_attached);
      std::unique_lock lock(mutex_);
      if (stopping_) return;
      if (IsFinal(why)) {
        lost_ = Annotate(why, "the weight store refuses this process");
        away_reason_ = std::string(lost_.message());
        changed_.notify_all();
        lock.unlock();
        if (options_.on_lost) options_.on_lost(lost_);
        return;
      }
      if (auto permit = LogAllowed("store-away", 6)) {
        spdlog::warn("weight store away: {}{}", std::string(why.message()), permit->Note());
      }
      back_off = was_attached ? kBackOffMin : std::min(back_off * 2, kBackOffMax);
      changed_.wait_for(lock, back_off, [this] { return stopping_; });
    }
  }

  v1::AttachRequest MakeHello() {
    v1::AttachRequest request;
    v1::AttachRequest::Hello& hello = *request.mutable_hello();
    hello.set_kind(static_cast<v1::WorkerKind>(options_.kind));
    hello.set_name(options_.name);
    hello.set_numerics(options_.numerics);
    hello.set_attempt(++attempt_);
    hello.set_lease_id(lease_id_);
    if (lease_id_ != 0 && !generation_.IsZero() && options_.kind != ClientKind::kRouter) hello.set_generation(ToBytes(generation_));
    for (const auto& [id, pages] : held_) {
      v1::StreamPages& stream = *hello.add_holds();
      stream.set_request_id(ToBytes(id));
      for (const auto& [index, page] : pages) stream.add_pages(page);
    }
    // Named without a page: its Take had no answer, and the stream must not be lost for whoever goes on with it.
    for (const Hash128& id : unsure_takes_) {
      if (!held_.contains(id)) hello.add_holds()->set_request_id(ToBytes(id));
    }
    return request;
  }

  // From Hello to the end of one connection. Returns why it ended.
  absl::Status RunSession(bool* was_attached) {
    std::shared_ptr<AttachStream> stream;
    {
      // Calls of the last connection are over before what is held is named: none of them can add to it afterwards.
      std::unique_lock lock(mutex_);
      for (grpc::ClientContext* context : calls_) context->TryCancel();
      changed_.wait(lock, [this] { return calls_.empty(); });
      if (stopping_) return absl::CancelledError("stopping");
      settle_ = false;
      stream = std::make_shared<AttachStream>(options_.socket_path, MakeHello());
      stream_ = stream;
    }
    const absl::Status why = Follow(*stream, was_attached);
    std::unique_lock lock(mutex_);
    if (attached_) away_since_ = Clock::now();
    attached_ = false;
    away_reason_ = std::string(why.message());
    stream_ = nullptr;
    changed_.notify_all();
    return why;
  }

  absl::Status Follow(AttachStream& stream, bool* was_attached) {
    Clock::time_point next_beat = Clock::now() + kBeat;
    Clock::time_point heard = Clock::now();
    while (true) {
      const std::optional<v1::AttachEvent> event = stream.Next(next_beat);
      const Clock::time_point now = Clock::now();
      // Woken far too late: it was this process that stood still, and the store may have answered all the while.
      if (now > next_beat + kBeat) heard = now;
      if (event) {
        heard = now;
        RETURN_IF_ERROR(Handle(*event));
        *was_attached = true;
      } else if (stream.closed()) {
        const absl::Status status = FromGrpc(stream.Close());
        return status.ok() ? absl::UnavailableError("the store ended the stream") : status;
      }
      bool stopping, settle;
      {
        std::lock_guard lock(mutex_);
        stopping = stopping_;
        settle = settle_;
      }
      if (stopping) {
        stream.SendGoodbye();
        const Clock::time_point until = now + kGoodbyeWait;
        while (!stream.closed() && Clock::now() < until) stream.Next(until);
        stream.Close();
        return absl::CancelledError("stopping");
      }
      if (settle) {
        stream.Close();
        return absl::UnavailableError("a call had no answer: attaching anew to settle what it did");
      }
      if (now - heard > kStoreSilent) {
        stream.Close();
        return absl::UnavailableError("the store is connected and does not answer: stopped, or overloaded");
      }
      if (now >= next_beat) {
        stream.SendBeat();
        next_beat = now + kBeat;
      }
    }
  }

  absl::Status Handle(const v1::AttachEvent& event) {
    std::unique_lock lock(mutex_);
    const bool router = options_.kind == ClientKind::kRouter;
    std::optional<Hash128> switch_to;
    switch (event.event_case()) {
      case v1::AttachEvent::kWelcome: {
        const v1::AttachEvent::Welcome& welcome = event.welcome();
        lease_id_ = welcome.lease_id();
        unsure_takes_.clear();  // settled; calls of this connection begin after it
        view_.place = RegionPlace{welcome.shm_dir(), welcome.node()};
        if (welcome.has_loading()) SetLoading(welcome.loading());
        if (welcome.has_generation()) {
          const Hash128 before = generation_;
          RETURN_IF_ERROR(SetReady(welcome.generation()));
          if (router && !before.IsZero() && generation_ != before) switch_to = generation_;
        }
        attached_ = true;
        break;
      }
      case v1::AttachEvent::kGenerationReady: {
        RETURN_IF_ERROR(SetReady(event.generation_ready().generation()));
        break;
      }
      case v1::AttachEvent::kSwitch: {
        switch_to = Hash128{};
        if (event.switch_().has_generation()) {
          ASSIGN_OR_RETURN(switch_to, HashFromBytes(event.switch_().generation().id()));
          if (router) RETURN_IF_ERROR(SetReady(event.switch_().generation()));  // it maps nothing and follows at once
        }
        break;
      }
      case v1::AttachEvent::kLoading: SetLoading(event.loading()); break;
      case v1::AttachEvent::kBeat:
      case v1::AttachEvent::EVENT_NOT_SET: break;
    }
    changed_.notify_all();
    lock.unlock();
    if (switch_to && options_.on_switch) options_.on_switch(*switch_to);
    return absl::OkStatus();
  }

  absl::Status SetReady(const v1::Generation& generation) {
    ASSIGN_OR_RETURN(generation_, HashFromBytes(generation.id()));
    ASSIGN_OR_RETURN(view_.fingerprint, HashFromBytes(generation.fingerprint()));
    view_.model_dir = generation.model_dir();
    view_.kv_tokens = generation.kv_tokens();
    view_.load_fraction = 1;
    view_.load_eta_seconds = 0;
    view_.phase = "ready";
    return absl::OkStatus();
  }

  void SetLoading(const v1::LoadEvent& loading) {
    view_.phase = loading.phase();
    view_.load_fraction = loading.total_bytes() == 0 ? 0 : static_cast<double>(loading.done_bytes()) / static_cast<double>(loading.total_bytes());
    view_.load_eta_seconds = loading.eta_seconds();
  }

  const StoreClientOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool attached_ = false;
  bool settle_ = false;  // attach anew: a call ended without an answer
  absl::Status lost_;
  std::string away_reason_;
  Clock::time_point away_since_;
  uint64_t lease_id_ = 0;
  uint64_t attempt_ = 0;
  Hash128 generation_;
  StoreView view_;
  std::map<Hash128, std::map<int32_t, int32_t>, RequestLess> held_;  // request -> index -> page
  std::set<Hash128, RequestLess> unsure_takes_;
  std::set<grpc::ClientContext*> calls_;
  std::shared_ptr<AttachStream> stream_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<StoreClient> StoreClient::Start(StoreClientOptions options) { return std::make_unique<StoreClientImpl>(std::move(options)); }

}  // namespace hearth
