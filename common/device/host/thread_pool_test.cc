#include "common/device/host/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "common/device/host/task_board.h"

namespace hearth {
namespace {

TEST(ThreadPool, EveryTaskRunsOnceWhateverTheThreads) {
  for (int threads = 1; threads <= 5; ++threads) {
    ThreadPool pool({.num_threads = threads, .num_pools = 2});
    for (int round = 0; round < 200; ++round) {
      const int64_t tasks = round % 17;
      std::vector<std::atomic<int>> seen(17);
      pool.ParallelFor(true, tasks, [&](int64_t task, int worker) {
        EXPECT_LT(worker, threads);
        std::this_thread::yield();  // long enough for the others to come in
        seen[static_cast<size_t>(task)].fetch_add(1);
      });
      for (int64_t i = 0; i < 17; ++i) ASSERT_EQ(seen[static_cast<size_t>(i)].load(), i < tasks ? 1 : 0);
    }
  }
}

TEST(ThreadPool, WhatTasksWroteIsSeenByTheCaller) {
  ThreadPool pool({.num_threads = 4});
  std::vector<int64_t> plain(64, 0);
  for (int64_t round = 1; round <= 500; ++round) {
    pool.ParallelFor(true, 64, [&](int64_t task, int) { plain[static_cast<size_t>(task)] += task; });
    ASSERT_EQ(plain[63], 63 * round);
    ASSERT_EQ(plain[1], round);
  }
}

// A job that stays open until each thread has come: nobody sleeps through work for good.
TEST(ThreadPool, EveryThreadJoinsAJobThatLastsLongEnough) {
  ThreadPool pool({.num_threads = 4});
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> inside{0};
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    pool.Run(true, [&](int) {
      inside.fetch_add(1);
      while (inside.load() < 4 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
    });
    ASSERT_EQ(inside.load(), 4);
  }
}

TEST(ThreadPool, CallersTakeTurns) {
  ThreadPool pool({.num_threads = 3});
  int64_t guarded = 0;  // no lock of its own: the pool's turn is the lock
  auto caller = [&] {
    for (int i = 0; i < 300; ++i) pool.Run(false, [&](int) { ++guarded; });
  };
  std::thread other(caller);
  caller();
  other.join();
  EXPECT_EQ(guarded, 600);
}

// CPU time of this process, user and system.
std::chrono::nanoseconds CpuTime() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto of = [](const timeval& t) { return std::chrono::seconds(t.tv_sec) + std::chrono::microseconds(t.tv_usec); };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

// Spinning has a budget: who had work a moment ago costs nothing in the second after it.
TEST(ThreadPool, AnIdlePoolUsesNoCpu) {
  ThreadPool pool({.num_threads = 4, .num_pools = 2, .spin_ns = 200'000});
  for (int i = 0; i < 10; ++i) pool.ParallelFor(true, 64, [](int64_t, int) { std::this_thread::yield(); });
  const auto before = CpuTime();
  std::this_thread::sleep_for(std::chrono::seconds(1));
  EXPECT_LT(CpuTime() - before, std::chrono::milliseconds(5));
}

TEST(ThreadPool, WithFewerCoresThanThreadsNobodySpins) {
  EXPECT_EQ(ThreadPool({.num_threads = CoresOfThisProcess() + 1}).spin_ns(), 0);
  EXPECT_EQ(ThreadPool({.num_threads = 1, .spin_ns = 7}).spin_ns(), 7);
}

TEST(Spin, LastsAsLongAsItsBudget) {
  Spin none(0);
  EXPECT_FALSE(none.Again());
  const auto begin = std::chrono::steady_clock::now();
  for (Spin spin(2'000'000); spin.Again();) {
  }
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(2));
}

TEST(ThreadPool, PoolsAreNeverMoreThanThreads) {
  ThreadPool pool({.num_threads = 2, .num_pools = 8});
  EXPECT_EQ(pool.num_pools(), 2);
  EXPECT_EQ(pool.pool_of(0), 0);
  EXPECT_EQ(pool.pool_of(1), 1);
}

// Chains of ten tasks, each releasing the next: threads sleep on slots that are filled while they wait.
TEST(TaskBoard, TasksReleaseOthersUntilAllHaveRun) {
  constexpr int32_t kChains = 7;
  constexpr int32_t kLength = 10;
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool pool({.num_threads = threads});
    TaskBoard board;
    for (int round = 0; round < 100; ++round) {
      std::vector<int> step(kChains, 0);  // written by one chain's tasks only, one after the other
      board.Reset(kChains * kLength);
      for (int32_t chain = 0; chain < kChains; ++chain) board.Publish(chain * kLength, 1);
      pool.Run(true, [&](int) {
        for (int32_t task = board.Claim(pool.spin_ns()); task >= 0; task = board.Claim(pool.spin_ns())) {
          EXPECT_EQ(step[static_cast<size_t>(task / kLength)]++, task % kLength);
          std::this_thread::yield();
          if (task % kLength + 1 < kLength) board.Publish(task + 1, 1);
        }
      });
      for (int chain_step : step) ASSERT_EQ(chain_step, kLength);
    }
  }
}

}  // namespace
}  // namespace hearth
