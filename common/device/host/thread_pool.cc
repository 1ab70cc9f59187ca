#include "common/device/host/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <string>

namespace hearth {
namespace {

constexpr uint64_t kOpen = 1ull << 31;
constexpr uint64_t kInside = kOpen - 1;

void NameAndPin(std::thread& thread, const std::string& name, const std::vector<int>& cpus, int index) {
  pthread_setname_np(thread.native_handle(), name.c_str());
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpus[static_cast<size_t>(index) % cpus.size()], &set);
  // A refused pin costs speed, not correctness: the CPU may have been taken from our cpuset since it was listed.
  pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
}

}  // namespace

int CoresOfThisProcess() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return std::max(1, CPU_COUNT(&set));
}

ThreadPool::ThreadPool(const Options& options)
    : num_threads_(std::max(1, options.num_threads)),
      num_pools_(std::clamp(options.num_pools, 1, num_threads_)),
      spin_ns_(CoresOfThisProcess() >= num_threads_ ? options.spin_ns : 0),
      cpus_(options.cpus) {
  cpus_.resize(static_cast<size_t>(num_pools_));
  for (int worker = 1; worker < num_threads_; ++worker) {
    threads_.emplace_back([this, worker] { Loop(worker); });
    NameAndPin(threads_.back(), "pool" + std::to_string(pool_of(worker)) + "." + std::to_string(worker), cpus_[static_cast<size_t>(pool_of(worker))],
               worker / num_pools_);
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_release);
  job_.fetch_add(1, std::memory_order_acq_rel);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Run(bool parallel, absl::FunctionRef<void(int worker)> body) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  if (!parallel || threads_.empty()) {
    body(0);
    return;
  }
  body_ = &body;
  const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
  state_.store(static_cast<uint64_t>(job) << 32 | kOpen, std::memory_order_release);
  job_.store(job, std::memory_order_seq_cst);  // before notify looks for sleepers (task_board.h)
  job_.notify_all();
  body(0);
  // Close the door, then wait for those inside only: a thread that is late to wake is not waited for.
  uint64_t state = state_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  for (Spin spin(spin_ns_); (state & kInside) != 0; state = state_.load(std::memory_order_acquire)) {
    if (!spin.Again()) state_.wait(state, std::memory_order_acquire);
  }
}

void ThreadPool::ParallelFor(bool parallel, int64_t num_tasks, absl::FunctionRef<void(int64_t task, int worker)> body) {
  if (num_tasks <= 0) return;
  std::atomic<int64_t> next{0};
  Run(parallel && num_tasks > 1, [&](int worker) {
    for (int64_t task = next.fetch_add(1, std::memory_order_relaxed); task < num_tasks; task = next.fetch_add(1, std::memory_order_relaxed)) {
      body(task, worker);
    }
  });
}

void ThreadPool::Loop(int worker) {
  uint32_t seen = 0;
  while (true) {
    uint32_t job = job_.load(std::memory_order_acquire);
    for (Spin spin(spin_ns_); job == seen; job = job_.load(std::memory_order_acquire)) {
      if (!spin.Again()) job_.wait(seen, std::memory_order_acquire);
    }
    seen = job;
    if (stop_.load(std::memory_order_acquire)) return;
    uint64_t state = state_.load(std::memory_order_acquire);
    while ((state >> 32) == job && (state & kOpen) != 0) {
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      (*body_)(worker);
      const uint64_t before = state_.fetch_sub(1, std::memory_order_acq_rel);
      if ((before & kOpen) == 0 && (before & kInside) == 1) state_.notify_all();
      break;
    }
  }
}

}  // namespace hearth
