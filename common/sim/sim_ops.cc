#include "common/sim/sim_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/roofline/op_time.h"
#include "common/trace/timeline.h"

namespace hearth {
namespace {

int64_t Nanoseconds(double seconds) { return static_cast<int64_t>(std::llround(seconds * 1e9)); }

// A claim without what is not used.
Claim ClaimOf(std::initializer_list<std::pair<int, double>> uses) {
  Claim claim;
  for (const auto& [resource, seconds] : uses) {
    if (seconds > 0) claim.emplace_back(resource, seconds);
  }
  return claim;
}

int64_t CountDistinct(const int32_t* ids, int64_t n) {
  std::vector<int32_t> sorted(ids, ids + n);
  std::sort(sorted.begin(), sorted.end());
  return std::unique(sorted.begin(), sorted.end()) - sorted.begin();
}

}  // namespace

absl::Status SimStream::Synchronize() {
  world_->engine.Sleep([mark = MarkAll()] { return mark->passed; }, SimEngine::kNever, absl::StrCat("the end of stream '", name_, "'"));
  return status_;
}

std::shared_ptr<SimEngine::Mark> SimStream::MarkAll() {
  AwaitExperts();
  return world_->engine.AddMark(id_);
}

void SimStream::EnqueueBeside(SimOp op, const void* out, uint64_t bytes, int64_t cost_ns) {
  AwaitExperts();
  world_->engine.WaitFor(experts_id_, world_->engine.AddMark(id_));
  // The mark is set before the caller's own time passes: others may run meanwhile.
  world_->engine.Enqueue(experts_id_, std::move(op), 0);
  const uint8_t* begin = static_cast<const uint8_t*>(out);
  pending_ = Pending{world_->engine.AddMark(experts_id_), begin, begin + bytes};
  world_->engine.Sleep(nullptr, world_->engine.now_ns() + cost_ns, "its own time");
}

void SimStream::AwaitIfNamed(std::initializer_list<const void*> addresses) {
  if (!pending_.has_value()) return;
  for (const void* address : addresses) {
    if (address >= pending_->begin && address < pending_->end) return AwaitExperts();
  }
}

void SimStream::AwaitExperts() {
  if (!pending_.has_value()) return;
  world_->engine.WaitFor(id_, pending_->done);
  pending_.reset();
}

SimOps::SimOps(std::shared_ptr<SimShared> world, int64_t gpu) : world_(std::move(world)), gpu_(gpu) {
  if (!on_gpu()) return;
  const std::string name = absl::StrCat("gpu ", gpu);
  compute_ = world_->engine.AddResource(name + " compute");
  memory_ = world_->engine.AddResource(name + " memory");
  link_in_ = world_->engine.AddResource(name + " link in");
  link_out_ = world_->engine.AddResource(name + " link out");
}

int64_t SimOps::enqueue_ns() const { return on_gpu() ? Nanoseconds(world_->hardware.gpu.enqueue_us * 1e-6) : 0; }

SimPhase SimOps::Compute(const OpCost& cost) const {
  if (!on_gpu()) return ComputeOnCpu(cost);
  const OpTime time = TimeOnGpu(world_->hardware.gpu, cost);
  return {.fixed_ns = Nanoseconds(time.fixed_s), .claim = ClaimOf({{compute_, time.compute_s}, {memory_, time.memory_s}})};
}

SimPhase SimOps::ComputeOnCpu(const OpCost& cost) const {
  const OpTime time = TimeOnCpu(world_->hardware.cpu, cost);
  return {.fixed_ns = Nanoseconds(time.fixed_s),
          .claim = ClaimOf({{world_->cores, time.compute_s}, {world_->dram, time.memory_s}, {world_->core_reads, time.asking_s}})};
}

SimPhase SimOps::Copy(double bytes, bool to_device) const {
  const GpuProfile& gpu = world_->hardware.gpu;
  return {.fixed_ns = Nanoseconds(gpu.link_us * 1e-6),
          .claim = ClaimOf({{to_device ? link_in_ : link_out_, SecondsOnLink(gpu, bytes)},
                            {world_->dram, bytes / world_->hardware.cpu.BytesPerSecond()},
                            {memory_, bytes / gpu.BytesPerSecond()}})};
}

SimPhase SimOps::Exchange(double sent, double received) const {
  const GpuProfile& gpu = world_->hardware.gpu;
  const double both = sent + received;
  return {.fixed_ns = Nanoseconds(2 * gpu.link_us * 1e-6),  // out, then in
          .claim = ClaimOf({{link_out_, SecondsOnLink(gpu, sent)},
                            {link_in_, SecondsOnLink(gpu, received)},
                            {world_->dram, both / world_->hardware.cpu.BytesPerSecond()},
                            {memory_, both / gpu.BytesPerSecond()}})};
}

void SimOps::Put(Stream& stream, const OpLabel& label, const OpCost& cost, std::initializer_list<const void*> addresses, const std::string& more) {
  SimStream& s = static_cast<SimStream&>(stream);
  s.AwaitIfNamed(addresses);
  world_->engine.Enqueue(s.id(), {.name = label.name, .detail = DetailText(label.keys, label.values) + more, .phases = {Compute(cost)}},
                         enqueue_ns());
}

void SimOps::PutCopy(Stream& stream, const OpLabel& label, bool to_device) {
  SimStream& s = static_cast<SimStream&>(stream);
  world_->engine.Enqueue(
      s.id(), {.name = label.name, .detail = DetailText(label.keys, label.values), .phases = {Copy(static_cast<double>(label.values[0]), to_device)}},
      enqueue_ns());
}

void SimOps::Embed(Stream& s, const EmbedArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.out}); }
void SimOps::RmsNorm(Stream& s, const RmsNormArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.x, a.out, a.f32}); }
void SimOps::Linear(Stream& s, const LinearArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.x, a.y}, absl::StrCat(" ", Sv(DTypeName(a.w.dtype)))); }
void SimOps::ToBf16(Stream& s, const ToBf16Args& a) { Put(s, LabelOf(a), CostOf(a), {a.x, a.out}); }
void SimOps::SiluMul(Stream& s, const SiluMulArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.gate, a.up, a.out}); }
void SimOps::Add(Stream& s, const AddArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.x, a.y}); }
void SimOps::AddGated(Stream& s, const AddGatedArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.x, a.gate, a.y}); }
void SimOps::AddRows(Stream& s, const AddRowsArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.x, a.sum}); }
void SimOps::GatherRows(Stream& s, const GatherRowsArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.x, a.out}); }
void SimOps::MlaWriteKv(Stream& s, const MlaWriteKvArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.kv_a}); }
void SimOps::MlaRopeQuery(Stream& s, const MlaRopeQueryArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.q, a.out}); }
void SimOps::MlaAttention(Stream& s, const MlaAttentionArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.q, a.out}); }
void SimOps::GqaRotateQuery(Stream& s, const GqaRotateQueryArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.q}); }
void SimOps::GqaWriteKv(Stream& s, const GqaWriteKvArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.k, a.v}); }
void SimOps::GqaAttention(Stream& s, const GqaAttentionArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.q, a.out}); }

void SimOps::Gate(Stream& s, const GateArgs& a) {
  world_->gate.Choose(a.params.num_experts, a.params.top_k, a.m, a.ids, a.weights);
  Put(s, LabelOf(a), CostOf(a), {a.x});
}

std::vector<SimPhase> SimOps::ExpertPhases(const ExpertsArgs& a) const {
  if (a.form != Form::kDecode || world_->options.experts_shared) {
    return {ComputeOnCpu(CostOfExperts(a, static_cast<double>(CountDistinct(a.ids, a.m * a.top_k))))};
  }
  ExpertsArgs row = a;
  row.m = 1;
  return std::vector<SimPhase>(static_cast<size_t>(a.m), ComputeOnCpu(CostOfExperts(row, static_cast<double>(a.top_k))));
}

void SimOps::Experts(Stream& stream, const ExpertsArgs& a) {
  SimStream& s = static_cast<SimStream&>(stream);
  const OpLabel label = LabelOf(a);
  SimOp op{.name = label.name,
           .detail = absl::StrCat(DetailText(label.keys, label.values), " distinct=", CountDistinct(a.ids, a.m * a.top_k), " of ", a.num_experts),
           .phases = ExpertPhases(a)};
  if (!on_gpu()) {
    s.AwaitIfNamed({a.x, a.out});
    world_->engine.Enqueue(s.id(), std::move(op), enqueue_ns());
    return;
  }
  for (SimPhase& phase : op.phases) phase.track = world_->expert_track;
  const double rows = static_cast<double>(a.m), hidden = static_cast<double>(a.hidden);
  op.phases.insert(op.phases.begin(), Copy(rows * (hidden * a.terms * 2 + 8.0 * static_cast<double>(a.top_k)), false));
  op.phases.push_back(Copy(rows * hidden * 4, true));
  s.EnqueueBeside(std::move(op), a.out, static_cast<uint64_t>(a.m * a.hidden) * sizeof(float), enqueue_ns());
}

void SimOps::ExpertRows(Stream& s, const ExpertRowsArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.x, a.sum}); }
void SimOps::Clear(Stream& s, const ClearArgs& a) { Put(s, LabelOf(a), CostOf(a), {a.x}); }

void SimOps::ToDevice(Stream& s, const ToDeviceArgs& a) {
  if (a.steers) std::memcpy(a.device, a.host, a.bytes);
  if (!on_gpu()) return Put(s, LabelOf(a), CostOf(a), {a.device});
  PutCopy(s, LabelOf(a), true);
}

void SimOps::ToHost(Stream& s, const ToHostArgs& a) {
  std::memcpy(a.host, a.device, a.bytes);
  static_cast<SimStream&>(s).AwaitIfNamed({a.device});
  if (!on_gpu()) return Put(s, LabelOf(a), CostOf(a), {});
  PutCopy(s, LabelOf(a), false);
}

}  // namespace hearth
