#include "common/device/gated_device.h"

#include <algorithm>
#include <utility>

#include "common/base/ceil_div.h"

namespace hearth {
namespace {

// A part of a product has whole scale blocks, which are whole kernel tiles, too.
constexpr int64_t kPartRows = 128;

class GatedOps : public Ops {
 public:
  GatedOps(Device& device, OpGate& gate) : device_(device), ops_(device.ops()), gate_(gate) {}

  void Embed(Stream& s, const EmbedArgs& a) override { Run<0>(s, a, &Ops::Embed); }
  void RmsNorm(Stream& s, const RmsNormArgs& a) override { Run<1>(s, a, &Ops::RmsNorm); }
  // By rows of the weights: each makes one sum of a token, so parts move no bit.
  void Linear(Stream& s, const LinearArgs& a) override {
    const int64_t parts = std::max<int64_t>(gate_.Parts(kLinear, CostOf(a)), 1);
    const int64_t rows = std::max<int64_t>(CeilDiv(CeilDiv(a.w.rows, parts), kPartRows), 1) * kPartRows;
    for (int64_t row = 0; row < a.w.rows; row += rows) {
      LinearArgs part = a;
      part.w = a.w.Rows(row, std::min(rows, a.w.rows - row));
      part.y = a.y + row;
      Run<kLinear>(s, part, &Ops::Linear);
    }
  }
  void ToBf16(Stream& s, const ToBf16Args& a) override { Run<3>(s, a, &Ops::ToBf16); }
  void SiluMul(Stream& s, const SiluMulArgs& a) override { Run<4>(s, a, &Ops::SiluMul); }
  void Add(Stream& s, const AddArgs& a) override { Run<5>(s, a, &Ops::Add); }
  void AddGated(Stream& s, const AddGatedArgs& a) override { Run<6>(s, a, &Ops::AddGated); }
  void AddRows(Stream& s, const AddRowsArgs& a) override { Run<7>(s, a, &Ops::AddRows); }
  void GatherRows(Stream& s, const GatherRowsArgs& a) override { Run<8>(s, a, &Ops::GatherRows); }
  void MlaWriteKv(Stream& s, const MlaWriteKvArgs& a) override { Run<9>(s, a, &Ops::MlaWriteKv); }
  void MlaRopeQuery(Stream& s, const MlaRopeQueryArgs& a) override { Run<10>(s, a, &Ops::MlaRopeQuery); }
  void MlaAttention(Stream& s, const MlaAttentionArgs& a) override { Run<11>(s, a, &Ops::MlaAttention); }
  void GqaRotateQuery(Stream& s, const GqaRotateQueryArgs& a) override { Run<12>(s, a, &Ops::GqaRotateQuery); }
  void GqaWriteKv(Stream& s, const GqaWriteKvArgs& a) override { Run<13>(s, a, &Ops::GqaWriteKv); }
  void GqaAttention(Stream& s, const GqaAttentionArgs& a) override { Run<14>(s, a, &Ops::GqaAttention); }
  void Gate(Stream& s, const GateArgs& a) override { Run<15>(s, a, &Ops::Gate); }
  void Experts(Stream& s, const ExpertsArgs& a) override { Run<16>(s, a, &Ops::Experts); }
  void ExpertRows(Stream& s, const ExpertRowsArgs& a) override { Run<17>(s, a, &Ops::ExpertRows); }
  void Clear(Stream& s, const ClearArgs& a) override { Run<18>(s, a, &Ops::Clear); }
  void ToDevice(Stream& s, const ToDeviceArgs& a) override { Run<19>(s, a, &Ops::ToDevice); }
  void ToHost(Stream& s, const ToHostArgs& a) override { Run<20>(s, a, &Ops::ToHost); }

 private:
  static constexpr int kLinear = 2;

  template <int kKind, typename Args>
  void Run(Stream& stream, const Args& args, void (Ops::*op)(Stream&, const Args&)) {
    static_assert(kKind < kOpKinds);
    const OpCost cost = CostOf(args);
    gate_.Before(kKind, cost);
    const int64_t begin_ns = device_.Now();
    (ops_.*op)(stream, args);
    gate_.After(kKind, cost, device_.Now() - begin_ns);
  }

  Device& device_;
  Ops& ops_;
  OpGate& gate_;
};

class GatedDevice : public Device {
 public:
  GatedDevice(Device& device, OpGate& gate) : device_(device), ops_(device, gate) {}

  const DeviceCaps& caps() const override { return device_.caps(); }
  Ops& ops() override { return ops_; }
  absl::StatusOr<Buffer> Allocate(size_t bytes) override { return device_.Allocate(bytes); }
  DeviceMemory memory() const override { return device_.memory(); }
  std::unique_ptr<Stream> MakeStream(std::string name) override { return device_.MakeStream(std::move(name)); }
  std::unique_ptr<Event> MakeEvent() override { return device_.MakeEvent(); }
  std::unique_ptr<Actor> Spawn(std::string name, std::function<void()> body) override { return device_.Spawn(std::move(name), std::move(body)); }
  std::unique_ptr<HostSignal> MakeSignal() override { return device_.MakeSignal(); }
  WaitResult HostWait(HostSignal& signal, uint64_t seen, const WaitLimits& limits) override { return device_.HostWait(signal, seen, limits); }
  int64_t Now() const override { return device_.Now(); }

 private:
  Device& device_;
  GatedOps ops_;
};

}  // namespace

std::unique_ptr<Device> GateOps(Device& device, OpGate& gate) { return std::make_unique<GatedDevice>(device, gate); }

}  // namespace hearth
