// A list of tasks where some become ready only while others run: threads claim in the order of publication and sleep when none is ready.
// Room: common/device/host. May touch: common/base. Threads: Publish and Claim from any; Reset while nobody else is here.
// A thread that holds a ticket waits only for tasks that another thread is running, so a board whose tasks form no cycle always drains.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "common/device/host/thread_pool.h"

namespace hearth {

class TaskBoard {
 public:
  // `total` tasks will be published in all.
  void Reset(int64_t total) {
    if (total > capacity_) {
      slots_ = std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(total));
      capacity_ = total;
    }
    for (int64_t i = 0; i < total; ++i) slots_[i].store(kEmpty, std::memory_order_relaxed);
    total_ = total;
    head_.store(0, std::memory_order_relaxed);
    tail_.store(0, std::memory_order_relaxed);
  }

  // Tasks first .. first + count - 1 are ready.
  void Publish(int32_t first, int32_t count) {
    int64_t slot = tail_.fetch_add(count, std::memory_order_relaxed);
    for (int32_t i = 0; i < count; ++i, ++slot) {
      // Sequentially consistent: libstdc++'s notify looks first whether anybody waits, and a look that overtakes the store in the store buffer
      // would miss one who goes to sleep just then.
      slots_[slot].store(first + i, std::memory_order_seq_cst);
      slots_[slot].notify_one();
    }
  }

  // The next task, or -1 once all have been claimed.
  int32_t Claim(int64_t spin_ns) {
    // The counter stops growing at the end, however often the end is asked for.
    if (head_.load(std::memory_order_relaxed) >= total_) return -1;
    const int64_t ticket = head_.fetch_add(1, std::memory_order_relaxed);
    if (ticket >= total_) return -1;
    int32_t task = slots_[ticket].load(std::memory_order_acquire);
    for (Spin spin(spin_ns); task == kEmpty; task = slots_[ticket].load(std::memory_order_acquire)) {
      if (!spin.Again()) slots_[ticket].wait(kEmpty, std::memory_order_acquire);
    }
    return task;
  }

 private:
  static constexpr int32_t kEmpty = -1;
  std::unique_ptr<std::atomic<int32_t>[]> slots_;
  int64_t capacity_ = 0;
  int64_t total_ = 0;
  std::atomic<int64_t> head_{0};
  std::atomic<int64_t> tail_{0};
};

}  // namespace hearth
