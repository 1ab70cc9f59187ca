// The router's loop: one thread that owns connections, requests, queue and links, and a small pool for what would hold it up.
// Room: services/router. May touch: Boost.Asio, common/base. Not: requests.
// Threads: Post, After and Offload may be called by any; work given to Post and After runs on the loop, one piece at a time, so that
// what lives there needs no lock. gRPC's threads and the pool only ever hand work over.
#pragma once

#include <functional>
#include <memory>

#include "absl/time/time.h"

namespace boost::asio {
class io_context;
}

namespace hearth::router {

class EventLoop {
 public:
  // `pool_threads`: for tokenizing and for calls of the store that wait.
  explicit EventLoop(int pool_threads);
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Runs until Stop; from one thread.
  void Run();
  // Run returns when nothing is outstanding any more: close sockets and drop timers before.
  void Stop();
  // While the token lives Run does not return: held by gRPC calls, whose last word still comes through Post.
  std::shared_ptr<void> KeepRunning();

  void Post(std::function<void()> work);
  // Runs `work` once after `delay` unless the handle is dropped first.
  [[nodiscard]] std::shared_ptr<void> After(absl::Duration delay, std::function<void()> work);
  // Runs `work` on the pool.
  void Offload(std::function<void()> work);
  // Waits for the pool's work and takes no more. Call before what that work uses goes away.
  void DrainPool();

  boost::asio::io_context& io();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hearth::router
