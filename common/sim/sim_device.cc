#include "common/sim/sim_device.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/time.h"
#include "common/sim/sim_collectives.h"
#include "common/sim/sim_ops.h"

namespace hearth {
namespace {

// A GPU attends a chunk's rows by expanding the keys and values of all positions before it, so few large chunks are the cheaper way.
constexpr int64_t kGpuChunkRows = 8192;

class SimEvent : public Event {
 public:
  void Record(Stream& stream) override { mark_ = static_cast<SimStream&>(stream).MarkAll(); }
  void Wait(Stream& stream) override {
    if (mark_ != nullptr) world_->engine.WaitFor(static_cast<SimStream&>(stream).id(), mark_);
  }
  bool Query() const override { return mark_ == nullptr || mark_->passed; }
  explicit SimEvent(std::shared_ptr<SimShared> world) : world_(std::move(world)) {}

 private:
  const std::shared_ptr<SimShared> world_;
  std::shared_ptr<SimEngine::Mark> mark_;
};

class SimSignal : public HostSignal {
 public:
  uint64_t Current() const override { return count_; }
  void Notify() override { ++count_; }

 private:
  uint64_t count_ = 0;
};

class SimActor : public Actor {
 public:
  SimActor(std::shared_ptr<SimShared> world, const std::string& name, std::function<void()> body)
      : world_(std::move(world)), id_(world_->engine.Spawn(name, std::move(body))) {}
  ~SimActor() override { world_->engine.Join(id_); }

 private:
  const std::shared_ptr<SimShared> world_;
  const int id_;
};

class SimDevice : public Device {
 public:
  SimDevice(std::shared_ptr<SimShared> world, int64_t gpu)
      : world_(std::move(world)), name_(gpu < 0 ? "cpu" : absl::StrCat("gpu ", gpu)), ops_(world_, gpu), memory_(std::make_shared<DeviceMemory>()) {
    const HardwareProfile& hardware = world_->hardware;
    caps_.kind = "sim";
    caps_.numerics = "sim/none";
    caps_.description = absl::StrCat("simulated ", gpu < 0 ? hardware.cpu.name : hardware.gpu.name);
    caps_.memory_budget_bytes = static_cast<uint64_t>(gpu < 0 ? hardware.cpu.MemoryBytes() : hardware.gpu.MemoryBytes());
    caps_.num_threads = gpu < 0 ? static_cast<int>(hardware.cpu.sockets * hardware.cpu.cores) : 1;
    if (gpu >= 0) caps_.prefill_chunk_rows = kGpuChunkRows;
    caps_.kv_dtype = world_->options.kv_dtype;
    memory_->budget_bytes = caps_.memory_budget_bytes;
  }
  const DeviceCaps& caps() const override { return caps_; }
  Ops& ops() override { return ops_; }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    const uint64_t rounded = (std::max<uint64_t>(bytes, 1) + 255) / 256 * 256;
    if (rounded > memory_->budget_bytes - memory_->used_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat("simulated memory of ", name_, ": ", HumanBytes(static_cast<double>(rounded)), " needed, ",
                                                       HumanBytes(static_cast<double>(memory_->budget_bytes - memory_->used_bytes)), " of ",
                                                       HumanBytes(static_cast<double>(memory_->budget_bytes)), " left"));
    }
    void* data = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat("no ", HumanBytes(static_cast<double>(rounded)), " of address space for a simulated buffer"));
    }
    memory_->used_bytes += rounded;
    memory_->peak_bytes = std::max(memory_->peak_bytes, memory_->used_bytes);
    return Buffer(data, bytes, [data, rounded, memory = memory_] {
      munmap(data, rounded);
      memory->used_bytes -= rounded;
    });
  }
  DeviceMemory memory() const override { return *memory_; }

  std::unique_ptr<Stream> MakeStream(std::string name) override { return std::make_unique<SimStream>(world_, name_, std::move(name)); }
  std::unique_ptr<Event> MakeEvent() override { return std::make_unique<SimEvent>(world_); }
  std::unique_ptr<Actor> Spawn(std::string name, std::function<void()> body) override {
    return std::make_unique<SimActor>(world_, name_ + " " + name, std::move(body));
  }
  std::unique_ptr<HostSignal> MakeSignal() override { return std::make_unique<SimSignal>(); }

  WaitResult HostWait(HostSignal& signal, uint64_t seen, const WaitLimits& limits) override {
    WaitResult result = WaitResult::kDeadline;
    const auto look = [&] {
      if (limits.stop != nullptr && limits.stop->stopped()) {
        result = WaitResult::kStopped;
      } else if (signal.Current() != seen) {
        result = WaitResult::kSignalled;
      } else if (limits.peer_gone && limits.peer_gone()) {
        result = WaitResult::kPeerGone;
      } else {
        return false;
      }
      return true;
    };
    if (!look() && Now() < limits.deadline_ns) world_->engine.Sleep(look, limits.deadline_ns, "a signal");
    return result;
  }
  int64_t Now() const override { return world_->engine.now_ns(); }

 private:
  const std::shared_ptr<SimShared> world_;
  const std::string name_;
  SimOps ops_;
  DeviceCaps caps_;
  const std::shared_ptr<DeviceMemory> memory_;
};

class World : public SimWorld {
 public:
  World(const HardwareProfile& hardware, const SimOptions& options)
      : shared_(std::make_shared<SimShared>(hardware, options)), cpu_(MakeSimDevice(shared_, -1)) {
    for (int64_t i = 0; i < hardware.num_gpus; ++i) gpus_.push_back(MakeSimDevice(shared_, i));
  }
  const HardwareProfile& hardware() const override { return shared_->hardware; }
  int64_t num_gpus() const override { return static_cast<int64_t>(gpus_.size()); }
  Device& gpu(int64_t index) override { return *gpus_[static_cast<size_t>(index)]; }
  Device& cpu() override { return *cpu_; }
  std::vector<std::unique_ptr<Collectives>> MakeGroup(int64_t ranks) override {
    std::vector<Device*> gpus;
    for (int64_t rank = 0; rank < ranks; ++rank) gpus.push_back(&gpu(num_gpus() - ranks + rank));
    return MakeSimGroup(shared_, gpus);
  }
  int64_t now_ns() const override { return shared_->engine.now_ns(); }
  std::vector<ResourceUse> uses() const override {
    std::vector<ResourceUse> uses;
    for (int r = 0; r < shared_->engine.num_resources(); ++r) uses.push_back({shared_->engine.resource_name(r), shared_->engine.busy_seconds(r)});
    return uses;
  }
  const Timeline& timeline() const override { return shared_->engine.timeline(); }

 private:
  const std::shared_ptr<SimShared> shared_;
  std::unique_ptr<Device> cpu_;
  std::vector<std::unique_ptr<Device>> gpus_;
};

}  // namespace

SimShared::SimShared(const HardwareProfile& profile, const SimOptions& with)
    : hardware(profile),
      options(with),
      engine(with.record),
      gate(with.seed, with.routing_skew),
      dram(engine.AddResource("dram", Division::kByDemand)),
      cores(engine.AddResource("cores")),
      core_reads(engine.AddResource("core reads")),
      expert_track(engine.AddTrack("cpu", "experts")) {}

std::vector<ResourceUse> SimWorld::UsesSince(const std::vector<ResourceUse>& before, int parts) const {
  std::vector<ResourceUse> since = uses();
  for (size_t i = 0; i < since.size(); ++i) since[i].busy_seconds = (since[i].busy_seconds - before[i].busy_seconds) / parts;
  return since;
}

void SimWorld::StayOnOneCpu() {
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(sched_getcpu(), &here);
  sched_setaffinity(0, sizeof(here), &here);  // refused: costs speed only
}

std::unique_ptr<Device> MakeSimDevice(std::shared_ptr<SimShared> world, int64_t gpu) { return std::make_unique<SimDevice>(std::move(world), gpu); }

std::unique_ptr<SimWorld> SimWorld::Make(const HardwareProfile& hardware, const SimOptions& options) {
  return std::make_unique<World>(hardware, options);
}

}  // namespace hearth
