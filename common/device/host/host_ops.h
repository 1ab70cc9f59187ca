// Ops on the host: cuts each op into tasks over rows (weights or tokens), never along a sum, and hands them to the kernels of one ISA path.
// Room: common/device/host. May touch: common/{kernels,shm,base}. Threads: a stream is used by one thread at a time; streams take turns at the pool.
#pragma once

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/device/expert_engine.h"
#include "common/device/host/host_link.h"
#include "common/device/host/host_stream.h"
#include "common/device/host/thread_pool.h"
#include "common/device/ops.h"
#include "common/kernels/kernels.h"

namespace hearth {

class HostOps final : public Ops {
 public:
  HostOps(ThreadPool& pool, const KernelTable& kernels, int64_t parallel_work_min, int64_t link_bytes_per_s);

  bool fetch_ahead() const { return fetch_ahead_; }
  void SetFetchAhead(bool on) { fetch_ahead_ = on; }
  void SetExpertEngine(std::unique_ptr<ExpertEngine> engine) { experts_ = std::move(engine); }

  void Embed(Stream& stream, const EmbedArgs& args) override;
  void RmsNorm(Stream& stream, const RmsNormArgs& args) override;
  void Linear(Stream& stream, const LinearArgs& args) override;
  void ToBf16(Stream& stream, const ToBf16Args& args) override;
  void SiluMul(Stream& stream, const SiluMulArgs& args) override;
  void Add(Stream& stream, const AddArgs& args) override;
  void AddGated(Stream& stream, const AddGatedArgs& args) override;
  void AddRows(Stream& stream, const AddRowsArgs& args) override;
  void GatherRows(Stream& stream, const GatherRowsArgs& args) override;
  void MlaWriteKv(Stream& stream, const MlaWriteKvArgs& args) override;
  void MlaRopeQuery(Stream& stream, const MlaRopeQueryArgs& args) override;
  void MlaAttention(Stream& stream, const MlaAttentionArgs& args) override;
  void GqaRotateQuery(Stream& stream, const GqaRotateQueryArgs& args) override;
  void GqaWriteKv(Stream& stream, const GqaWriteKvArgs& args) override;
  void GqaAttention(Stream& stream, const GqaAttentionArgs& args) override;
  void Gate(Stream& stream, const GateArgs& args) override;
  void Experts(Stream& stream, const ExpertsArgs& args) override;
  void ExpertRows(Stream& stream, const ExpertRowsArgs& args) override;
  void Clear(Stream& stream, const ClearArgs& args) override;
  void ToDevice(Stream& stream, const ToDeviceArgs& args) override;
  void ToHost(Stream& stream, const ToHostArgs& args) override;

 private:
  // work: multiply-adds, or elements touched.
  bool Parallel(int64_t work) const { return work >= parallel_work_min_; }
  // Runs on the expert engine; its error ends the stream.
  void OnEngine(HostStream& stream, absl::FunctionRef<absl::Status(ExpertEngine&)> run);
  void Product(const LinearArgs& args);
  void AttendExpanded(const MlaAttentionArgs& args);
  void AttendAbsorbed(HostStream& stream, const MlaAttentionArgs& args);

  ThreadPool& pool_;
  const KernelTable& kernels_;
  const int64_t parallel_work_min_;
  std::vector<Scratch> worker_scratch_;  // used inside pool_.Run only
  std::unique_ptr<ExpertEngine> experts_;
  HostLink link_;
  bool fetch_ahead_ = true;
};

}  // namespace hearth
