// The host device's threads: a fixed set, cut into pools (one per NUMA shard), that join the caller for one job at a time.
// Room: common/device/host. May touch: common/base. Threads: Run and ParallelFor from any thread; callers take turns.
// Nothing here decides a result: who runs a task is timing, what it computes is not (DESIGN section 7).
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/base/time.h"

namespace hearth {

// A wait's time on the core before it sleeps: as long as work comes again within it, nobody pays the 5 to 50 us of a wake-up; once it is used up the core
// is free. Measured by the clock: a pause instruction lasts 10 to 150 cycles, by CPU.
class Spin {
 public:
  explicit Spin(int64_t budget_ns) : budget_ns_(budget_ns) {}
  // Lets a moment pass; false once the budget is used up.
  bool Again() {
    if (budget_ns_ <= 0) return false;
    __builtin_ia32_pause();
    if (++looks_ % kLooksPerClock != 0) return true;
    const int64_t now_ns = MonotonicNowNs();
    if (end_ns_ == 0) end_ns_ = now_ns + budget_ns_;
    return now_ns < end_ns_;
  }

 private:
  static constexpr int kLooksPerClock = 16;
  const int64_t budget_ns_;
  int64_t end_ns_ = 0;  // counted from the first look at the clock, so that a short wait never looks
  int looks_ = 0;
};

// Cores that this thread may run on.
int CoresOfThisProcess();

class ThreadPool {
 public:
  struct Options {
    int num_threads = 1;                 // the caller is one of them
    int num_pools = 1;                   // at most num_threads; thread w belongs to pool w % num_pools
    std::vector<std::vector<int>> cpus;  // by pool: where its threads are pinned; empty: nowhere
    int64_t spin_ns = 50'000;            // how long a thread without work spins before it sleeps
  };
  explicit ThreadPool(const Options& options);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  int num_pools() const { return num_pools_; }
  int pool_of(int worker) const { return worker % num_pools_; }
  // How long a thread spins before it sleeps; 0 where this process may use fewer cores than the pool has threads.
  int64_t spin_ns() const { return spin_ns_; }

  // Calls body(worker) on the caller (worker 0) and on each thread that wakes before the caller is through; returns when all have returned.
  // So body must take its work from a shared counter until nothing is left. While worker 0 is in it every other thread still comes, so worker 0 alone
  // may wait for what only they can do (another pool's work).
  // parallel = false: on the caller alone, but still one job at a time, so that per-worker scratch has one user.
  void Run(bool parallel, absl::FunctionRef<void(int worker)> body);
  // body(task, worker) once for each task in [0, num_tasks).
  void ParallelFor(bool parallel, int64_t num_tasks, absl::FunctionRef<void(int64_t task, int worker)> body);

 private:
  void Loop(int worker);

  int num_threads_;
  int num_pools_;
  int64_t spin_ns_;
  std::vector<std::vector<int>> cpus_;
  std::mutex run_mutex_;
  absl::FunctionRef<void(int)>* body_ = nullptr;  // written while no thread can join, read after joining
  std::atomic<uint64_t> state_{0};                // job number << 32 | open bit | threads inside
  std::atomic<uint32_t> job_{0};                  // bumped per job: what sleeping threads wait on
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace hearth
