#include "tests/recording_device.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/device/op_cost.h"
#include "common/device/ops.h"

namespace hearth {
namespace {

constexpr int64_t kNever = INT64_MAX;

// Who runs, and what time it is. One actor holds the baton; the next is the one with the least (wake time, id). When all wait, time jumps to the
// earliest deadline. An actor whose wait was answered by Notify wakes at the notifier's time.
class Baton {
 public:
  Baton() { actors_.push_back({}); }  // actor 0: the thread that made the device

  int64_t now() const { return now_; }  // read by the holder only
  void Advance(int64_t ns) { now_ += ns; }
  int current() const { return current_; }

  int Add() {
    std::lock_guard<std::mutex> lock(mutex_);
    actors_.push_back({.wake_ns = now_});
    return static_cast<int>(actors_.size()) - 1;
  }
  // First thing a new thread does.
  void AwaitTurn(int actor) {
    std::unique_lock<std::mutex> lock(mutex_);
    turn_.wait(lock, [&] { return current_ == actor; });
  }
  // Lets others run until `ready` holds or the clock reaches deadline_ns; ready is asked by whoever passes the baton.
  void Sleep(std::function<bool()> ready, int64_t deadline_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int actor = current_;
    actors_[static_cast<size_t>(actor)].ready = std::move(ready);
    actors_[static_cast<size_t>(actor)].wake_ns = deadline_ns;
    Pass();
    turn_.wait(lock, [&] { return current_ == actor; });
    actors_[static_cast<size_t>(actor)].ready = nullptr;
  }
  void End(int actor) {
    std::lock_guard<std::mutex> lock(mutex_);
    actors_[static_cast<size_t>(actor)].ended = true;
    Pass();
  }
  bool ended(int actor) const { return actors_[static_cast<size_t>(actor)].ended; }

 private:
  struct State {
    std::function<bool()> ready;  // null: runnable at wake_ns
    int64_t wake_ns = 0;
    bool ended = false;
  };

  void Pass() {
    int next = -1;
    int64_t next_ns = kNever;
    for (size_t i = 0; i < actors_.size(); ++i) {
      const State& state = actors_[i];
      if (state.ended) continue;
      const int64_t at = state.ready && state.ready() ? now_ : std::max(state.wake_ns, now_);
      if (state.wake_ns == kNever && at == kNever) continue;
      if (at < next_ns) {
        next_ns = at;
        next = static_cast<int>(i);
      }
    }
    // Everybody waits for somebody without a deadline: a real device would hang here.
    HEARTH_CHECK(next >= 0 && "all actors wait for ever");
    now_ = next_ns;
    current_ = next;
    turn_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable turn_;
  std::deque<State> actors_;
  int current_ = 0;
  int64_t now_ = 0;
};

class RecordingStream : public Stream {
 public:
  explicit RecordingStream(std::string name) : name_(std::move(name)) {}
  std::string_view name() const override { return name_; }
  absl::Status Synchronize() override { return status_; }
  absl::Status status() const override { return status_; }
  void Fail(const absl::Status& status) { status_ = status; }

 private:
  std::string name_;
  absl::Status status_;
};

class RecordingEvent : public Event {
 public:
  void Record(Stream&) override {}
  void Wait(Stream&) override {}
  bool Query() const override { return true; }
};

class RecordingSignal : public HostSignal {
 public:
  uint64_t Current() const override { return count_; }
  void Notify() override { ++count_; }  // by the holder of the baton

 private:
  uint64_t count_ = 0;
};

class RecordingActor : public Actor {
 public:
  RecordingActor(Baton& baton, std::function<void()> body) : baton_(baton), id_(baton.Add()) {
    thread_ = std::thread([this, body = std::move(body)] {
      baton_.AwaitTurn(id_);
      body();
      baton_.End(id_);
    });
  }
  ~RecordingActor() override {
    if (!baton_.ended(id_)) baton_.Sleep([this] { return baton_.ended(id_); }, kNever);
    thread_.join();
  }

 private:
  Baton& baton_;
  const int id_;
  std::thread thread_;
};

class RecordingOps : public Ops {
 public:
  RecordingOps(Baton& baton, const RecordingOptions& options) : baton_(baton), options_(options), random_(options.seed) {}

  const std::vector<std::string>& lines() const { return lines_; }

  void Embed(Stream& s, const EmbedArgs& a) override { Add(s, "embed", absl::StrCat("m=", a.m, " n=", a.table.cols), CostOf(a)); }
  void RmsNorm(Stream& s, const RmsNormArgs& a) override { Add(s, "rms_norm", absl::StrCat("m=", a.m, " n=", a.n), CostOf(a)); }
  void Linear(Stream& s, const LinearArgs& a) override {
    Add(s, "linear", absl::StrCat("m=", a.m, " n=", a.w.rows, " k=", a.w.cols, " ", Sv(DTypeName(a.w.dtype))), CostOf(a));
  }
  void ToBf16(Stream& s, const ToBf16Args& a) override { Add(s, "to_bf16", absl::StrCat("n=", a.n), CostOf(a)); }
  void SiluMul(Stream& s, const SiluMulArgs& a) override { Add(s, "silu_mul", absl::StrCat("m=", a.m, " n=", a.n), CostOf(a)); }
  void Add(Stream& s, const AddArgs& a) override { Add(s, "add", absl::StrCat("n=", a.n), CostOf(a)); }
  void AddGated(Stream& s, const AddGatedArgs& a) override { Add(s, "add_gated", absl::StrCat("m=", a.m, " n=", a.n), CostOf(a)); }
  void AddRows(Stream& s, const AddRowsArgs& a) override { Add(s, "add_rows", absl::StrCat("m=", a.m, " n=", a.n), CostOf(a)); }
  void GatherRows(Stream& s, const GatherRowsArgs& a) override { Add(s, "gather_rows", absl::StrCat("m=", a.m, " n=", a.n), CostOf(a)); }
  void MlaWriteKv(Stream& s, const MlaWriteKvArgs& a) override {
    Add(s, "mla_write_kv", absl::StrCat("layer=", a.layer, " ", Rows(a.sequences, a.num_sequences)), CostOf(a));
  }
  void MlaRopeQuery(Stream& s, const MlaRopeQueryArgs& a) override {
    Add(s, "mla_rope_query", absl::StrCat("heads=", a.heads, " ", Rows(a.sequences, a.num_sequences)), CostOf(a));
  }
  void MlaAttention(Stream& s, const MlaAttentionArgs& a) override {
    Add(s, "mla_attention", absl::StrCat(FormName(a.form), " layer=", a.layer, " heads=", a.heads, " ", Rows(a.sequences, a.num_sequences)),
        CostOf(a));
  }
  void GqaRotateQuery(Stream& s, const GqaRotateQueryArgs& a) override {
    Add(s, "gqa_rotate_query", absl::StrCat("heads=", a.heads, " ", Rows(a.sequences, a.num_sequences)), CostOf(a));
  }
  void GqaWriteKv(Stream& s, const GqaWriteKvArgs& a) override {
    Add(s, "gqa_write_kv", absl::StrCat("layer=", a.layer, " ", Rows(a.sequences, a.num_sequences)), CostOf(a));
  }
  void GqaAttention(Stream& s, const GqaAttentionArgs& a) override {
    Add(s, "gqa_attention", absl::StrCat("layer=", a.layer, " heads=", a.heads, "/", a.kv_heads, " ", Rows(a.sequences, a.num_sequences)), CostOf(a));
  }
  // The one op whose result steers what comes after: ids are drawn from the seed, ascending, with even weights.
  void Gate(Stream& s, const GateArgs& a) override {
    std::vector<int32_t> all(static_cast<size_t>(a.params.num_experts));
    std::string ids;
    for (int64_t token = 0; token < a.m; ++token) {
      for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(e);
      for (size_t j = 0; j < static_cast<size_t>(a.params.top_k); ++j) std::swap(all[j], all[j + random_() % (all.size() - j)]);
      std::sort(all.begin(), all.begin() + a.params.top_k);
      for (int64_t j = 0; j < a.params.top_k; ++j) {
        a.ids[token * a.params.top_k + j] = all[static_cast<size_t>(j)];
        a.weights[token * a.params.top_k + j] = 1.0f / static_cast<float>(a.params.top_k);
        absl::StrAppend(&ids, ids.empty() ? "" : ",", all[static_cast<size_t>(j)]);
      }
    }
    Add(s, "gate", absl::StrCat("m=", a.m, " experts=", a.params.num_experts, " chosen=", ids), CostOf(a));
  }
  void Experts(Stream& s, const ExpertsArgs& a) override {
    Add(s, "experts",
        absl::StrCat(FormName(a.form), " layer=", a.layer, " m=", a.m, " top_k=", a.top_k, " of ", a.num_experts, " shards=", a.num_shards),
        CostOf(a));
  }
  void ExpertRows(Stream& s, const ExpertRowsArgs& a) override {
    Add(s, "expert_rows", absl::StrCat("n=", a.n, " shards=", a.num_shards), CostOf(a));
  }
  void Clear(Stream& s, const ClearArgs& a) override { Add(s, "clear", absl::StrCat("n=", a.n), CostOf(a)); }
  // Nothing is copied: nobody reads it.
  void ToDevice(Stream& s, const ToDeviceArgs& a) override { Add(s, "to_device", absl::StrCat("bytes=", a.bytes), CostOf(a)); }
  // Zeros: who asked for a result gets one of the right size.
  void ToHost(Stream& s, const ToHostArgs& a) override {
    std::memcpy(a.host, a.device, a.bytes);
    Add(s, "to_host", absl::StrCat("bytes=", a.bytes), CostOf(a));
  }

 private:
  static const char* FormName(Form form) { return form == Form::kPrefill ? "prefill" : "decode"; }
  static std::string Rows(const KvSequence* sequences, int64_t count) {
    std::string text = "rows=";
    for (int64_t i = 0; i < count; ++i) absl::StrAppend(&text, i > 0 ? "," : "", sequences[i].num_rows, "@", sequences[i].start_position);
    return text;
  }
  void Add(Stream& stream, const char* op, const std::string& shapes, const OpCost& cost) {
    if (!stream.status().ok()) return;
    if (op == options_.failing_op && failing_op_seen_++ == options_.failing_at) {
      static_cast<RecordingStream&>(stream).Fail(absl::InternalError(absl::StrCat(op, " fails as it was told to")));
      return;
    }
    lines_.push_back(absl::StrCat(baton_.now(), " ", Sv(stream.name()), " ", op, " ", shapes, " ", cost.ToString()));
    const double seconds = std::max(cost.flops / options_.flops_per_second, cost.bytes() / options_.bytes_per_second);
    baton_.Advance(static_cast<int64_t>(seconds * 1e9));
  }

  Baton& baton_;
  const RecordingOptions options_;
  std::mt19937_64 random_;
  int64_t failing_op_seen_ = 0;
  std::vector<std::string> lines_;
};

class RecordingDeviceImpl : public RecordingDevice {
 public:
  explicit RecordingDeviceImpl(const RecordingOptions& options) : ops_(baton_, options) {
    caps_.kind = "recording";
    caps_.numerics = "recording/none";
    caps_.description = "records ops and computes nothing";
    caps_.memory_budget_bytes = memory_->budget_bytes = options.memory_budget_bytes;
  }
  const DeviceCaps& caps() const override { return caps_; }
  Ops& ops() override { return ops_; }
  std::vector<std::string> Lines() const override { return ops_.lines(); }
  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    if (bytes > memory_->budget_bytes - memory_->used_bytes) return absl::ResourceExhaustedError("the recording device's budget");
    void* data = std::calloc(std::max<size_t>(bytes, 1), 1);
    memory_->used_bytes += bytes;
    memory_->peak_bytes = std::max(memory_->peak_bytes, memory_->used_bytes);
    return Buffer(data, bytes, [data, bytes, memory = memory_] {
      std::free(data);
      memory->used_bytes -= bytes;
    });
  }
  DeviceMemory memory() const override { return *memory_; }
  std::unique_ptr<Stream> MakeStream(std::string name) override { return std::make_unique<RecordingStream>(std::move(name)); }
  std::unique_ptr<Event> MakeEvent() override { return std::make_unique<RecordingEvent>(); }
  std::unique_ptr<Actor> Spawn(std::string, std::function<void()> body) override { return std::make_unique<RecordingActor>(baton_, std::move(body)); }
  std::unique_ptr<HostSignal> MakeSignal() override { return std::make_unique<RecordingSignal>(); }

  WaitResult HostWait(HostSignal& signal, uint64_t seen, const WaitLimits& limits) override {
    auto result = [&]() -> std::optional<WaitResult> {
      if (limits.stop != nullptr && limits.stop->stopped()) return WaitResult::kStopped;
      if (signal.Current() != seen) return WaitResult::kSignalled;
      if (limits.peer_gone && limits.peer_gone()) return WaitResult::kPeerGone;
      return std::nullopt;
    };
    auto now = result();
    if (!now.has_value() && baton_.now() < limits.deadline_ns) {
      baton_.Sleep([&] { return result().has_value(); }, limits.deadline_ns);
      now = result();
    }
    return now.value_or(WaitResult::kDeadline);
  }
  int64_t Now() const override { return baton_.now(); }

 private:
  Baton baton_;
  RecordingOps ops_;
  DeviceCaps caps_;
  const std::shared_ptr<DeviceMemory> memory_ = std::make_shared<DeviceMemory>();
};

}  // namespace

std::unique_ptr<RecordingDevice> RecordingDevice::Make(const RecordingOptions& options) { return std::make_unique<RecordingDeviceImpl>(options); }

}  // namespace hearth
