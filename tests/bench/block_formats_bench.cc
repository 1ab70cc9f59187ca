// `linear` of FP8 and every block format beside a plain read of the same bytes, out of DRAM with one thread and with all, and out of L2; and `gemm` on one
// core. Read and product take turns; medians of the rounds. Usage: block_formats_bench [ROUNDS]. Never run by ctest.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/base/check.h"
#include "common/base/time.h"
#include "common/kernels/kernels.h"
#include "common/kernels/kernels_cases.h"
#include "tests/bench/limits.h"

namespace hearth {
namespace {

constexpr int64_t kRows = 2048, kCols = 7168;       // DeepSeek-V3's gate_proj
constexpr int64_t kDramBytes = int64_t{300} << 20;  // more than any cache of a core's part of the machine
constexpr int64_t kL2Bytes = 400 << 10;
constexpr int64_t kTaskRows = 128;
constexpr int64_t kTokensMax = 512;

// Copies of one random matrix, one behind the other in huge pages, as weights lie in an image.
class Copies {
 public:
  explicit Copies(DType dtype) : rng_(1), one_(rng_, dtype, kRows, kCols, kCols, 0) {
    bytes_ = static_cast<int64_t>(DTypeBytes(dtype, kRows * kCols));
    count_ = kDramBytes / bytes_;
    const size_t all = static_cast<size_t>(count_ * bytes_);
    void* map = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    HEARTH_CHECK(map != MAP_FAILED);
    madvise(map, all, MADV_HUGEPAGE);
    data_ = static_cast<uint8_t*>(map);
    for (int64_t i = 0; i < count_; ++i) std::memcpy(data_ + i * bytes_, one_.view().data, static_cast<size_t>(bytes_));
  }
  ~Copies() { munmap(data_, static_cast<size_t>(count_ * bytes_)); }
  int64_t count() const { return count_; }
  int64_t row_bytes() const { return bytes_ / kRows; }
  MemoryRun all() const { return {data_, count_ * bytes_}; }
  WeightView View(int64_t i) const {
    WeightView view = one_.view();
    view.data = data_ + i * bytes_;
    return view;
  }

 private:
  std::mt19937 rng_;
  MatrixCase one_;
  int64_t bytes_, count_;
  uint8_t* data_;
};

class Bench {
 public:
  Bench(ThreadPool& one, ThreadPool& all, int rounds) : one_(one), all_(all), rounds_(rounds), kernels_(Kernels(SupportedIsas().back())) {
    std::mt19937 rng(2);
    FillGaussian(rng, x_);
  }

  void Measure(DType dtype) {
    const Copies copies(dtype);
    std::printf("%-8s", std::string(DTypeName(dtype)).c_str());
    for (ThreadPool* pool : {&one_, &all_}) {
      std::printf(" | DRAM, %d:", pool->num_threads());
      double read_rate = 0;
      for (const int64_t m : {1, 2, 4, 8}) {
        StepsBesideReads steps;
        for (int round = 0; round < rounds_; ++round) {
          const double seconds = SecondsOfLinear(*pool, copies, m);
          const MemoryRun run = copies.all();
          steps.Add(seconds, SecondsToRead(*pool, {&run, 1}), static_cast<double>(run.bytes));
        }
        std::printf(" %3.0f%%", 100 * steps.of_read());
        read_rate = steps.read_rate();
      }
      std::printf(" of %4.1f GB/s", read_rate * 1e-9);
      std::fflush(stdout);
    }
    std::printf(" | L2: %4.1f %4.1f GB/s | gemm:", L2Rate(copies, 1), L2Rate(copies, 4));
    for (const int64_t m : {16, 64, 512}) std::printf(" %3.0f", GemmRate(copies, m));
    std::printf(" GFLOP/s\n");
    std::fflush(stdout);
  }

 private:
  static double Since(int64_t begin) { return static_cast<double>(MonotonicNowNs() - begin) * 1e-9; }

  double SecondsOfLinear(ThreadPool& pool, const Copies& copies, int64_t m) {
    constexpr int64_t kTasks = kRows / kTaskRows;
    const int64_t begin = MonotonicNowNs();
    pool.ParallelFor(pool.num_threads() > 1, copies.count() * kTasks, [&](int64_t task, int) {
      const int64_t row = task % kTasks * kTaskRows;
      kernels_.linear(copies.View(task / kTasks), x_.data(), kCols, m, 1, y_.data(), kRows, row, row + kTaskRows);
    });
    return Since(begin);
  }

  double L2Rate(const Copies& copies, int64_t m) {
    constexpr int kTimes = 40;
    const int64_t rows = kL2Bytes / copies.row_bytes() / 8 * 8;
    std::vector<double> rates;
    for (int round = 0; round < 3 * rounds_; ++round) {
      const int64_t begin = MonotonicNowNs();
      for (int i = 0; i < kTimes; ++i) kernels_.linear(copies.View(0), x_.data(), kCols, m, 1, y_.data(), kRows, 0, rows);
      rates.push_back(static_cast<double>(kTimes * rows * copies.row_bytes()) * 1e-9 / Since(begin));
    }
    return Median(rates);
  }

  double GemmRate(const Copies& copies, int64_t m) {
    constexpr int64_t kGemmRows = kRows / 4;
    std::vector<double> rates;
    for (int round = 0; round < rounds_; ++round) {
      const int64_t begin = MonotonicNowNs();
      kernels_.gemm(copies.View(round % copies.count()), x_.data(), kCols, m, y_.data(), kRows, 0, kGemmRows);
      rates.push_back(2e-9 * static_cast<double>(m * kGemmRows * kCols) / Since(begin));
    }
    return Median(rates);
  }

  ThreadPool& one_;
  ThreadPool& all_;
  const int rounds_;
  const KernelTable& kernels_;
  std::vector<bf16> x_ = std::vector<bf16>(kTokensMax * kCols);
  std::vector<float> y_ = std::vector<float>(kTokensMax * kRows);
};

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  using hearth::DType;
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  if (argc > 2 || rounds < 1) {
    std::fprintf(stderr, "usage: block_formats_bench [ROUNDS]\n");
    return 1;
  }
  hearth::ThreadPool one({.num_threads = 1});
  hearth::ThreadPool all({.num_threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))});
  hearth::Bench bench(one, all, rounds);
  std::printf("path %s; linear at 1, 2, 4 and 8 tokens out of DRAM, share of a plain read; at 1 and 4 out of L2; gemm at 16, 64 and 512\n",
              std::string(hearth::IsaName(hearth::SupportedIsas().back())).c_str());
  for (const DType dtype : {DType::kF8E4M3, DType::kQ8_0, DType::kQ6_K, DType::kQ5_K, DType::kQ4_K, DType::kQ3_K, DType::kI4G32})
    bench.Measure(dtype);
  return 0;
}
