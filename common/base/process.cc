#include "common/base/process.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace hearth {
namespace {

std::atomic<bool> g_stop_requested{false};

// The fields of /proc/<pid>/stat behind the command name, which may itself hold blanks and brackets.
std::vector<std::string> StatFields(pid_t pid) {
  std::ifstream in(absl::StrCat("/proc/", pid, "/stat"));
  std::stringstream text;
  text << in.rdbuf();
  const std::string all = text.str();
  const size_t close = all.rfind(')');
  if (close == std::string::npos) return {};
  return absl::StrSplit(all.substr(close + 2), ' ');
}

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

absl::StatusOr<ProcessId> ProcessOf(pid_t pid) {
  const std::vector<std::string> fields = StatFields(pid);
  ProcessId id{static_cast<int32_t>(pid), 0};
  // Field 3 (state) is the first behind the name; field 22 (starttime) is the twentieth.
  if (fields.size() < 20 || !absl::SimpleAtoi(fields[19], &id.start_ticks) || fields[0] == "Z" || fields[0] == "X") {
    return absl::NotFoundError(absl::StrCat("there is no process ", pid));
  }
  return id;
}

ProcessId SelfProcess() {
  static const ProcessId self = *ProcessOf(getpid());
  return self;
}

bool IsAlive(const ProcessId& id) {
  const absl::StatusOr<ProcessId> now = ProcessOf(id.pid);
  return now.ok() && now->start_ticks == id.start_ticks;
}

ProcessWatch::ProcessWatch(const ProcessId& id) : id_(id), pidfd_(static_cast<int>(syscall(SYS_pidfd_open, id.pid, 0))) {
  // Opened after it exited and its number went to another: that is no watch of it.
  if (pidfd_ >= 0 && !IsAlive(id_)) {
    close(pidfd_);
    pidfd_ = -1;
  }
}

ProcessWatch::~ProcessWatch() {
  if (pidfd_ >= 0) close(pidfd_);
}

bool ProcessWatch::Exited() const {
  if (pidfd_ < 0) return !IsAlive(id_);
  pollfd ready{.fd = pidfd_, .events = POLLIN, .revents = 0};
  return poll(&ready, 1, 0) > 0;
}

void HoldStopSignals() {
  const sigset_t set = StopSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

void InstallStopSignals(std::function<void()> on_stop) {
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  HoldStopSignals();
  std::thread([set = StopSignals(), on_stop = std::move(on_stop)] {
    int sig = 0;
    sigwait(&set, &sig);
    g_stop_requested.store(true);
    std::thread(on_stop).detach();
    sigwait(&set, &sig);
    _exit(128 + sig);
  }).detach();
}

bool StopRequested() { return g_stop_requested.load(); }

void StopEvent::Set() {
  std::lock_guard lock(mutex_);
  set_ = true;
  changed_.notify_all();
}

bool StopEvent::IsSet() const {
  std::lock_guard lock(mutex_);
  return set_;
}

void StopEvent::Wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return set_; });
}

bool StopEvent::WaitFor(std::chrono::microseconds time) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return set_; });
}

void NotifyReady(std::string_view status) { sd_notifyf(0, "READY=1\nSTATUS=%.*s", static_cast<int>(status.size()), status.data()); }
void NotifyStatus(std::string_view status) { sd_notifyf(0, "STATUS=%.*s", static_cast<int>(status.size()), status.data()); }
void NotifyStopping() { sd_notify(0, "STOPPING=1"); }
void NotifyWatchdog() { sd_notify(0, "WATCHDOG=1"); }
void NotifyExtendTimeout(int64_t microseconds) { sd_notifyf(0, "EXTEND_TIMEOUT_USEC=%lld", static_cast<long long>(microseconds)); }

int64_t WatchdogIntervalUs() {
  uint64_t usec = 0;
  return sd_watchdog_enabled(0, &usec) > 0 ? static_cast<int64_t>(usec / 2) : 0;
}

}  // namespace hearth
