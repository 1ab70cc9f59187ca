// Processes as the node sees them: identity that survives pid reuse, stop signals, the service manager.
// Room: common/base.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

#include "common/base/status.h"

namespace hearth {

// Exit codes of every hearth program; deploy/systemd lists kExitConfig in RestartPreventExitStatus.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitConfig = 78;  // EX_CONFIG: restarting cannot mend it

// A process named so that a reused pid is told apart: pid and its start time in clock ticks since boot (/proc/<pid>/stat, field 22).
struct ProcessId {
  int32_t pid = 0;
  uint64_t start_ticks = 0;
  friend bool operator==(const ProcessId&, const ProcessId&) = default;
};
ProcessId SelfProcess();
absl::StatusOr<ProcessId> ProcessOf(pid_t pid);  // NotFound when there is none
bool IsAlive(const ProcessId& id);               // false for zombies and for a pid that now names another process

// Whether a process has exited: by a pidfd, which costs a system call to ask, or by /proc where the kernel gives none (a container's filter).
class ProcessWatch {
 public:
  explicit ProcessWatch(const ProcessId& id);
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;
  ~ProcessWatch();
  bool Exited() const;

 private:
  const ProcessId id_;
  int pidfd_ = -1;  // -1: none
};

// From here on a SIGTERM or SIGINT waits for InstallStopSignals instead of ending the process. The first statement of main: a stop that
// comes while the process starts is then a stop like any other, with its exit code.
void HoldStopSignals();
// SIGTERM and SIGINT set the first flag, a second one ends the process at once; SIGHUP and SIGPIPE are ignored.
// Call once, before any thread is made. `on_stop` runs on a thread of its own, once.
void InstallStopSignals(std::function<void()> on_stop);
bool StopRequested();

// Set once, by the stop signals' thread; waited for by main. That thread outlives main, so what its callback touches must too: an event with
// static storage, or one that the callback shares.
class StopEvent {
 public:
  void Set();
  bool IsSet() const;
  void Wait();
  bool WaitFor(std::chrono::microseconds time);  // whether it is set

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

// sd_notify, silent where there is no service manager.
void NotifyReady(std::string_view status);
void NotifyStatus(std::string_view status);
void NotifyStopping();
void NotifyWatchdog();
void NotifyExtendTimeout(int64_t microseconds);
// Half of WatchdogSec in microseconds, 0 when the manager watches nothing.
int64_t WatchdogIntervalUs();

}  // namespace hearth
