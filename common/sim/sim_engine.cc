#include "common/sim/sim_engine.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "common/base/check.h"

namespace hearth {
namespace {

// Nanoseconds: what is over by less than this is over.
constexpr double kRounding = 1e-3;

}  // namespace

SimEngine::~SimEngine() {
  for (ActorState& actor : actors_) HEARTH_CHECK(!actor.thread.joinable() && "an actor outlives its engine");
}

int SimEngine::AddResource(std::string name, Division division) {
  resources_.push_back({.name = std::move(name)});
  divisions_.push_back(division);
  return static_cast<int>(resources_.size()) - 1;
}

int SimEngine::AddStream(const std::string& device, const std::string& name) {
  StreamState& stream = streams_.emplace_back();
  stream.name = device + " " + name;
  stream.track = timeline_.AddTrack(device, name);
  return static_cast<int>(streams_.size()) - 1;
}

void SimEngine::Enqueue(int stream, SimOp op, int64_t cost_ns) {
  HEARTH_CHECK(!op.phases.empty());
  streams_[static_cast<size_t>(stream)].items.push_back({.op = std::make_unique<SimOp>(std::move(op))});
  Settle();
  if (cost_ns > 0) Sleep(nullptr, now_ns_ + cost_ns, "its own time");
}

std::shared_ptr<SimEngine::Mark> SimEngine::AddMark(int stream) {
  auto mark = std::make_shared<Mark>();
  streams_[static_cast<size_t>(stream)].items.push_back({.mark = mark});
  Settle();
  return mark;
}

void SimEngine::WaitFor(int stream, std::shared_ptr<Mark> mark) {
  if (mark->passed) return;
  streams_[static_cast<size_t>(stream)].items.push_back({.wait = std::move(mark)});
}

const SimPhase& SimEngine::PhaseOf(const Running& running) const {
  return streams_[static_cast<size_t>(running.stream)].items.front().op->phases[running.phase];
}

// Starts what can start and passes what can be passed: all at the present time.
void SimEngine::Settle() {
  bool changed = true;
  while (changed) {
    changed = false;
    for (size_t s = 0; s < streams_.size(); ++s) {
      StreamState& stream = streams_[s];
      while (!stream.running && !stream.items.empty()) {
        Item& item = stream.items.front();
        if (item.wait != nullptr && !item.wait->passed) break;
        if (item.op != nullptr) {
          stream.running = true;
          BeginPhase(running_.emplace_back(Running{.stream = static_cast<int>(s)}));
          break;
        }
        if (item.mark != nullptr) item.mark->passed = true;
        stream.items.pop_front();
        changed = true;
      }
    }
  }
}

void SimEngine::BeginPhase(Running& running) {
  running.fixed = true;
  running.left = 1;
  running.begin_ns = now_ns_;
  running.ends_ns = now_ns_ + PhaseOf(running).fixed_ns;
}

bool SimEngine::EndPart(Running& running) {
  const SimPhase& phase = PhaseOf(running);
  if (running.fixed && !phase.claim.empty()) {
    running.fixed = false;
    return false;
  }
  StreamState& stream = streams_[static_cast<size_t>(running.stream)];
  const SimOp& op = *stream.items.front().op;
  if (record_) {
    timeline_.AddSpan({.track = phase.track >= 0 ? phase.track : stream.track,
                       .begin_ns = running.begin_ns,
                       .end_ns = now_ns_,
                       .name = op.name,
                       .detail = op.detail});
  }
  if (++running.phase < op.phases.size()) {
    BeginPhase(running);
    return false;
  }
  stream.items.pop_front();
  stream.running = false;
  return true;
}

void SimEngine::Share() {
  std::vector<const Claim*> claims;
  std::vector<Running*> sharing;
  for (Running& running : running_) {
    if (running.fixed) continue;
    claims.push_back(&PhaseOf(running).claim);
    sharing.push_back(&running);
  }
  const std::vector<double> rates = FairRates(claims, divisions_);
  for (size_t i = 0; i < sharing.size(); ++i) {
    sharing[i]->rate = rates[i];
    sharing[i]->ends_ns = now_ns_ + static_cast<int64_t>(std::ceil(std::max(sharing[i]->left, 0.0) / rates[i] * 1e9 - kRounding));
  }
}

int64_t SimEngine::NextEnd() const {
  int64_t next = kNever;
  for (const Running& running : running_) next = std::min(next, running.ends_ns);
  return next;
}

// No part of an op ends before `ns`; those that end then are ended.
void SimEngine::AdvanceTo(int64_t ns) {
  const double seconds = static_cast<double>(ns - now_ns_) * 1e-9;
  for (Running& running : running_) {
    if (running.fixed) continue;
    running.left -= running.rate * seconds;
    for (const auto& [resource, all] : PhaseOf(running).claim) resources_[static_cast<size_t>(resource)].busy_s += all * running.rate * seconds;
  }
  now_ns_ = ns;
  bool ended = false;
  for (size_t i = 0; i < running_.size();) {
    if (running_[i].ends_ns > ns) {
      ++i;
      continue;
    }
    ended = true;
    if (EndPart(running_[i])) {
      running_.erase(running_.begin() + static_cast<int64_t>(i));
    } else {
      running_[i].ends_ns = running_[i].fixed ? running_[i].ends_ns : kNever;  // until it is shared
      ++i;
    }
  }
  if (!ended) return;
  Share();
  Settle();
}

void SimEngine::Turn::Pass() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    passed_ = true;
  }
  wake_.notify_one();  // unlocked: who wakes need not wait again
}

void SimEngine::Turn::Await() {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait(lock, [this] { return passed_; });
  passed_ = false;
}

void SimEngine::Sleep(std::function<bool()> ready, int64_t deadline_ns, std::string waits_for) {
  const int me = current_;
  ActorState& actor = actors_[static_cast<size_t>(me)];
  actor.ready = std::move(ready);
  actor.wake_ns = deadline_ns;
  actor.waits_for = std::move(waits_for);
  PassBaton();
  if (current_ != me) {
    actors_[static_cast<size_t>(current_)].turn.Pass();
    actor.turn.Await();
  }
  actor.ready = nullptr;
}

void SimEngine::PassBaton() {
  while (true) {
    int next = -1;
    int64_t due_ns = kNever;
    for (size_t i = 0; i < actors_.size(); ++i) {
      const ActorState& actor = actors_[i];
      if (actor.ended) continue;
      const int64_t at = actor.ready && actor.ready() ? now_ns_ : std::max(actor.wake_ns, now_ns_);
      if (at < due_ns) {
        due_ns = at;
        next = static_cast<int>(i);
      }
    }
    const int64_t end_ns = NextEnd();
    if (end_ns == kNever && next < 0) Deadlock();
    if (end_ns > due_ns) {
      if (due_ns > now_ns_) AdvanceTo(due_ns);
      current_ = next;
      return;
    }
    AdvanceTo(end_ns);
  }
}

void SimEngine::Deadlock() const {
  std::fprintf(stderr, "simulation: at %.6f s every actor waits, no op runs and no deadline is set; a real device would hang here\n",
               static_cast<double>(now_ns_) * 1e-9);
  for (const ActorState& actor : actors_) {
    if (!actor.ended) std::fprintf(stderr, "  actor '%s' waits for %s\n", actor.name.c_str(), actor.waits_for.c_str());
  }
  std::abort();
}

int SimEngine::AddActor(std::string name) {
  ActorState& actor = actors_.emplace_back();
  actor.name = std::move(name);
  actor.wake_ns = now_ns_;
  return static_cast<int>(actors_.size()) - 1;
}

int SimEngine::Spawn(const std::string& name, std::function<void()> body) {
  const int id = AddActor(name);
  ActorState& self = actors_.back();  // stays where it is
  self.thread = std::thread([this, &self, body = std::move(body)] {
    self.turn.Await();
    body();
    self.ended = true;
    PassBaton();
    actors_[static_cast<size_t>(current_)].turn.Pass();
  });
  return id;
}

void SimEngine::Join(int actor) {
  ActorState& state = actors_[static_cast<size_t>(actor)];
  if (!state.ended) Sleep([&state] { return state.ended; }, kNever, "the end of actor '" + state.name + "'");
  state.thread.join();
}

}  // namespace hearth
