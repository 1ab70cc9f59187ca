// The MoE step alone: routed experts of one layer out of DRAM at batch 1..8, against a plain read of the same experts' bytes by the same threads, the two
// in turn. Usage: moe_bench [--experts N] [--top-k K] [--hidden H] [--intermediate I] [--threads N|each] [--terms 1|2] [--spin-us N] [--isa NAME]
//                          [--rounds R] [--fetch-ahead 0|1]
// --threads each: one table for each number of threads from 1 to the machine's, in one run.
// Defaults are DeepSeek-V3's: 256 experts of 44 MB (11.3 GB), top-8. Never run by ctest.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>

#include "common/base/time.h"
#include "common/experts/cpu_expert_engine.h"
#include "common/experts/expert_source.h"
#include "common/shm/expert_record.h"
#include "tests/bench/limits.h"

namespace hearth {
namespace {

struct Flags {
  int64_t experts = 256, top_k = 8, hidden = 7168, intermediate = 2048, rounds = 24;
  bool each_thread_count = false;
  bool fetch_ahead = true;
  HostDeviceOptions device;
};

// Records of random codes, one behind the other, as in a weight image.
class SyntheticExperts : public ExpertSource {
 public:
  SyntheticExperts(ThreadPool& pool, const Flags& flags)
      : flags_(flags),
        layout_(ExpertRecordLayout::Of(DType::kF8E4M3, flags.intermediate, flags.hidden)),
        stride_((layout_.bytes + 4095) / 4096 * 4096) {
    bytes_ = stride_ * static_cast<uint64_t>(flags.experts);
    void* map = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
      std::perror("moe_bench: memory for the experts");
      std::exit(1);
    }
    madvise(map, bytes_, MADV_HUGEPAGE);
    data_ = static_cast<uint8_t*>(map);
    pool.ParallelFor(true, flags.experts, [&](int64_t e, int) { Fill(data_ + static_cast<uint64_t>(e) * stride_, static_cast<uint64_t>(e) + 1); });
  }
  ~SyntheticExperts() override { munmap(data_, bytes_); }

  int64_t num_shards() const override { return 1; }
  ExpertView Acquire(int64_t, int64_t expert, int64_t) override {
    const uint8_t* record = data_ + static_cast<uint64_t>(expert) * stride_;
    const auto view = [&](uint64_t at, uint64_t scales, int64_t rows, int64_t cols) {
      return WeightView{.data = record + at,
                        .dtype = DType::kF8E4M3,
                        .rows = rows,
                        .cols = cols,
                        .row_stride = cols,
                        .scales = reinterpret_cast<const float*>(record + scales),
                        .scale_stride = ScaleBlocks(cols)};
    };
    return {.count = flags_.intermediate,
            .gate = view(layout_.gate, layout_.gate_scales, flags_.intermediate, flags_.hidden),
            .up = view(layout_.up, layout_.up_scales, flags_.intermediate, flags_.hidden),
            .down = view(layout_.down, layout_.down_scales, flags_.hidden, flags_.intermediate)};
  }
  void Release(int64_t, int64_t, int64_t) override {}
  MemoryRun Run(int64_t expert) const { return {data_ + static_cast<uint64_t>(expert) * stride_, static_cast<int64_t>(layout_.bytes)}; }
  uint64_t bytes() const { return bytes_; }

 private:
  // Codes of moderate size, never NaN; scales that keep activations in range.
  void Fill(uint8_t* record, uint64_t seed) {
    uint64_t state = seed * 0x9e3779b97f4a7c15u;
    for (uint64_t at = 0; at + 8 <= layout_.gate_scales; at += 8) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      const uint64_t codes = state & 0xbfbfbfbfbfbfbfbfu;
      std::memcpy(record + at, &codes, 8);
    }
    auto* scale = reinterpret_cast<float*>(record + layout_.gate_scales);
    std::fill(scale, reinterpret_cast<float*>(record + layout_.bytes), 0.02f);
  }

  const Flags flags_;
  const ExpertRecordLayout layout_;
  const uint64_t stride_;
  uint64_t bytes_ = 0;
  uint8_t* data_ = nullptr;
};

absl::Status RunTable(const Flags& flags, HostDevice* device, SyntheticExperts& experts) {
  const std::unique_ptr<Stream> stream = device->MakeStream("moe");
  device->SetFetchAhead(flags.fetch_ahead);
  std::printf("\n%s\n", device->caps().description.c_str());
  std::printf("batch  experts   bytes     step      step      plain read  of the read\n");
  const int terms = flags.device.activation_terms;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const int64_t m : {1, 2, 4, 6, 8}) {
    std::vector<bf16> x(static_cast<size_t>(m * terms * flags.hidden));
    for (bf16& v : x) v = ToBf16(normal(random));
    std::vector<float> weights(static_cast<size_t>(m * flags.top_k), 0.125f), out(static_cast<size_t>(m * flags.hidden));
    StepsBesideReads steps;
    for (int64_t round = -1; round < flags.rounds; ++round) {
      std::vector<int32_t> ids;
      std::set<int32_t> distinct;
      for (int64_t t = 0; t < m; ++t) {
        std::set<int32_t> chosen;
        while (static_cast<int64_t>(chosen.size()) < flags.top_k)
          chosen.insert(static_cast<int32_t>(random() % static_cast<uint32_t>(flags.experts)));
        ids.insert(ids.end(), chosen.begin(), chosen.end());
        distinct.insert(chosen.begin(), chosen.end());
      }
      std::vector<MemoryRun> runs;
      for (const int32_t id : distinct) runs.push_back(experts.Run(id));
      // The read takes other experts than the step, so that neither leaves the other something in a cache.
      std::vector<MemoryRun> others;
      for (const int32_t id : distinct) others.push_back(experts.Run((id + flags.experts / 2) % flags.experts));
      const int64_t begin = MonotonicNowNs();
      device->ops().Experts(*stream, {.form = Form::kDecode,
                                      .source = &experts,
                                      .num_experts = flags.experts,
                                      .top_k = flags.top_k,
                                      .hidden = flags.hidden,
                                      .intermediate = flags.intermediate,
                                      .terms = terms,
                                      .x = x.data(),
                                      .ids = ids.data(),
                                      .weights = weights.data(),
                                      .m = m,
                                      .out = out.data()});
      RETURN_IF_ERROR(stream->Synchronize());
      const double step = static_cast<double>(MonotonicNowNs() - begin) * 1e-9;
      const double read = SecondsToRead(device->pool(), others);
      if (round < 0) continue;  // warms up
      steps.Add(step, read, static_cast<double>(runs.size()) * static_cast<double>(runs[0].bytes));
    }
    std::printf("%5ld  %7.0f  %5.2f GB  %6.2f ms  %5.1f GB/s  %5.1f GB/s  %8.0f %%\n", static_cast<long>(m),
                steps.bytes() / static_cast<double>(experts.Run(0).bytes), steps.bytes() * 1e-9, steps.seconds() * 1e3, steps.rate() * 1e-9,
                steps.read_rate() * 1e-9, steps.of_read() * 100);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags) {
  ASSIGN_OR_RETURN(auto device, MakeHostDevice(flags.device));
  std::printf("%ld experts of %ld x %ld, top %ld: filling memory\n", static_cast<long>(flags.experts), static_cast<long>(flags.intermediate),
              static_cast<long>(flags.hidden), static_cast<long>(flags.top_k));
  SyntheticExperts experts(device->pool(), flags);
  std::printf("%.1f GB; medians of %ld rounds, step and plain read in turn\n", static_cast<double>(experts.bytes()) * 1e-9,
              static_cast<long>(flags.rounds));
  const int most = device->pool().num_threads();
  for (int threads = flags.each_thread_count ? 1 : most; threads <= most; ++threads) {
    if (threads != device->pool().num_threads()) {
      HostDeviceOptions options = flags.device;
      options.num_threads = threads;
      ASSIGN_OR_RETURN(auto fewer, MakeHostDevice(options));
      RETURN_IF_ERROR(RunTable(flags, fewer.get(), experts));
    } else {
      RETURN_IF_ERROR(RunTable(flags, device.get(), experts));
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  hearth::Flags flags;
  const auto take = [&](const std::string& name, const char* value) {
    if (name == "--experts") {
      flags.experts = std::atol(value);
    } else if (name == "--top-k") {
      flags.top_k = std::atol(value);
    } else if (name == "--hidden") {
      flags.hidden = std::atol(value);
    } else if (name == "--intermediate") {
      flags.intermediate = std::atol(value);
    } else if (name == "--threads" && std::string(value) == "each") {
      flags.each_thread_count = true;
    } else if (name == "--fetch-ahead") {
      flags.fetch_ahead = std::atoi(value) != 0;
    } else if (name == "--rounds") {
      flags.rounds = std::atol(value);
    } else {
      return false;
    }
    return true;
  };
  if (!hearth::TakeFlags(argc, argv, &flags.device, nullptr, take)) return 2;
  const absl::Status status = hearth::Run(flags);
  if (!status.ok()) std::fprintf(stderr, "moe_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
