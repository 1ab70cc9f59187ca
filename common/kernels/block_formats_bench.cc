// `linear` of every dtype beside a plain read of the same bytes, out of DRAM by one thread and two and out of L2, and `gemm` in GFLOP/s. Read and product
// alternate, medians of the rounds count: machines that others share swing. Run as:  bench/block_formats_bench [rounds]
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/base/check.h"
#include "common/kernels/kernels.h"
#include "common/kernels/kernels_cases.h"

namespace hearth {
namespace {

constexpr int64_t kRows = 2048, kCols = 7168;       // DeepSeek-V3's gate_proj
constexpr int64_t kDramBytes = int64_t{300} << 20;  // more than any cache that a core reaches
constexpr int64_t kL2Bytes = 400 << 10;
constexpr int64_t kTokensMax = 512;

// Copies of one matrix, one behind the other on huge pages, as weights lie in an image.
class Copies {
 public:
  explicit Copies(DType dtype) {
    std::mt19937 rng(1);
    one_ = new MatrixCase(rng, dtype, kRows, kCols, kCols, 0);  // lives as long as the program
    bytes_ = static_cast<int64_t>(DTypeBytes(dtype, kRows * kCols));
    count_ = kDramBytes / bytes_;
    const size_t all = static_cast<size_t>(count_ * bytes_);
    data_ = static_cast<uint8_t*>(mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    HEARTH_CHECK(data_ != MAP_FAILED);
    madvise(data_, all, MADV_HUGEPAGE);
    for (int64_t i = 0; i < count_; ++i) std::memcpy(data_ + i * bytes_, one_->view().data, static_cast<size_t>(bytes_));
  }
  ~Copies() { munmap(data_, static_cast<size_t>(count_ * bytes_)); }
  int64_t count() const { return count_; }
  int64_t bytes() const { return bytes_; }
  const uint8_t* data() const { return data_; }
  WeightView View(int64_t i) const {
    WeightView view = one_->view();
    view.data = data_ + i * bytes_;
    return view;
  }

 private:
  MatrixCase* one_;
  int64_t bytes_, count_;
  uint8_t* data_;
};

uint64_t ReadAll(const uint8_t* p, int64_t bytes) {
  uint64_t sum[8] = {};
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    uint64_t words[8];
    std::memcpy(words, p + i, sizeof(words));
    for (int k = 0; k < 8; ++k) sum[k] ^= words[k];
  }
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

// Seconds that `threads` threads take for work(thread), by their own clocks: from the first that begins to the last that ends.
double Seconds(int threads, const std::function<void(int)>& work) {
  using Clock = std::chrono::steady_clock;
  std::barrier ready(threads);
  std::vector<Clock::time_point> begin(static_cast<size_t>(threads)), end(begin);
  const auto run = [&](int t) {
    ready.arrive_and_wait();
    begin[static_cast<size_t>(t)] = Clock::now();
    work(t);
    end[static_cast<size_t>(t)] = Clock::now();
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(run, t);
  run(0);
  for (std::thread& thread : others) thread.join();
  return std::chrono::duration<double>(*std::max_element(end.begin(), end.end()) - *std::min_element(begin.begin(), begin.end())).count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

volatile uint64_t g_sink;

void Measure(DType dtype, Isa isa, int rounds, const std::vector<bf16>& x) {
  const Copies copies(dtype);
  const KernelTable& kernels = Kernels(isa);
  std::vector<float> y(static_cast<size_t>(kTokensMax * kRows));
  const double bytes = static_cast<double>(copies.count() * copies.bytes());
  std::printf("%-8s %-10s", std::string(DTypeName(dtype)).c_str(), std::string(IsaName(isa)).c_str());
  for (const int threads : {1, 2}) {
    std::vector<double> read;
    std::vector<std::vector<double>> ratio(4);
    constexpr int64_t kTokens[] = {1, 2, 4, 8};
    for (int round = 0; round < rounds; ++round) {
      const double plain = Seconds(threads, [&](int t) {
        const int64_t share = copies.count() * copies.bytes() / threads;
        g_sink = ReadAll(copies.data() + t * share, share);
      });
      read.push_back(bytes / plain * 1e-9);
      for (size_t i = 0; i < std::size(kTokens); ++i) {
        const double seconds = Seconds(threads, [&](int t) {
          for (int64_t copy = 0; copy < copies.count(); ++copy) {
            kernels.linear(copies.View(copy), x.data(), kCols, kTokens[i], y.data(), kRows, t * kRows / threads, (t + 1) * kRows / threads);
          }
        });
        ratio[i].push_back(plain / seconds);
      }
    }
    std::printf(" | %d: read %4.1f GB/s, M=1 %3.0f%% M=2 %3.0f%% M=4 %3.0f%% M=8 %3.0f%%", threads, Median(read), 100 * Median(ratio[0]),
                100 * Median(ratio[1]), 100 * Median(ratio[2]), 100 * Median(ratio[3]));
    std::fflush(stdout);
  }
  const int64_t l2_rows = kL2Bytes / (copies.bytes() / kRows) / 8 * 8;
  const auto in_l2 = [&](int64_t m) {
    constexpr int kTimes = 40;
    std::vector<double> rates;
    for (int round = 0; round < 3 * rounds; ++round) {
      const double seconds = Seconds(1, [&](int) {
        for (int i = 0; i < kTimes; ++i) kernels.linear(copies.View(0), x.data(), kCols, m, y.data(), kRows, 0, l2_rows);
      });
      rates.push_back(static_cast<double>(kTimes * l2_rows * (copies.bytes() / kRows)) / seconds * 1e-9);
    }
    return Median(rates);
  };
  std::printf(" | L2: M=1 %4.1f M=4 %4.1f GB/s | gemm", in_l2(1), in_l2(4));
  for (const int64_t m : {16, 64, 512}) {
    std::vector<double> rates;
    for (int round = 0; round < rounds; ++round) {
      const double seconds =
          Seconds(1, [&](int) { kernels.gemm(copies.View(round % copies.count()), x.data(), kCols, m, y.data(), kRows, 0, kRows / 4); });
      rates.push_back(2e-9 * static_cast<double>(m * kRows / 4 * kCols) / seconds);
    }
    std::printf(" M=%lld %3.0f", static_cast<long long>(m), Median(rates));
  }
  std::printf(" GFLOP/s\n");
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  using namespace hearth;
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 5;
  std::mt19937 rng(2);
  std::vector<bf16> x(static_cast<size_t>(kTokensMax * kCols));
  FillGaussian(rng, x);
  for (const DType dtype : {DType::kF8E4M3, DType::kQ8_0, DType::kQ6_K, DType::kQ4_K, DType::kI4G32})
    Measure(dtype, SupportedIsas().back(), rounds, x);
}
