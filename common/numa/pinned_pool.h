// Threads that stay on their CPUs and run one function together: the shape of work on a node's memory.
// Room: common/numa. May touch: common/base. Threads: Run from one thread at a time.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace hearth {

class PinnedPool {
 public:
  // One thread for each entry of `cpus`, on that CPU. Where pinning is refused, the thread runs unpinned and notes()
  // says so.
  explicit PinnedPool(std::vector<int> cpus);
  ~PinnedPool();  // waits for a Run in progress
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // Calls work(thread) once on every thread and returns when all are done. `work` must not throw.
  void Run(const std::function<void(int thread)>& work);
  int size() const { return static_cast<int>(threads_.size()); }
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void Loop(int thread);

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable finished_;
  const std::function<void(int)>* work_ = nullptr;  // guarded by mutex_, like all below
  uint64_t round_ = 0;
  int running_ = 0;
  bool stopping_ = false;
  std::vector<std::string> notes_;  // const after the constructor
  std::vector<std::thread> threads_;
};

}  // namespace hearth
