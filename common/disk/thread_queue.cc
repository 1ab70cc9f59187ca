#include <errno.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "common/disk/read_queue.h"

namespace hearth {
namespace {

class ThreadQueue : public ReadQueue {
 public:
  explicit ThreadQueue(int64_t depth) : depth_(depth) {
    for (int64_t i = 0; i < depth; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~ThreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      waiting_.clear();
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::string_view kind() const override { return "threads"; }
  int64_t depth() const override { return depth_; }

  void Begin(const QueuedRead& read) override {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(read);
    }
    work_.notify_one();
  }

  void AwaitEnded(int64_t timeout_ns, std::vector<EndedRead>& ended) override {
    std::unique_lock lock(mutex_);
    if (ended_.empty() && timeout_ns > 0) {
      an_end_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return !ended_.empty(); });
    }
    ended.insert(ended.end(), ended_.begin(), ended_.end());
    ended_.clear();
  }

 private:
  void Work() {
    pthread_setname_np(pthread_self(), "disk-reader");
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (stop_) return;
      const QueuedRead read = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      ssize_t result;
      do {
        result = pread(read.fd, read.to, read.bytes, static_cast<off_t>(read.offset));
      } while (result < 0 && errno == EINTR);
      const int64_t outcome = result < 0 ? -errno : result;
      lock.lock();
      ended_.push_back({read.tag, outcome});
      an_end_.notify_one();
    }
  }

  const int64_t depth_;
  std::mutex mutex_;
  std::condition_variable work_, an_end_;
  bool stop_ = false;
  std::deque<QueuedRead> waiting_;
  std::vector<EndedRead> ended_;
  std::vector<std::thread> threads_;  // last: they use the others
};

}  // namespace

std::unique_ptr<ReadQueue> MakeThreadQueue(int64_t depth) { return std::make_unique<ThreadQueue>(depth); }

}  // namespace hearth
