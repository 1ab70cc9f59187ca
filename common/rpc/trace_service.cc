#include "common/rpc/trace_service.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <thread>

namespace hearth {
namespace {

constexpr size_t kSpansAtOnce = 8192;  // 512 KB a message
constexpr int kLooksForEnd = 10;       // for the caller's half-close, when this process stops
constexpr size_t kWords = sizeof(TraceRecord) / sizeof(uint64_t);

}  // namespace

TraceEncoder::TraceEncoder(std::string process, TraceLevel level) : process_(std::move(process)), reader_(level) {
  kept_.reserve(kTraceSpansKept);  // of memory that costs nothing before it is used
}

void TraceEncoder::AddName(const char* text, v1::TraceChunk& chunk) {
  if (text == nullptr || !named_.insert(text).second) return;
  v1::TraceChunk::Name& name = *chunk.add_names();
  name.set_id(reinterpret_cast<uintptr_t>(text));
  name.set_text(text);
}

bool TraceEncoder::Send(size_t spans_max, const std::function<bool(const v1::TraceChunk&)>& send) {
  lost_ += reader_.Take(kept_);
  const size_t until = sent_ + std::min(spans_max, num_kept());
  while (sent_ < until || lost_ > 0) {
    v1::TraceChunk chunk;
    chunk.set_process(process_);
    chunk.set_pid(getpid());
    chunk.set_lost(std::exchange(lost_, 0));
    for (const std::string& track : TraceReader::TracksFrom(tracks_)) {
      v1::TraceChunk::Name& name = *chunk.add_tracks();
      name.set_id(tracks_++);
      name.set_text(track);
    }
    const size_t end = std::min(sent_ + kSpansAtOnce, until);
    chunk.mutable_spans()->Reserve(static_cast<int>((end - sent_) * kWords));
    for (; sent_ < end; ++sent_) {
      const TraceRecord& record = kept_[sent_];
      AddName(record.name, chunk);
      AddName(record.keys, chunk);
      const auto words = std::bit_cast<std::array<uint64_t, kWords>>(record);
      chunk.mutable_spans()->Add(words.begin(), words.end());
    }
    if (!send(chunk)) return false;
  }
  if (sent_ == kept_.size()) {
    kept_.clear();
    sent_ = 0;
  }
  return true;
}

grpc::Status TraceService::Record(grpc::ServerContext* context, TraceStream* stream) {
  v1::TraceRequest request;
  if (!stream->Read(&request)) return {grpc::StatusCode::INVALID_ARGUMENT, "the caller says nothing: the first message is what to record"};
  TraceEncoder encoder(process_, request.ops() ? TraceLevel::kOps : TraceLevel::kPhases);
  CallersEnd end(stream);
  const auto send = [&](const v1::TraceChunk& chunk) { return stream->Write(chunk); };
  bool sound = true;
  while (sound && !end.come() && !stopping_.load()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(kTracePeriodMs));
    sound = encoder.Send(encoder.num_kept() < kTraceSpansKept ? kTraceSpansAPeriod : SIZE_MAX, send);
  }
  if (sound && !end.come()) {
    v1::TraceChunk last;
    last.set_ended(true);
    send(last);
    for (int looks = 0; looks < kLooksForEnd && !end.come(); ++looks) std::this_thread::sleep_for(std::chrono::milliseconds(kTracePeriodMs));
  }
  end.CutOff(context);
  if (sound) encoder.Send(SIZE_MAX, send);
  return grpc::Status::OK;
}

}  // namespace hearth
