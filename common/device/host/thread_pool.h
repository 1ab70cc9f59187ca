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

namespace hearth {

// Tells the core that this is a spin loop.
inline void CpuRelax() { __builtin_ia32_pause(); }

class ThreadPool {
 public:
  struct Options {
    int num_threads = 1;                 // the caller is one of them
    int num_pools = 1;                   // at most num_threads; thread w belongs to pool w % num_pools
    std::vector<std::vector<int>> cpus;  // by pool: where its threads are pinned; empty: nowhere
  };
  explicit ThreadPool(const Options& options);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  int num_pools() const { return num_pools_; }
  int pool_of(int worker) const { return worker % num_pools_; }
  // How often a thread looks again before it sleeps; 0 where the machine has fewer cores than threads.
  int spins() const { return spins_; }

  // Calls body(worker) on the caller (worker 0) and on each thread that wakes before the caller is through; returns when all have returned.
  // So body must take its work from a shared counter until nothing is left, and never wait for another worker to arrive.
  // parallel = false: on the caller alone, but still one job at a time, so that per-worker scratch has one user.
  void Run(bool parallel, absl::FunctionRef<void(int worker)> body);
  // body(task, worker) once for each task in [0, num_tasks).
  void ParallelFor(bool parallel, int64_t num_tasks, absl::FunctionRef<void(int64_t task, int worker)> body);

 private:
  void Loop(int worker);

  int num_threads_;
  int num_pools_;
  int spins_;
  std::vector<std::vector<int>> cpus_;
  std::mutex run_mutex_;
  absl::FunctionRef<void(int)>* body_ = nullptr;  // written while no thread can join, read after joining
  std::atomic<uint64_t> state_{0};                // job number << 32 | open bit | threads inside
  std::atomic<uint32_t> job_{0};                  // bumped per job: what sleeping threads wait on
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace hearth
