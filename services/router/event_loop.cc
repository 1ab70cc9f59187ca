#include "services/router/event_loop.h"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>

#include <utility>

namespace hearth::router {

struct EventLoop::Impl {
  explicit Impl(int pool_threads) : pool(static_cast<size_t>(pool_threads)) {}
  using Guard = boost::asio::executor_work_guard<boost::asio::io_context::executor_type>;
  boost::asio::io_context io{1};
  Guard guard{io.get_executor()};
  boost::asio::thread_pool pool;
};

EventLoop::EventLoop(int pool_threads) : impl_(std::make_unique<Impl>(pool_threads)) {}
EventLoop::~EventLoop() { DrainPool(); }

void EventLoop::Run() { impl_->io.run(); }
void EventLoop::Stop() {
  boost::asio::post(impl_->io, [this] { impl_->guard.reset(); });
}
std::shared_ptr<void> EventLoop::KeepRunning() { return std::make_shared<Impl::Guard>(impl_->io.get_executor()); }
void EventLoop::Post(std::function<void()> work) { boost::asio::post(impl_->io, std::move(work)); }
void EventLoop::Offload(std::function<void()> work) { boost::asio::post(impl_->pool, std::move(work)); }
void EventLoop::DrainPool() { impl_->pool.join(); }
boost::asio::io_context& EventLoop::io() { return impl_->io; }

std::shared_ptr<void> EventLoop::After(absl::Duration delay, std::function<void()> work) {
  // The handler holds a flag, not the timer: dropping the handle destroys the timer, whose handler then comes back with an error.
  auto timer = std::make_shared<boost::asio::steady_timer>(impl_->io, absl::ToChronoNanoseconds(delay));
  auto live = std::make_shared<bool>(true);
  timer->async_wait([live, work = std::move(work)](const boost::system::error_code& error) {
    if (!error && *live) work();
  });
  return std::shared_ptr<void>(timer.get(), [timer, live](void*) mutable {
    *live = false;  // the timer may have fired already, with its handler waiting in the queue
    timer.reset();
  });
}

}  // namespace hearth::router
