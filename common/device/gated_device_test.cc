// A gated device: every op passes the gate, and what is divided has the bits of the whole.
#include "common/device/gated_device.h"

#include <gtest/gtest.h>

#include <vector>

#include "common/device/host/host_device.h"

namespace hearth {
namespace {

class DividingGate : public OpGate {
 public:
  explicit DividingGate(int64_t parts) : parts_(parts) {}
  void Before(int, const OpCost& cost) override { flops_ += cost.flops; }
  void After(int, const OpCost&, int64_t) override { ++ops_; }
  int64_t Parts(int, const OpCost&) override { return parts_; }

  int ops() const { return ops_; }
  double flops() const { return flops_; }

 private:
  const int64_t parts_;
  int ops_ = 0;
  double flops_ = 0;
};

TEST(GatedDevice, PartsOfAProductHaveItsBits) {
  constexpr int64_t kCols = 200, kTokens = 37;
  for (const Isa isa : SupportedIsas()) {
    auto host = *HostDevice::Create({.isa = isa, .num_threads = 2, .parallel_work_min = 0});
    for (const Form form : {Form::kPrefill, Form::kDecode}) {
      for (const int64_t rows : {1, 127, 128, 129, 300, 1000}) {
        // FP8 with a scale for each 128 x 128: all codes but the two NaNs.
        std::vector<uint8_t> w(static_cast<size_t>(rows * kCols));
        for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<uint8_t>(i * 37 % 127 | (i % 3 == 0 ? 128 : 0));
        std::vector<float> scales(static_cast<size_t>((rows + 127) / 128 * 2));
        for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0.01F * static_cast<float>(i + 1);
        std::vector<bf16> x(kTokens * kCols);
        for (size_t i = 0; i < x.size(); ++i) x[i] = ToBf16(static_cast<float>(i % 101) / 50.0F - 1.0F);
        LinearArgs args{.form = form,
                        .w = {.data = w.data(),
                              .dtype = DType::kF8E4M3,
                              .rows = rows,
                              .cols = kCols,
                              .row_stride = kCols,
                              .scales = scales.data(),
                              .scale_stride = 2},
                        .x = x.data(),
                        .ldx = kCols,
                        .m = kTokens,
                        .ldy = rows + 3};
        const auto product = [&](Device& device) {
          std::vector<float> y(static_cast<size_t>(kTokens * args.ldy), -7.0F);
          args.y = y.data();
          auto stream = device.MakeStream("s");
          device.ops().Linear(*stream, args);
          EXPECT_TRUE(stream->Synchronize().ok());
          return y;
        };
        const std::vector<float> whole = product(*host);
        const double flops = CostOf(args).flops;
        for (const int64_t parts : {1, 2, 3, 50}) {
          DividingGate gate(parts);
          EXPECT_EQ(product(*GateOps(*host, gate)), whole) << rows << " rows in " << parts;
          EXPECT_EQ(gate.ops() > 1, parts > 1 && rows > 128) << rows << " rows in " << parts;
          EXPECT_EQ(gate.flops(), flops);
        }
      }
    }
  }
}

}  // namespace
}  // namespace hearth
