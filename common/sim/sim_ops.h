// Ops in virtual time: each call becomes a timed op of its stream. Contract: sim_world.h.
// Room: common/sim. Threads: see sim_engine.h.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/device/op_cost.h"
#include "common/device/op_label.h"
#include "common/device/ops.h"
#include "common/sim/sim_device.h"

namespace hearth {

class SimStream : public Stream {
 public:
  SimStream(std::shared_ptr<SimShared> world, const std::string& device, std::string name)
      : world_(std::move(world)),
        name_(std::move(name)),
        id_(world_->engine.AddStream(device, name_)),
        experts_id_(world_->engine.AddStream(device, name_ + " experts")) {}
  std::string_view name() const override { return name_; }
  absl::Status Synchronize() override;
  // Nothing is computed that could fail; another rank may.
  absl::Status status() const override { return status_; }
  void Fail(const absl::Status& status) { status_ = status; }

  int id() const { return id_; }
  // A mark behind all work so far, the experts that run beside the stream included.
  std::shared_ptr<SimEngine::Mark> MarkAll();
  // Experts that run beside the stream, and where their output goes.
  void EnqueueBeside(SimOp op, const void* out, uint64_t bytes, int64_t cost_ns);
  // Later work waits for them if one of the addresses lies in their output.
  void AwaitIfNamed(std::initializer_list<const void*> addresses);

 private:
  struct Pending {
    std::shared_ptr<SimEngine::Mark> done;
    const uint8_t* begin;
    const uint8_t* end;
  };
  void AwaitExperts();

  const std::shared_ptr<SimShared> world_;
  const std::string name_;
  const int id_;
  const int experts_id_;
  std::optional<Pending> pending_;
  absl::Status status_;
};

class SimOps : public Ops {
 public:
  SimOps(std::shared_ptr<SimShared> world, int64_t gpu);

  void Embed(Stream& s, const EmbedArgs& a) override;
  void RmsNorm(Stream& s, const RmsNormArgs& a) override;
  void Linear(Stream& s, const LinearArgs& a) override;
  void ToBf16(Stream& s, const ToBf16Args& a) override;
  void SiluMul(Stream& s, const SiluMulArgs& a) override;
  void Add(Stream& s, const AddArgs& a) override;
  void AddGated(Stream& s, const AddGatedArgs& a) override;
  void AddRows(Stream& s, const AddRowsArgs& a) override;
  void GatherRows(Stream& s, const GatherRowsArgs& a) override;
  void MlaWriteKv(Stream& s, const MlaWriteKvArgs& a) override;
  void MlaRopeQuery(Stream& s, const MlaRopeQueryArgs& a) override;
  void MlaAttention(Stream& s, const MlaAttentionArgs& a) override;
  void GqaRotateQuery(Stream& s, const GqaRotateQueryArgs& a) override;
  void GqaWriteKv(Stream& s, const GqaWriteKvArgs& a) override;
  void GqaAttention(Stream& s, const GqaAttentionArgs& a) override;
  void Gate(Stream& s, const GateArgs& a) override;
  void Experts(Stream& s, const ExpertsArgs& a) override;
  void ExpertRows(Stream& s, const ExpertRowsArgs& a) override;
  void Clear(Stream& s, const ClearArgs& a) override;
  void ToDevice(Stream& s, const ToDeviceArgs& a) override;
  void ToHost(Stream& s, const ToHostArgs& a) override;

  // Bytes to other GPUs and from them, by way of host memory: consumer GPUs have no link of their own to each other.
  SimPhase Exchange(double sent, double received) const;

 private:
  // `addresses`: what the op reads or writes of other ops' results. `more`: behind the label's shapes.
  void Put(Stream& stream, const OpLabel& label, const OpCost& cost, std::initializer_list<const void*> addresses, const std::string& more = "");
  // Of as many bytes as the label's first value says.
  void PutCopy(Stream& stream, const OpLabel& label, bool to_device);
  SimPhase Compute(const OpCost& cost) const;
  SimPhase ComputeOnCpu(const OpCost& cost) const;
  std::vector<SimPhase> ExpertPhases(const ExpertsArgs& a) const;
  SimPhase Copy(double bytes, bool to_device) const;
  int64_t enqueue_ns() const;
  bool on_gpu() const { return gpu_ >= 0; }

  const std::shared_ptr<SimShared> world_;
  const int64_t gpu_;
  int compute_ = 0, memory_ = 0, link_in_ = 0, link_out_ = 0;  // a GPU's resources
};

}  // namespace hearth
