#include "common/device/host/host_device.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/ceil_div.h"
#include "common/base/time.h"
#include "common/device/host/host_stream.h"
#include "common/device/host/traced_ops.h"

namespace hearth {
namespace {

// What must be looked at without a Notify (a stop, a peer's death) is looked at this often.
constexpr int64_t kLookNs = 100'000'000;
constexpr size_t kHugePage = size_t{2} << 20;

class HostEventCount : public HostSignal {
 public:
  uint64_t Current() const override { return count_.load(std::memory_order_acquire); }
  void Notify() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      count_.fetch_add(1, std::memory_order_release);
    }
    changed_.notify_all();
  }
  void WaitFor(uint64_t seen, int64_t ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::nanoseconds(ns), [&] { return count_.load(std::memory_order_relaxed) != seen; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<uint64_t> count_{0};
};

class HostActor : public Actor {
 public:
  HostActor(const std::string& name, std::function<void()> body, const std::vector<int>& cpus) : thread_(std::move(body)) {
    pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
    if (cpus.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread_.native_handle(), sizeof(set), &set);  // refused: costs speed only
  }
  ~HostActor() override { thread_.join(); }

 private:
  std::thread thread_;
};

// Outlives the device if a buffer does: a buffer gives its bytes back whenever it goes.
struct Budget {
  uint64_t limit = UINT64_MAX;
  std::atomic<uint64_t> used{0};
  std::atomic<uint64_t> peak{0};

  void Reached(uint64_t bytes) {
    uint64_t before = peak.load(std::memory_order_relaxed);
    while (before < bytes && !peak.compare_exchange_weak(before, bytes, std::memory_order_relaxed)) {
    }
  }
};

std::string SupportedNames(Numerics numerics) {
  return absl::StrJoin(SupportedIsas(numerics), " ", [](std::string* out, Isa isa) { absl::StrAppend(out, Sv(IsaName(isa))); });
}

class HostDeviceImpl : public HostDevice {
 public:
  HostDeviceImpl(const HostDeviceOptions& options, Isa isa, int num_threads)
      : options_(options),
        kernels_(Kernels(isa)),
        pool_({.num_threads = num_threads, .num_pools = options.num_pools, .cpus = options.cpus, .spin_ns = options.spin_ns}),
        ops_(pool_, kernels_, options.parallel_work_min, options.link_bytes_per_s),
        budget_(std::make_shared<Budget>()) {
    if (options.memory_budget_bytes != 0) budget_->limit = options.memory_budget_bytes;
    caps_.kind = "host";
    caps_.activation_terms = options.activation_terms;
    caps_.kv_dtype = options.kv_dtype;
    caps_.numerics = HostNumerics(isa, options.activation_terms, options.kv_dtype);
    caps_.description =
        absl::StrCat(num_threads, num_threads == 1 ? " thread" : " threads",
                     pool_.num_pools() > 1 ? absl::StrCat(" in ", pool_.num_pools(), " pools") : "", ", ", Sv(IsaName(isa)),
                     options.activation_terms > 1 ? ", activations in two BF16 terms" : "", options.kv_dtype == DType::kF8E4M3 ? ", KV in FP8" : "",
                     isa == Isa::kAmx ? ", numerics fast" : "", " (supported: ", SupportedNames(options.numerics), ")");
    caps_.memory_budget_bytes = budget_->limit;
    caps_.num_threads = num_threads;
  }

  const DeviceCaps& caps() const override { return caps_; }
  Ops& ops() override { return ops_; }
  ThreadPool& pool() override { return pool_; }
  const KernelTable& kernels() const override { return kernels_; }
  int64_t parallel_work_min() const override { return options_.parallel_work_min; }
  bool fetch_ahead() const override { return ops_.host().fetch_ahead(); }
  void SetFetchAhead(bool on) override { ops_.host().SetFetchAhead(on); }
  void SetExpertEngine(std::unique_ptr<ExpertEngine> engine) override { ops_.host().SetExpertEngine(std::move(engine)); }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    const size_t rounded = (bytes + 63) / 64 * 64;
    uint64_t used = budget_->used.load(std::memory_order_relaxed);
    do {
      if (rounded > budget_->limit - used) {
        return absl::ResourceExhaustedError(absl::StrCat(
            "device memory: ", HumanBytes(static_cast<double>(rounded)), " needed, ", HumanBytes(static_cast<double>(budget_->limit - used)),
            " of the budget of ", HumanBytes(static_cast<double>(budget_->limit)), " left; raise the budget or use smaller batches"));
      }
    } while (!budget_->used.compare_exchange_weak(used, used + rounded, std::memory_order_relaxed));
    budget_->Reached(used + rounded);
    const bool large = rounded >= 2 * kHugePage;
    void* data = std::aligned_alloc(large ? kHugePage : 64, large ? CeilDiv(rounded, kHugePage) * kHugePage : std::max<size_t>(rounded, 64));
    if (data == nullptr) {
      budget_->used.fetch_sub(rounded, std::memory_order_relaxed);
      return absl::ResourceExhaustedError(
          absl::StrCat("the machine has no ", HumanBytes(static_cast<double>(rounded)), " of memory left for the host device"));
    }
    // Rows of a batch lie pages apart; in small pages a walk over a few columns of all rows misses the translations. Refused: costs speed only.
    if (large) madvise(data, rounded, MADV_HUGEPAGE);
    std::memset(data, 0, std::max<size_t>(rounded, 64));
    return Buffer(data, bytes, [data, rounded, budget = budget_] {
      std::free(data);
      budget->used.fetch_sub(rounded, std::memory_order_relaxed);
    });
  }

  DeviceMemory memory() const override {
    return {.budget_bytes = budget_->limit,
            .used_bytes = budget_->used.load(std::memory_order_relaxed),
            .peak_bytes = budget_->peak.load(std::memory_order_relaxed)};
  }

  std::unique_ptr<Stream> MakeStream(std::string name) override { return std::make_unique<HostStream>(std::move(name)); }
  std::unique_ptr<Event> MakeEvent() override { return std::make_unique<HostEvent>(); }
  // An engine's thread is the pool's worker 0 while it runs an op: it belongs where the first pool's threads do.
  std::unique_ptr<Actor> Spawn(std::string name, std::function<void()> body) override {
    return std::make_unique<HostActor>(name, std::move(body), options_.cpus.empty() ? std::vector<int>() : options_.cpus[0]);
  }
  std::unique_ptr<HostSignal> MakeSignal() override { return std::make_unique<HostEventCount>(); }

  WaitResult HostWait(HostSignal& signal, uint64_t seen, const WaitLimits& limits) override {
    HostEventCount& count = static_cast<HostEventCount&>(signal);
    while (true) {
      if (limits.stop != nullptr && limits.stop->stopped()) return WaitResult::kStopped;
      if (count.Current() != seen) return WaitResult::kSignalled;
      if (limits.peer_gone && limits.peer_gone()) return WaitResult::kPeerGone;
      const int64_t left = limits.deadline_ns == INT64_MAX ? INT64_MAX : limits.deadline_ns - Now();
      if (left <= 0) return WaitResult::kDeadline;
      count.WaitFor(seen, std::min(left, kLookNs));
    }
  }

  int64_t Now() const override { return MonotonicNowNs(); }

 private:
  const HostDeviceOptions options_;
  const KernelTable& kernels_;
  ThreadPool pool_;
  TracedHostOps ops_;
  std::shared_ptr<Budget> budget_;
  DeviceCaps caps_;
};

}  // namespace

// Rises when the order of a sum changes: KV pages of an older order, found in memory after an upgrade, are not shared.
constexpr int kSumOrders = 8;

std::string HostNumerics(Isa isa, int activation_terms, DType kv_dtype) {
  return absl::StrCat("host/", Sv(IsaName(isa)), isa == Isa::kAmx ? "/fast" : "/exact", activation_terms > 1 ? "2" : "",
                      kv_dtype == DType::kF8E4M3 ? "/kv8" : "", "/", kSumOrders);
}

absl::StatusOr<std::unique_ptr<HostDevice>> HostDevice::Create(const HostDeviceOptions& options) {
  if (options.isa == Isa::kAmx && options.numerics != Numerics::kFast) {
    return absl::FailedPreconditionError("host device: the amx kernels are not exact; ask for fast numerics (node.numerics = \"fast\")");
  }
  const std::vector<Isa> supported = SupportedIsas(options.numerics);
  const Isa isa = options.isa.value_or(supported.back());
  if (std::find(supported.begin(), supported.end(), isa) == supported.end()) {
    return absl::FailedPreconditionError(absl::StrCat("this CPU can't run the ", Sv(IsaName(isa)),
                                                      " kernels; it supports: ", SupportedNames(options.numerics), ". Choose one of these, or auto"));
  }
  if (options.activation_terms < 1 || options.activation_terms > 2) {
    return absl::InvalidArgumentError(absl::StrCat("host device: activations of ", options.activation_terms, " BF16 terms; supported: 1, 2"));
  }
  if (options.kv_dtype != DType::kBF16 && options.kv_dtype != DType::kF8E4M3) {
    return absl::InvalidArgumentError(absl::StrCat("host device: KV in ", Sv(DTypeName(options.kv_dtype)), "; supported: BF16, F8_E4M3"));
  }
  if (options.num_threads < 0 || options.num_pools < 1 || (!options.cpus.empty() && static_cast<int>(options.cpus.size()) != options.num_pools)) {
    return absl::InvalidArgumentError(
        absl::StrCat("host device: ", options.num_threads, " threads, ", options.num_pools, " pools, cores for ", options.cpus.size(),
                     " pools: threads can't be negative, there is at least one pool, and cores are ", "listed for each pool or for none"));
  }
  const int num_threads = options.num_threads > 0 ? options.num_threads : CoresOfThisProcess();
  return std::make_unique<HostDeviceImpl>(options, isa, num_threads);
}

}  // namespace hearth
