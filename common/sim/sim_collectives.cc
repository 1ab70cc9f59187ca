#include "common/sim/sim_collectives.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/sim/sim_ops.h"

namespace hearth {
namespace {

// What a rank says of a call.
struct Part {
  SimStream* stream = nullptr;
  std::vector<uint64_t> sends;      // [ranks], nothing to itself
  const uint64_t* bytes = nullptr;  // [ranks] of data
  uint8_t* data = nullptr;          // that steers; null: nothing is brought
};

class Group {
 public:
  Group(std::shared_ptr<SimShared> world, const std::vector<Device*>& gpus)
      : world_(std::move(world)), parts_(gpus.size()), begun_(gpus.size(), false) {
    for (Device* gpu : gpus) ops_.push_back(static_cast<SimOps*>(&gpu->ops()));
  }
  size_t size() const { return ops_.size(); }

  absl::Status Begin(size_t rank, const StopToken& stop, const std::function<bool()>& wanted) {
    const uint64_t pass = passes_;
    begun_[rank] = true;
    if (std::count(begun_.begin(), begun_.end(), true) == static_cast<int64_t>(size())) {
      begun_.assign(size(), false);
      called_ = 0;
      left_ = absl::OkStatus();
      ++passes_;
      return absl::OkStatus();
    }
    ++begins_;
    world_->engine.Sleep([&] { return passes_ != pass || stop.stopped() || (wanted && !wanted()); }, SimEngine::kNever,
                         "the other ranks of its group");
    if (passes_ != pass) return absl::OkStatus();
    begun_[rank] = false;
    return absl::CancelledError("the pass was stopped before all ranks had begun it");
  }

  absl::Status left() const { return left_; }
  bool Called(size_t rank) const { return !begun_[rank] && std::count(begun_.begin(), begun_.end(), true) > 0; }
  uint32_t AwaitCall(uint32_t seen, int64_t timeout_ns) const {
    world_->engine.Sleep([&] { return begins_ != seen; }, world_->engine.now_ns() + timeout_ns, "another rank's pass");
    return begins_;
  }

  void Leave(size_t rank, const absl::Status& status) {
    if (!status.ok() && left_.ok()) left_ = absl::AbortedError(absl::StrCat("rank ", rank, " left the pass: ", status.message()));
  }

  void Call(size_t rank, const char* name, Part part) {
    SimStream& stream = *part.stream;
    if (left_.ok()) {
      const uint64_t call = calls_;
      parts_[rank] = std::move(part);
      if (++called_ == size()) {
        Run(name);
        called_ = 0;
        ++calls_;
      } else {
        world_->engine.Sleep([&] { return calls_ != call || !left_.ok(); }, SimEngine::kNever, absl::StrCat("the other ranks' part of '", name, "'"));
      }
      if (calls_ != call) return;
    }
    stream.Fail(left_);
  }

 private:
  // By the last rank that came, for all: what they enqueue next comes behind it.
  void Run(const char* name) {
    std::vector<std::shared_ptr<SimEngine::Mark>> here, done;
    for (const Part& part : parts_) here.push_back(part.stream->MarkAll());
    for (size_t rank = 0; rank < size(); ++rank) {
      const int stream = parts_[rank].stream->id();
      for (const auto& mark : here) world_->engine.WaitFor(stream, mark);
      double sent = 0, received = 0;
      for (size_t peer = 0; peer < size(); ++peer) {
        sent += static_cast<double>(parts_[rank].sends[peer]);
        received += static_cast<double>(parts_[peer].sends[rank]);
      }
      if (sent + received > 0) {
        world_->engine.Enqueue(stream,
                               {.name = "exchange",
                                .detail = absl::StrCat(name, " sent=", static_cast<uint64_t>(sent), " received=", static_cast<uint64_t>(received)),
                                .phases = {ops_[rank]->Exchange(sent, received)}},
                               0);
      }
      done.push_back(world_->engine.AddMark(stream));
    }
    for (const Part& part : parts_) {
      for (const auto& mark : done) world_->engine.WaitFor(part.stream->id(), mark);
    }
    Bring();
  }

  void Bring() {
    uint64_t offset = 0;
    for (size_t from = 0; from < size() && parts_[from].data != nullptr; ++from) {
      const uint64_t bytes = parts_[from].bytes[from];
      for (size_t to = 0; to < size(); ++to) {
        if (to != from) std::memcpy(parts_[to].data + offset, parts_[from].data + offset, bytes);
      }
      offset += bytes;
    }
  }

  const std::shared_ptr<SimShared> world_;
  std::vector<const SimOps*> ops_;
  std::vector<Part> parts_;  // of the call that some have made
  std::vector<bool> begun_;  // by rank: waits for the others
  size_t called_ = 0;
  uint32_t begins_ = 0;
  uint64_t passes_ = 0, calls_ = 0;
  absl::Status left_;  // why the pass can't be ended by all
};

class SimCollectives : public Collectives {
 public:
  SimCollectives(std::shared_ptr<Group> group, size_t rank) : group_(std::move(group)), rank_(rank) {}
  int rank() const override { return static_cast<int>(rank_); }
  int size() const override { return static_cast<int>(group_->size()); }

  absl::Status Begin(const StopToken& stop, const std::function<bool()>& wanted) override {
    traffic_.clear();
    return group_->Begin(rank_, stop, wanted);
  }
  absl::Status Check() override { return group_->left(); }
  void End(const absl::Status& status) override { group_->Leave(rank_, status); }

  void AllGather(Stream& stream, const AllGatherArgs& a) override {
    Call(stream, a.name, std::vector<uint64_t>(group_->size(), a.bytes[rank_]), a.bytes, a.steers ? static_cast<uint8_t*>(a.data) : nullptr);
  }
  void AllToAll(Stream& stream, const AllToAllArgs& a) override {
    Call(stream, a.name, std::vector<uint64_t>(a.send_bytes, a.send_bytes + group_->size()));
  }
  void Barrier(Stream& stream, const BarrierArgs& a) override {
    Call(stream, a.name, std::vector<uint64_t>(group_->size(), a.shared_bytes / (group_->size() - 1)));
  }
  const std::vector<Traffic>& traffic() const override { return traffic_; }
  bool Called() const override { return group_->Called(rank_); }
  uint32_t AwaitCall(uint32_t seen, int64_t timeout_ns) const override { return group_->AwaitCall(seen, timeout_ns); }

 private:
  void Call(Stream& stream, const char* name, std::vector<uint64_t> sends, const uint64_t* bytes = nullptr, uint8_t* data = nullptr) {
    sends[rank_] = 0;
    uint64_t sum = 0;
    for (const uint64_t part : sends) sum += part;
    Count(traffic_, name, sum);
    group_->Call(rank_, name, {.stream = static_cast<SimStream*>(&stream), .sends = std::move(sends), .bytes = bytes, .data = data});
  }

  const std::shared_ptr<Group> group_;
  const size_t rank_;
  std::vector<Traffic> traffic_;
};

}  // namespace

std::vector<std::unique_ptr<Collectives>> MakeSimGroup(std::shared_ptr<SimShared> world, const std::vector<Device*>& gpus) {
  const auto group = std::make_shared<Group>(std::move(world), gpus);
  std::vector<std::unique_ptr<Collectives>> ranks;
  for (size_t rank = 0; rank < gpus.size(); ++rank) ranks.push_back(std::make_unique<SimCollectives>(group, rank));
  return ranks;
}

}  // namespace hearth
