#include "services/router/node_trace.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/rpc/rpc.h"

namespace hearth::router {
namespace {

constexpr auto kLook = std::chrono::milliseconds(50);
constexpr auto kAskAgain = std::chrono::milliseconds(200);  // of a process that is away
constexpr auto kSilent = std::chrono::seconds(2);           // that a process may be at the end, while there is something left

void Fill(const Stream& stream, v1::TraceChunk::Stream* out) {
  out->set_request_id(stream.request->id);
  out->set_choice(stream.choice);
  out->set_id(ToBytes(stream.id));
  for (const StateChange& change : stream.events) {
    v1::TraceChunk::Stream::State& state = *out->add_states();
    state.set_name(StreamStateName(change.state));
    state.set_at_ns(change.at_ns);
  }
  out->set_first_token_ns(stream.first_token_ns);
  out->set_prompt_tokens(static_cast<int32_t>(stream.prompt_ids->size()));
  out->set_cached_tokens(stream.cached_tokens.value_or(0));
  out->set_output_tokens(static_cast<int32_t>(stream.output_ids.size()));
}

// What the threads of a call share. Chunks are written one at a time.
class Gathered {
 public:
  explicit Gathered(TraceStream* out) : out_(out) {}

  void Write(const v1::TraceChunk& chunk) {
    std::lock_guard lock(mutex_);
    if (!broken_) broken_ = !out_->Write(chunk);
  }
  void Note(const std::string& text) {
    v1::TraceChunk chunk;
    chunk.set_note(text);
    Write(chunk);
  }
  bool broken() const {
    std::lock_guard lock(mutex_);
    return broken_;
  }

 private:
  mutable std::mutex mutex_;
  TraceStream* const out_;
  bool broken_ = false;  // the caller is gone
};

// Streams that have ended, from the loop, which must not wait for a caller that does not read.
class EndedStreams {
 public:
  void Add(const Stream& stream, bool was_wanted) {
    std::lock_guard lock(mutex_);
    Fill(stream, chunk_.add_streams());
    chunk_.set_ended(chunk_.ended() || was_wanted);
  }
  v1::TraceChunk Take() {
    std::lock_guard lock(mutex_);
    return std::exchange(chunk_, {});
  }

 private:
  std::mutex mutex_;
  v1::TraceChunk chunk_;
};

// Follows one process: asks it, hands over what it sends, and asks again when it has gone away and come back.
class Follower {
 public:
  Follower(const NodeTrace::Peer& peer, v1::TraceRequest request, Gathered* gathered)
      : peer_(peer), request_(std::move(request)), gathered_(gathered), thread_([this] { Run(); }) {}

  // Once. The process is asked for what is left, and not followed any more.
  void AskForTheRest() {
    std::lock_guard lock(mutex_);
    ending_ = true;
    heard_ = Clock::now();
    changed_.notify_all();
    HalfClose();
  }
  // Once, after it: returns when what is left has been handed over, or the process has been silent for so long.
  void End(std::chrono::nanoseconds silent_max) {
    {
      std::unique_lock lock(mutex_);
      while (!ended_ && !overdue_) {
        const auto silent_until = heard_ + silent_max;
        if (changed_.wait_until(lock, silent_until, [&] { return ended_ || heard_ + silent_max > silent_until; })) continue;
        overdue_ = true;
        if (context_ != nullptr) context_->TryCancel();
      }
    }
    thread_.join();
  }

 private:
  // Under the lock. Where the call's first message is still being written, whoever writes it half-closes after that.
  void HalfClose() {
    if (call_ != nullptr && std::exchange(may_half_close_, false)) call_->WritesDone();
  }

  void Run() {
    std::unique_lock lock(mutex_);
    while (!ending_) {
      lock.unlock();
      const absl::Status status = Follow();
      lock.lock();
      const bool was_there = std::exchange(was_there_, false);
      if (overdue_) {
        gathered_->Note(absl::StrCat(peer_.name, " does not answer: its last spans are missing"));
      } else if (!status.ok() && was_there) {
        gathered_->Note(absl::StrCat(peer_.name, " went away (", status.ToString(), "): spans that it had not sent are missing"));
      } else if (!status.ok() && !std::exchange(said_away_, true)) {
        gathered_->Note(absl::StrCat(peer_.name, " is not there (", status.ToString(), ")"));
      }
      changed_.wait_for(lock, kAskAgain, [this] { return ending_; });
    }
    ended_ = true;
    changed_.notify_all();
  }

  absl::Status Follow() {
    const std::unique_ptr<v1::Trace::Stub> stub = v1::Trace::NewStub(UnixChannel(peer_.socket_path));
    grpc::ClientContext context;
    const std::unique_ptr<grpc::ClientReaderWriter<v1::TraceRequest, v1::TraceChunk>> call = stub->Record(&context);
    {
      std::lock_guard lock(mutex_);
      context_ = &context;
      call_ = call.get();
    }
    call->Write(request_);  // waits for a process that has stopped
    {
      std::lock_guard lock(mutex_);
      may_half_close_ = true;
      if (ending_) HalfClose();
    }
    for (v1::TraceChunk chunk; call->Read(&chunk);) {
      {
        std::lock_guard lock(mutex_);
        was_there_ = said_away_ = true;
        heard_ = Clock::now();
        changed_.notify_all();
        if (chunk.ended()) HalfClose();
      }
      chunk.clear_ended();
      gathered_->Write(chunk);
    }
    std::lock_guard lock(mutex_);
    may_half_close_ = false;
    context_ = nullptr;
    call_ = nullptr;
    return FromGrpc(call->Finish());
  }

  const NodeTrace::Peer& peer_;
  const v1::TraceRequest request_;
  Gathered* const gathered_;
  using Clock = std::chrono::steady_clock;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  Clock::time_point heard_;  // the last chunk, or the question for the rest
  bool ending_ = false, ended_ = false, overdue_ = false;
  bool may_half_close_ = false;  // the open call: its one message is written
  bool was_there_ = false, said_away_ = false;
  grpc::ClientContext* context_ = nullptr;  // while a call is open
  grpc::ClientReaderWriter<v1::TraceRequest, v1::TraceChunk>* call_ = nullptr;
  std::thread thread_;  // last: it uses the others
};

void OnLoop(EventLoop* loop, const std::function<void()>& work) {
  std::promise<void> done;
  loop->Post([&] {
    work();
    done.set_value();
  });
  done.get_future().wait();
}

}  // namespace

grpc::Status NodeTrace::Record(grpc::ServerContext* context, TraceStream* out) {
  v1::TraceRequest request;
  if (!out->Read(&request)) return {grpc::StatusCode::INVALID_ARGUMENT, "the caller says nothing: the first message is what to record"};
  if (stopping_.load()) return {grpc::StatusCode::UNAVAILABLE, "the router is stopping"};
  Gathered gathered(out);
  const auto ended = std::make_shared<EndedStreams>();
  std::shared_ptr<void> watch;
  absl::Status found;
  OnLoop(loop_, [&] {
    found = request.request_id().empty() ? absl::OkStatus() : scheduler_->IsRunning(request.request_id());
    if (!found.ok()) return;
    watch = scheduler_->WatchEnds([ended, wanted = request.request_id()](const Stream& stream) {
      ended->Add(stream, !wanted.empty() && stream.request->id == wanted && stream.request->ended());
    });
  });
  if (!found.ok()) return ToGrpc(found);

  v1::TraceRequest of_peers;
  of_peers.set_ops(request.ops());
  std::vector<std::unique_ptr<Follower>> followers;
  for (const Peer& peer : peers_) followers.push_back(std::make_unique<Follower>(peer, of_peers, &gathered));
  CallersEnd end(out);
  const auto tell_ended = [&] {
    if (const v1::TraceChunk chunk = ended->Take(); chunk.streams_size() > 0) gathered.Write(chunk);
  };
  while (!end.come() && !stopping_.load() && !gathered.broken()) {
    std::this_thread::sleep_for(kLook);
    tell_ended();
  }
  const bool wanted = end.come() && !gathered.broken();
  end.CutOff(context);

  for (const auto& follower : followers) follower->AskForTheRest();
  for (const auto& follower : followers) follower->End(wanted ? kSilent : std::chrono::seconds(0));
  OnLoop(loop_, [&] {
    watch.reset();
    scheduler_->ForEachStream([&](const Stream& stream) {
      if (!IsEnd(stream.state)) ended->Add(stream, false);  // as far as it has come
    });
  });
  tell_ended();
  return stopping_.load() ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "the router is stopping") : grpc::Status::OK;
}

}  // namespace hearth::router
