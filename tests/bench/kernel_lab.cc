// The kernel lab: the decode kernel and the ideas beside it (common/kernels/x86/lab_entries.h), FP8, out of L2 and out of DRAM, with one thread and
// with all, beside what the machine reads plainly; and the machine's limits. Every entry is checked against the scalar kernel first.
// Each figure is the median of rounds in which a plain read of the same bytes and all entries take turns. Never run by ctest. Flags:
//   --rounds N (7), --tokens N (1), --terms 1|2 (of activations; 1), --shape N (all; the N-th of the list), --threads N (all cores), --zeros PERCENT of the weights (0)
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "common/base/time.h"
#include "common/kernels/kernels.h"
#include "common/kernels/x86/lab_entries.h"
#include "tests/bench/limits.h"

namespace hearth {
namespace {

constexpr int64_t kDramBytes = 384 << 20;  // more than any cache of a core's part of the machine
constexpr int64_t kL2Bytes = 448 << 10;
constexpr int64_t kTaskRows = 256;
constexpr int64_t kColsMax = 16384;
struct Shape {
  int64_t rows, cols;
};
constexpr Shape kShapes[] = {{2048, 7168}, {7168, 2048}, {1536, 4096}, {1408, 4096}, {768, 2048}, {1024, 7168}, {7168, 1024}, {7168, 16384}};

uint8_t* Map(int64_t bytes, bool huge) {
  void* map = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) {
    std::perror("kernel_lab: memory for the weights");
    std::exit(1);
  }
  madvise(map, static_cast<size_t>(bytes), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return static_cast<uint8_t*>(map);
}

struct LabFlags {
  int rounds = 7;
  int64_t tokens = 1;
  int terms = 1;
  int64_t shape = 0;  // all
  int zeros = 0;      // percent
};

// Gaussian weights as FP8 would hold them, largest near the format's: never NaN, a subnormal or zero now and then; and more zeros, as pruned weights have.
void FillCodes(uint8_t* data, int64_t bytes, int zeros) {
  std::mt19937 rng(1);
  std::normal_distribution<float> gaussian(0.0f, 100.0f);
  const int64_t period = std::min<int64_t>(bytes, 2 << 20);
  for (int64_t i = 0; i < period; ++i) {
    const float value = gaussian(rng);
    const float magnitude = std::min(std::fabs(value), 440.0f);
    int code = 0;
    if (magnitude < 0x1p-6f) {
      code = static_cast<int>(magnitude * 512.0f);
    } else {
      int exponent = 0;
      const float fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
      code = ((exponent + 6) << 3) | static_cast<int>(fraction * 16.0f - 8.0f);
    }
    if (zeros > 0 && static_cast<int>(rng() % 100) < zeros) code = 0;
    data[i] = static_cast<uint8_t>(code | (value < 0 ? 0x80 : 0));
  }
  for (int64_t at = period; at < bytes; at += period) std::memcpy(data + at, data, static_cast<size_t>(std::min(period, bytes - at)));
}

class Lab {
 public:
  Lab(ThreadPool& one, ThreadPool& all, const LabFlags& flags)
      : one_(one), all_(all), rounds_(flags.rounds), tokens_(flags.tokens), terms_(flags.terms), data_(Map(kDramBytes, true)) {
    FillCodes(data_, kDramBytes, flags.zeros);
    const int64_t numbers = tokens_ * terms_ * kColsMax;
    x_ = {reinterpret_cast<bf16*>(Map(numbers * static_cast<int64_t>(sizeof(bf16)), false)), static_cast<size_t>(numbers)};
    std::mt19937 rng(2);
    std::normal_distribution<float> gaussian;
    for (bf16& x : x_) x = ToBf16(gaussian(rng));
    for (size_t i = 0; i < scales_.size(); ++i) scales_[i] = 0.001f * static_cast<float>(i % 7 + 1);
    static LinearKernel* const ours = Kernels(SupportedIsas().back()).linear;
    entries_.push_back({"ours", ours});
    if (SupportedIsas().back() >= Isa::kAvx512Bf16) entries_.insert(entries_.end(), kLabEntries, kLabEntries + kNumLabEntries);
  }
  ~Lab() {
    munmap(data_, kDramBytes);
    munmap(x_.data(), x_.size_bytes());
  }

  void Limits() {
    uint8_t* small = Map(kDramBytes, false);
    std::memcpy(small, data_, kDramBytes);
    std::vector<double> huge_one, huge_all, small_one, small_all, l2;
    for (int round = 0; round < rounds_; ++round) {
      huge_one.push_back(ReadRate(one_, data_, kDramBytes, 1));
      small_one.push_back(ReadRate(one_, small, kDramBytes, 1));
      huge_all.push_back(ReadRate(all_, data_, kDramBytes, 1));
      small_all.push_back(ReadRate(all_, small, kDramBytes, 1));
      l2.push_back(ReadRate(one_, data_, kL2Bytes, 200));
    }
    munmap(small, kDramBytes);
    std::printf("plain read, GB/s: one thread %.1f in huge pages, %.1f in small; %d threads %.1f and %.1f; L2 %.1f\n", Median(huge_one),
                Median(small_one), all_.num_threads(), Median(huge_all), Median(small_all), Median(l2));
    std::printf("VDPBF16PS on registers, GFLOP/s: one thread %.0f, %d threads %.0f\n", DotPeak(one_), all_.num_threads(), DotPeak(all_));
  }

  // False if an entry is wrong.
  bool Check(const Shape& shape) {
    const WeightView w = View(shape, 0, shape.rows);
    std::vector<float> want(static_cast<size_t>(tokens_ * shape.rows)), got(want.size());
    Kernels(Isa::kScalar).linear(w, x_.data(), w.cols, tokens_, terms_, want.data(), w.rows, 0, w.rows);
    float largest = 0;
    for (const float value : want) largest = std::max(largest, std::fabs(value));
    for (const LabEntry& entry : entries_) {
      entry.linear(w, x_.data(), w.cols, tokens_, terms_, got.data(), w.rows, 0, w.rows);
      for (size_t i = 0; i < want.size(); ++i) {
        if (std::fabs(got[i] - want[i]) <= 1e-5f * largest) continue;
        std::fprintf(stderr, "kernel_lab: %s differs in sum %zu of %lld x %lld: %g, not %g\n", entry.name, i, static_cast<long long>(shape.rows),
                     static_cast<long long>(shape.cols), got[i], want[i]);
        return false;
      }
    }
    return true;
  }

  void Measure(const Shape& shape) {
    std::printf("\n%lld x %lld, %lld tokens in %d terms\n%-42s %18s %18s %18s\n", static_cast<long long>(shape.rows),
                static_cast<long long>(shape.cols), static_cast<long long>(tokens_), terms_, "GB/s (of a plain read)", "L2, one thread", "DRAM, one",
                "DRAM, all");
    const int64_t l2_rows = std::min(shape.rows, kL2Bytes / shape.cols / 16 * 16);
    const auto l2 = Rates(one_, shape, l2_rows, 1, 40);
    const int64_t copies = kDramBytes / (shape.rows * shape.cols);
    const auto dram_one = Rates(one_, shape, shape.rows, copies, 1);
    const auto dram_all = Rates(all_, shape, shape.rows, copies, 1);
    for (size_t i = 0; i < entries_.size(); ++i) {
      std::printf("%-42s %10.1f (%3.0f%%) %10.1f (%3.0f%%) %10.1f (%3.0f%%)\n", entries_[i].name, l2[i].rate, 100 * l2[i].of_read, dram_one[i].rate,
                  100 * dram_one[i].of_read, dram_all[i].rate, 100 * dram_all[i].of_read);
    }
    std::printf("ours out of L2 is %.2f times what one thread reads from DRAM\n", l2[0].rate / (dram_one[0].rate / dram_one[0].of_read));
  }

 private:
  struct Rate {
    double rate, of_read;
  };

  WeightView View(const Shape& shape, int64_t copy, int64_t rows) const {
    return {.data = data_ + copy * shape.rows * shape.cols,
            .dtype = DType::kF8E4M3,
            .rows = rows,
            .cols = shape.cols,
            .row_stride = shape.cols,
            .scales = scales_.data(),
            .scale_stride = (shape.cols + 127) / 128};
  }

  static double ReadRate(ThreadPool& pool, const uint8_t* data, int64_t bytes, int times) {
    const std::vector<MemoryRun> runs(static_cast<size_t>(times), {data, bytes});
    return static_cast<double>(bytes * times) / SecondsToRead(pool, runs) * 1e-9;
  }

  // Of each entry, over the first `rows` rows of `copies` matrices, `times` over.
  std::vector<Rate> Rates(ThreadPool& pool, const Shape& shape, int64_t rows, int64_t copies, int times) {
    const int64_t blocks = (rows + kTaskRows - 1) / kTaskRows;
    const double bytes = static_cast<double>(rows * shape.cols * copies * times);
    std::vector<std::vector<double>> rates(entries_.size()), ratios(entries_.size());
    std::vector<float> y(static_cast<size_t>(tokens_ * shape.rows * pool.num_threads()));
    for (int round = 0; round < rounds_; ++round) {
      for (size_t i = 0; i < entries_.size(); ++i) {
        const double read = copies == 1 ? ReadRate(pool, data_, rows * shape.cols, times) : ReadRate(pool, data_, rows * shape.cols * copies, times);
        const int64_t begin = MonotonicNowNs();
        for (int time = 0; time < times; ++time) {
          pool.ParallelFor(pool.num_threads() > 1, copies * blocks, [&](int64_t task, int worker) {
            const WeightView w = View(shape, task / blocks, shape.rows);
            const int64_t row = task % blocks * kTaskRows;
            entries_[i].linear(w, x_.data(), w.cols, tokens_, terms_, y.data() + worker * tokens_ * shape.rows, w.rows, row,
                               std::min(rows, row + kTaskRows));
          });
        }
        rates[i].push_back(bytes / static_cast<double>(MonotonicNowNs() - begin));
        ratios[i].push_back(rates[i].back() / read);
      }
    }
    std::vector<Rate> medians;
    for (size_t i = 0; i < entries_.size(); ++i) medians.push_back({Median(rates[i]), Median(ratios[i])});
    return medians;
  }

  ThreadPool& one_;
  ThreadPool& all_;
  const int rounds_;
  const int64_t tokens_;
  const int terms_;
  uint8_t* const data_;
  std::span<bf16> x_;  // [tokens, terms, columns of the shape], at a line's beginning as a worker's activations are
  std::vector<float> scales_ = std::vector<float>(64 * 128);
  std::vector<LabEntry> entries_;
};

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  hearth::LabFlags flags;
  hearth::HostDeviceOptions device;
  const auto take = [&](const std::string& name, const char* value) {
    const int n = std::atoi(value);
    if (name == "--rounds" && n >= 1) {
      flags.rounds = n;
    } else if (name == "--tokens" && n >= 1) {
      flags.tokens = n;
    } else if (name == "--terms" && n >= 1 && n <= hearth::kTermsMax) {
      flags.terms = n;
    } else if (name == "--shape" && n >= 1 && n <= std::ssize(hearth::kShapes)) {
      flags.shape = n;
    } else if (name == "--zeros" && n >= 0 && n <= 100) {
      flags.zeros = n;
    } else {
      return false;
    }
    return true;
  };
  if (!hearth::TakeFlags(argc, argv, &device, nullptr, take)) return 1;
  hearth::ThreadPool one({.num_threads = 1});
  hearth::ThreadPool all({.num_threads = device.num_threads > 0 ? device.num_threads : hearth::CoresOfThisProcess()});
  hearth::Lab lab(one, all, flags);
  lab.Limits();
  for (const hearth::Shape& shape : hearth::kShapes) {
    if (flags.shape > 0 && &shape != &hearth::kShapes[flags.shape - 1]) continue;
    if (!lab.Check(shape)) return 1;
    lab.Measure(shape);
    std::fflush(stdout);
  }
  return 0;
}
