// A pool of pinned threads. Contract: pinned_pool.h. Room: common/numa.
#include "common/numa/pinned_pool.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "absl/strings/str_cat.h"

namespace hearth {

PinnedPool::PinnedPool(std::vector<int> cpus) {
  for (size_t i = 0; i < cpus.size(); ++i) {
    threads_.emplace_back(&PinnedPool::Loop, this, static_cast<int>(i));
    cpu_set_t* set = CPU_ALLOC(cpus[i] + 1);
    const size_t set_bytes = CPU_ALLOC_SIZE(cpus[i] + 1);
    CPU_ZERO_S(set_bytes, set);
    CPU_SET_S(cpus[i], set_bytes, set);
    if (const int error = pthread_setaffinity_np(threads_.back().native_handle(), set_bytes, set); error != 0) {
      notes_.push_back(absl::StrCat("a thread can't be pinned to CPU ", cpus[i], " (", strerror(error),
                                    "): it runs where the kernel puts it"));
    }
    CPU_FREE(set);
  }
}

PinnedPool::~PinnedPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void PinnedPool::Run(const std::function<void(int)>& work) {
  std::unique_lock<std::mutex> lock(mutex_);
  work_ = &work;
  running_ = size();
  ++round_;
  start_.notify_all();
  finished_.wait(lock, [&] { return running_ == 0; });
  work_ = nullptr;
}

void PinnedPool::Loop(int thread) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stopping_ || round_ != seen; });
    if (round_ == seen) return;
    seen = round_;
    const std::function<void(int)>* work = work_;
    lock.unlock();
    (*work)(thread);
    lock.lock();
    if (--running_ == 0) finished_.notify_one();
  }
}

}  // namespace hearth
