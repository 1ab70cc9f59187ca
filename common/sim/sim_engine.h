// Virtual time: streams of timed work on shared resources, and actors (threads) of which one runs at a time, chosen by (time, id). No real clock is read
// and no real race decides anything, so the same program gives the same timeline to the byte.
// Room: common/sim. May touch: common/base. Threads: the one that made the engine is actor 0; Spawn makes more. Everything here is called by the actor
// that holds the baton, which is whoever runs; a wait passes it on. An actor must not hold a lock across a call that waits or enqueues.
//
// Time moves only when the baton is passed: to the next actor that is due, or to the next op that ends, whichever is sooner (ops first). Each start and
// end of an op shares its resources anew (fair_share.h). When all actors wait, no op runs and no deadline is set, the engine says who waits for what
// and aborts: the same program would hang for good on a real device.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/sim/fair_share.h"
#include "common/trace/timeline.h"

namespace hearth {

// A part of an op: nothing but time first, then what it asks of resources.
struct SimPhase {
  int64_t fixed_ns = 0;
  Claim claim;     // may be empty
  int track = -1;  // of the timeline, where it is not the stream's own
};

struct SimOp {
  std::string name;
  std::string detail;  // shapes, for the timeline
  std::vector<SimPhase> phases;
};

class SimEngine {
 public:
  static constexpr int64_t kNever = INT64_MAX;

  // A place in a stream's order, passed once everything before it is done.
  struct Mark {
    bool passed = false;
  };

  explicit SimEngine(bool record) : record_(record) { AddActor("main"); }
  ~SimEngine();

  int64_t now_ns() const { return now_ns_; }
  int AddResource(std::string name, Division division = Division::kEvenly);
  // Seconds that the resource was busy so far, weighted by how much of it.
  double busy_seconds(int resource) const { return resources_[static_cast<size_t>(resource)].busy_s; }
  const std::string& resource_name(int resource) const { return resources_[static_cast<size_t>(resource)].name; }
  int num_resources() const { return static_cast<int>(resources_.size()); }
  const Timeline& timeline() const { return timeline_; }
  int AddTrack(const std::string& process, const std::string& name) { return timeline_.AddTrack(process, name); }

  int AddStream(const std::string& device, const std::string& name);
  // The op begins when its turn in the stream comes. `cost_ns` is the caller's time: it goes on after that.
  void Enqueue(int stream, SimOp op, int64_t cost_ns);
  std::shared_ptr<Mark> AddMark(int stream);
  // Later work of the stream begins after the mark is passed.
  void WaitFor(int stream, std::shared_ptr<Mark> mark);

  // The caller waits until `ready` holds or the clock reaches deadline_ns. `ready` is asked whenever the baton is passed and must only look.
  void Sleep(std::function<bool()> ready, int64_t deadline_ns, std::string waits_for);

  // A new actor, due now: it runs when the caller next waits. Its thread is joined by Join, which waits for its end.
  int Spawn(const std::string& name, std::function<void()> body);
  void Join(int actor);

 private:
  struct Resource {
    std::string name;
    double busy_s = 0;
  };
  struct Item {  // one of the three
    std::unique_ptr<SimOp> op;
    std::shared_ptr<Mark> mark;
    std::shared_ptr<Mark> wait;
  };
  struct Running {
    int stream = 0;
    size_t phase = 0;
    bool fixed = true;     // in the phase's fixed part
    double left = 1;       // of the phase's claim
    double rate = 0;       // a second
    int64_t ends_ns = 0;   // of the fixed part, or of the claim at this rate
    int64_t begin_ns = 0;  // of the phase
  };
  struct StreamState {
    std::string name;
    int track = 0;
    std::deque<Item> items;
    bool running = false;
  };
  // Of an actor: it rests until another one passes it the baton.
  class Turn {
   public:
    void Pass();
    void Await();

   private:
    std::mutex mutex_;
    std::condition_variable wake_;
    bool passed_ = false;
  };
  struct ActorState {
    std::string name;
    std::function<bool()> ready;
    int64_t wake_ns = 0;
    std::string waits_for;
    bool ended = false;
    Turn turn;
    std::thread thread;
  };

  int AddActor(std::string name);
  void PassBaton();
  [[noreturn]] void Deadlock() const;
  const SimPhase& PhaseOf(const Running& running) const;
  void Settle();
  void BeginPhase(Running& running);
  // Returns whether the op has ended.
  bool EndPart(Running& running);
  void Share();
  int64_t NextEnd() const;
  void AdvanceTo(int64_t ns);

  const bool record_;
  Timeline timeline_;
  std::vector<Resource> resources_;
  std::vector<Division> divisions_;  // by resource
  std::deque<StreamState> streams_;
  std::vector<Running> running_;  // in the order of their starts
  int64_t now_ns_ = 0;

  std::deque<ActorState> actors_;  // whoever has the baton has all of this
  int current_ = 0;
};

}  // namespace hearth
