#include "common/roofline/probe.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>

#include "absl/strings/str_format.h"
#include "common/base/time.h"
#include "common/device/host/host_device.h"
#include "common/device/host/limits.h"
#include "common/device/ops.h"
#include "common/numa/topology.h"

namespace hearth {
namespace {

constexpr int64_t kCols = 7168;      // DeepSeek-V3's hidden size
constexpr int64_t kGemvRows = 2048;  // an expert's
constexpr int64_t kGemmTokens = 512;
constexpr int64_t kBytesMin = 256 << 20;
constexpr int kRounds = 5;

std::string CpuName() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

// Anonymous memory, given back at the end.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : bytes_(bytes), data_(mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Memory() {
    if (ok()) munmap(data_, static_cast<size_t>(bytes_));
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  const int64_t bytes_;
  void* const data_;
};

double BestReadRate(int threads, const Memory& memory, int64_t bytes) {
  ThreadPool pool({.num_threads = threads});
  const MemoryRun run = {memory.data(), bytes};
  double best = 0;
  for (int round = 0; round < kRounds; ++round) best = std::max(best, static_cast<double>(bytes) / SecondsToRead(pool, {&run, 1}));
  return best * 1e-9;
}

// Median seconds of an op, over `steps` of them.
template <typename Enqueue>
double MedianSeconds(Device& device, Stream& stream, int steps, Enqueue enqueue) {
  std::vector<int64_t> ns;
  for (int step = 0; step < steps; ++step) {
    const int64_t begin = device.Now();
    enqueue(step);
    if (!stream.Synchronize().ok()) return 0;
    ns.push_back(device.Now() - begin);
  }
  std::nth_element(ns.begin(), ns.begin() + steps / 2, ns.end());
  return static_cast<double>(ns[static_cast<size_t>(steps / 2)]) * 1e-9;
}

// By the product's own kernels, over matrices that lie one behind the other.
void MeasureKernels(HostDevice& device, const Memory& memory, int64_t bytes, ProbeReport& report) {
  const std::unique_ptr<Stream> stream = device.MakeStream("probe");
  const int64_t matrix = kGemvRows * kCols;
  const int64_t count = bytes / matrix;
  const int64_t blocks = ScaleBlocks(kGemvRows) * ScaleBlocks(kCols);
  const std::vector<float> scales(static_cast<size_t>(blocks), 1e-3f);
  const std::vector<bf16> x(static_cast<size_t>(kGemmTokens * kCols), bf16{0x3c00});
  std::vector<float> y(static_cast<size_t>(kGemmTokens * kGemvRows));
  const auto linear = [&](int64_t at, Form form, int64_t m) {
    device.ops().Linear(*stream, {.form = form,
                                  .w = {.data = memory.data() + at * matrix,
                                        .dtype = DType::kF8E4M3,
                                        .rows = kGemvRows,
                                        .cols = kCols,
                                        .row_stride = kCols,
                                        .scales = scales.data(),
                                        .scale_stride = ScaleBlocks(kCols),
                                        .scale_row0 = 0},
                                  .terms = 1,
                                  .x = x.data(),
                                  .ldx = kCols,
                                  .m = m,
                                  .y = y.data(),
                                  .ldy = kGemvRows});
  };
  const double gemv_s =
      MedianSeconds(device, *stream, static_cast<int>(std::min<int64_t>(3 * count, 400)), [&](int step) { linear(step % count, Form::kDecode, 1); });
  report.gemv_gb_per_s = static_cast<double>(matrix) / gemv_s * 1e-9;
  const double gemm_s = MedianSeconds(device, *stream, 7, [&](int step) { linear(step % count, Form::kPrefill, kGemmTokens); });
  report.gemm_gflops = 2.0 * static_cast<double>(kGemmTokens * matrix) / gemm_s * 1e-9;
  report.peak_gflops = DotPeak(device.pool());
  report.op_us =
      MedianSeconds(device, *stream, 200, [&](int) { device.pool().ParallelFor(true, device.pool().num_threads(), [](int64_t, int) {}); }) * 1e6;
}

}  // namespace

absl::StatusOr<ProbeReport> ProbeThisMachine(int threads) {
  const Topology topology = DiscoverTopology();
  int64_t sockets = 0, cpus = 0;
  double memory_bytes = 0, free_bytes = 0;
  for (const NumaNode& node : topology.nodes) {
    memory_bytes += static_cast<double>(node.memory_bytes);
    free_bytes += static_cast<double>(node.free_bytes);
    if (node.cpus.empty() || node.memory_bytes == 0) continue;
    ++sockets;
    cpus += static_cast<int64_t>(node.cpus.size());
  }
  // Threads that take turns on a core measure the scheduler.
  threads = threads <= 0 ? CoresOfThisProcess() : std::min(threads, CoresOfThisProcess());
  sockets = std::max<int64_t>(sockets, 1);
  const int64_t cache = std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
  // Four times what caches may hold is read from memory.
  const int64_t wanted = std::max<int64_t>(4 * cache * sockets, 1 << 30);
  const int64_t bytes = std::min(wanted, static_cast<int64_t>(free_bytes / 4));
  if (bytes < kBytesMin) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s of memory are free; measuring wants four times %s", HumanBytes(free_bytes), HumanBytes(kBytesMin)));
  }
  const Memory memory(bytes);
  if (!memory.ok()) return absl::ResourceExhaustedError(absl::StrCat("no ", HumanBytes(static_cast<double>(bytes)), " of memory to measure with"));
  {
    // Written by all threads, so that pages lie where they are read; FP8 codes of all sizes but NaN.
    ThreadPool pool({.num_threads = threads});
    constexpr int64_t kPiece = 1 << 20;
    pool.ParallelFor(true, bytes / kPiece, [&](int64_t piece, int) {
      for (int64_t i = 0; i < kPiece; ++i) memory.data()[piece * kPiece + i] = static_cast<uint8_t>((piece + i * 37) % 0x70);
    });
  }

  ProbeReport report;
  for (int n = 1; n < threads; n *= 2) report.read_gb_per_s.emplace_back(n, BestReadRate(n, memory, bytes));
  report.read_gb_per_s.emplace_back(threads, BestReadRate(threads, memory, bytes));
  ASSIGN_OR_RETURN(const std::unique_ptr<HostDevice> device, HostDevice::Create({.num_threads = threads}));
  MeasureKernels(*device, memory, bytes, report);

  double read = 0;
  for (const auto& [n, rate] : report.read_gb_per_s) read = std::max(read, rate);
  const double peak = std::max(report.peak_gflops, report.gemm_gflops);
  HardwareProfile& p = report.profile;
  p.name = CpuName();
  p.source = absl::StrFormat("measured by hearth probe with %d threads", threads);
  p.cpu.name = p.name;
  p.cpu.sockets = sockets;
  p.cpu.cores = std::max<int64_t>(threads / sockets, 1);
  p.cpu.channels = 1;  // of unknown number: together they reach what was measured
  p.cpu.channel_gb_per_s = read / static_cast<double>(sockets);
  p.cpu.core_gb_per_s = report.read_gb_per_s.front().second;
  p.cpu.memory_gib = memory_bytes / static_cast<double>(sockets) / 1073741824.0;
  p.cpu.cache_mib = static_cast<double>(cache) / 1048576.0;
  p.cpu.bf16_gflops_per_core = peak / static_cast<double>(sockets * p.cpu.cores);
  p.cpu.memory_efficiency = std::clamp(report.gemv_gb_per_s / read, 1e-3, 1.0);
  p.cpu.compute_efficiency = std::clamp(report.gemm_gflops / peak, 1e-3, 1.0);
  p.cpu.op_us = report.op_us;
  return report;
}

}  // namespace hearth
