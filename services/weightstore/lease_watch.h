// Watches the processes behind leases: their pidfds, their beats, who is suspect, and who has to be killed because he is in the way.
// Room: services/weightstore. May touch: common/{trace,base}. Not: gRPC, the table. Threads: any; one thread of its own, on which the callbacks come.
//
//   bound (stream open, beats come) --no beat for kBeatLost, or the stream broke--> suspect --stream anew, or a beat--> bound
//   any --pidfd readable--> exited
//   suspect for kSuspectGrace and in somebody's way --SIGKILL--> exited
// A suspect may still be writing into its pages (a stopped process goes on where it was), so nothing of his is given away before he has exited.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "common/base/process.h"
#include "common/base/status.h"

namespace hearth {

class LeaseWatch {
 public:
  using Clock = std::chrono::steady_clock;
  // Four beats of the client's 500 ms: a busy machine loses one or two.
  static constexpr std::chrono::milliseconds kBeatLost{2000};
  // A client attaches anew within a second of noticing; ten leave room for a debugger, a snapshot of the machine, or a swap storm.
  static constexpr std::chrono::milliseconds kSuspectGrace{10000};
  static constexpr std::chrono::milliseconds kTick{250};

  struct Callbacks {
    std::function<void(uint64_t lease)> on_exit;  // its process is gone
    std::function<void()> on_tick;                // every kTick
  };
  struct View {
    bool known = false;
    bool suspect = false;
    double seconds_since_beat = 0;
  };

  explicit LeaseWatch(Callbacks callbacks);
  ~LeaseWatch();  // the thread has ended afterwards
  LeaseWatch(const LeaseWatch&) = delete;
  LeaseWatch& operator=(const LeaseWatch&) = delete;

  void Add(uint64_t lease, const ProcessId& process, const std::string& name);  // unbound; OK for one that is there
  void Remove(uint64_t lease);
  // The lease's stream is now on `connection`. Aborted when a later attempt of the process has bound it already.
  absl::Status Bind(uint64_t lease, uint64_t connection, uint64_t attempt);
  void Unbind(uint64_t lease, uint64_t connection);  // no effect if it is bound elsewhere by now
  void Beat(uint64_t lease, uint64_t connection);
  // Somebody waits for what this lease holds: if it is suspect, and stays so for the grace, its process is killed.
  void Need(uint64_t lease, const std::string& why);
  View Look(uint64_t lease) const;

 private:
  struct Watched;
  void Run();
  void KillIfDue(uint64_t lease, Watched& watched, Clock::time_point now);

  const Callbacks callbacks_;
  mutable std::mutex mutex_;
  std::map<uint64_t, std::unique_ptr<Watched>> watched_;
  bool stopping_ = false;
  int wake_fd_;
  std::thread thread_;
};

}  // namespace hearth
