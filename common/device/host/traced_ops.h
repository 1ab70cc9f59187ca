// HostOps with a span around each op, for `hearth trace`. Off, an op costs one relaxed load more.
// Room: common/device/host. May touch: common/{trace,base}. Threads: as HostOps.
#pragma once

#include "common/device/host/host_ops.h"
#include "common/device/host/host_stream.h"
#include "common/device/op_label.h"
#include "common/trace/trace.h"

namespace hearth {

class TracedHostOps final : public Ops {
 public:
  TracedHostOps(ThreadPool& pool, const KernelTable& kernels, int64_t parallel_work_min, int64_t link_bytes_per_s)
      : ops_(pool, kernels, parallel_work_min, link_bytes_per_s) {}
  HostOps& host() { return ops_; }
  const HostOps& host() const { return ops_; }

  void Embed(Stream& s, const EmbedArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::Embed); }
  void RmsNorm(Stream& s, const RmsNormArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::RmsNorm); }
  void Linear(Stream& s, const LinearArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::Linear); }
  void ToBf16(Stream& s, const ToBf16Args& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::ToBf16); }
  void SiluMul(Stream& s, const SiluMulArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::SiluMul); }
  void Add(Stream& s, const AddArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::Add); }
  void AddGated(Stream& s, const AddGatedArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::AddGated); }
  void AddRows(Stream& s, const AddRowsArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::AddRows); }
  void GatherRows(Stream& s, const GatherRowsArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::GatherRows); }
  void MlaWriteKv(Stream& s, const MlaWriteKvArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::MlaWriteKv); }
  void MlaRopeQuery(Stream& s, const MlaRopeQueryArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::MlaRopeQuery); }
  void MlaAttention(Stream& s, const MlaAttentionArgs& a) override { Traced<TraceLevel::kPhases>(s, a, &HostOps::MlaAttention); }
  void GqaRotateQuery(Stream& s, const GqaRotateQueryArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::GqaRotateQuery); }
  void GqaWriteKv(Stream& s, const GqaWriteKvArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::GqaWriteKv); }
  void GqaAttention(Stream& s, const GqaAttentionArgs& a) override { Traced<TraceLevel::kPhases>(s, a, &HostOps::GqaAttention); }
  void Gate(Stream& s, const GateArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::Gate); }
  void Experts(Stream& s, const ExpertsArgs& a) override { Traced<TraceLevel::kPhases>(s, a, &HostOps::Experts); }
  void ExpertRows(Stream& s, const ExpertRowsArgs& a) override { Traced<TraceLevel::kPhases>(s, a, &HostOps::ExpertRows); }
  void Clear(Stream& s, const ClearArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::Clear); }
  void ToDevice(Stream& s, const ToDeviceArgs& a) override { Traced<TraceLevel::kPhases>(s, a, &HostOps::ToDevice); }
  void ToHost(Stream& s, const ToHostArgs& a) override { Traced<TraceLevel::kOps>(s, a, &HostOps::ToHost); }

 private:
  template <TraceLevel kLevel, class Args>
  void Traced(Stream& stream, const Args& args, void (HostOps::*op)(Stream&, const Args&)) {
    TraceSpan span;
    if (TraceIsOn(kLevel)) {
      const OpLabel label = LabelOf(args);
      span.Begin(static_cast<HostStream&>(stream).trace_track(), label.name, label.keys, label.values);
    }
    (ops_.*op)(stream, args);
  }

  HostOps ops_;
};

}  // namespace hearth
