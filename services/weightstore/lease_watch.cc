// pidfds by plain system calls: the C library of Debian 12 has no header for them that C++ can use without care.
#include "services/weightstore/lease_watch.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/base/logging.h"
#include "common/trace/trace.h"

namespace hearth {

struct LeaseWatch::Watched {
  ProcessId process;
  std::string name;
  int pidfd = -1;  // -1: the kernel gives none (a container's filter); /proc is asked each tick
  uint64_t connection = 0;
  uint64_t attempt = 0;
  Clock::time_point last_beat = Clock::now();
  std::optional<Clock::time_point> suspect_since;
  std::string needed;  // why, while suspect
  bool killed = false;

  ~Watched() {
    if (pidfd >= 0) close(pidfd);
  }
};

LeaseWatch::LeaseWatch(Callbacks callbacks) : callbacks_(std::move(callbacks)), wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  thread_ = std::thread([this] { Run(); });
}

LeaseWatch::~LeaseWatch() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  eventfd_write(wake_fd_, 1);
  thread_.join();
  close(wake_fd_);
}

void LeaseWatch::Add(uint64_t lease, const ProcessId& process, const std::string& name) {
  auto watched = std::make_unique<Watched>();
  watched->process = process;
  watched->name = name;
  watched->pidfd = static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0));
  // The pid may have been given to another process in between; then this one is gone, and /proc says so at the next tick.
  if (watched->pidfd >= 0 && !IsAlive(process)) {
    close(watched->pidfd);
    watched->pidfd = -1;
  }
  std::lock_guard lock(mutex_);
  watched_.try_emplace(lease, std::move(watched));
  eventfd_write(wake_fd_, 1);
}

void LeaseWatch::Remove(uint64_t lease) {
  std::lock_guard lock(mutex_);
  watched_.erase(lease);
}

absl::Status LeaseWatch::Bind(uint64_t lease, uint64_t connection, uint64_t attempt) {
  std::lock_guard lock(mutex_);
  const auto it = watched_.find(lease);
  if (it == watched_.end()) return absl::NotFoundError(absl::StrCat("lease ", lease, " has ended: attach anew"));
  Watched& w = *it->second;
  if (attempt != 0 && attempt <= w.attempt) return absl::CancelledError("a later Attach of this process has overtaken this one");
  if (w.suspect_since && !w.killed) {
    spdlog::info("{} (process {}) is back", w.name, w.process.pid);
  }
  w.attempt = attempt;
  w.connection = connection;
  w.last_beat = Clock::now();
  w.suspect_since.reset();
  w.needed.clear();
  return absl::OkStatus();
}

void LeaseWatch::Unbind(uint64_t lease, uint64_t connection) {
  std::lock_guard lock(mutex_);
  const auto it = watched_.find(lease);
  if (it == watched_.end() || it->second->connection != connection) return;
  it->second->connection = 0;
  if (!it->second->suspect_since) it->second->suspect_since = Clock::now();
}

void LeaseWatch::Beat(uint64_t lease, uint64_t connection) {
  std::lock_guard lock(mutex_);
  const auto it = watched_.find(lease);
  if (it == watched_.end() || it->second->connection != connection) return;
  it->second->last_beat = Clock::now();
  if (it->second->suspect_since) spdlog::info("{} (process {}) beats again", it->second->name, it->second->process.pid);
  it->second->suspect_since.reset();
  it->second->needed.clear();
}

void LeaseWatch::Need(uint64_t lease, const std::string& why) {
  std::lock_guard lock(mutex_);
  const auto it = watched_.find(lease);
  if (it != watched_.end() && it->second->suspect_since) it->second->needed = why;
}

LeaseWatch::View LeaseWatch::Look(uint64_t lease) const {
  std::lock_guard lock(mutex_);
  const auto it = watched_.find(lease);
  if (it == watched_.end()) return {};
  return {true, it->second->suspect_since.has_value(), std::chrono::duration<double>(Clock::now() - it->second->last_beat).count()};
}

void LeaseWatch::KillIfDue(uint64_t lease, Watched& w, Clock::time_point now) {
  if (w.killed || w.needed.empty() || now - *w.suspect_since < kSuspectGrace) return;
  spdlog::warn("killing {} (process {}): silent for {:.1f} s, and {}", w.name, w.process.pid,
               std::chrono::duration<double>(now - w.last_beat).count(), w.needed);
  // By the pidfd, so that it can't be another process of the same number. Without one, the check just before has to do.
  const int rc = w.pidfd >= 0 ? static_cast<int>(syscall(SYS_pidfd_send_signal, w.pidfd, SIGKILL, nullptr, 0))
                              : (IsAlive(w.process) ? kill(w.process.pid, SIGKILL) : 0);
  if (rc != 0) {
    if (auto permit = LogAllowed(absl::StrCat("kill-", lease), 2)) {
      spdlog::error("killing {} (process {}): {}; its pages stay its own{}", w.name, w.process.pid, strerror(errno), permit->Note());
    }
    return;
  }
  w.killed = true;
}

void LeaseWatch::Run() {
  const TraceTrack track = TraceTrackNamed("leases");
  Clock::time_point next_tick = Clock::now() + kTick;
  while (true) {
    std::vector<pollfd> fds = {{wake_fd_, POLLIN, 0}};
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
      for (const auto& [lease, w] : watched_) {
        if (w->pidfd >= 0) fds.push_back({w->pidfd, POLLIN, 0});
      }
    }
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next_tick - Clock::now());
    poll(fds.data(), fds.size(), static_cast<int>(std::max<int64_t>(0, wait.count())));
    eventfd_t ignored;
    eventfd_read(wake_fd_, &ignored);

    const Clock::time_point now = Clock::now();
    std::vector<uint64_t> exited;
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
      for (const auto& [lease, w] : watched_) {
        pollfd one{w->pidfd, POLLIN, 0};
        const bool gone = w->pidfd >= 0 ? poll(&one, 1, 0) == 1 : !IsAlive(w->process);
        if (gone) {
          spdlog::info("{} (process {}) has exited", w->name, w->process.pid);
          exited.push_back(lease);
          continue;
        }
        if (!w->suspect_since && now - w->last_beat > kBeatLost) {
          w->suspect_since = now;
          spdlog::warn("{} (process {}) is suspect: no beat for {:.1f} s", w->name, w->process.pid,
                       std::chrono::duration<double>(now - w->last_beat).count());
        }
        if (w->suspect_since) KillIfDue(lease, *w, now);
      }
      for (const uint64_t lease : exited) watched_.erase(lease);
    }
    for (const uint64_t lease : exited) {
      const TraceSpan span(track, "reclaim", "lease", static_cast<int64_t>(lease));
      callbacks_.on_exit(lease);
    }
    if (now >= next_tick) {
      next_tick = now + kTick;
      callbacks_.on_tick();
    }
  }
}

}  // namespace hearth
