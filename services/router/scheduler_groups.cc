// The scheduler's part in prefill groups: which workers are ranks of one, and which prompts they are given together. Room: services/router. Threads: the loop.
#include <algorithm>

#include "services/router/scheduler.h"
#include "services/router/scheduler_track.h"

namespace hearth::router {

// By rank; empty unless the link is in a prefill group whose ranks are all ready.
std::vector<WorkerLink*> Scheduler::RanksOf(const WorkerLink& link) const {
  if (link.group() == 0) return {};
  std::vector<WorkerLink*> ranks(static_cast<size_t>(std::max(0, link.status().group().size())), nullptr);
  for (const auto& other : links_) {
    const bool fits = other->group() == link.group() && other->rank() >= 0 && static_cast<size_t>(other->rank()) < ranks.size();
    if (fits) ranks[static_cast<size_t>(other->rank())] = other.get();
  }
  const bool whole = std::find(ranks.begin(), ranks.end(), nullptr) == ranks.end();
  return whole ? ranks : std::vector<WorkerLink*>();
}

// A rank of a pass that another leads computes nothing of its own until it has ended.
bool Scheduler::InSharedPass(const WorkerLink& link) const {
  const std::vector<WorkerLink*> ranks = RanksOf(link);
  return !ranks.empty() && ranks[0] != &link && ranks[0]->running_shared() > 0;
}

// Rank 0 of a group whose ranks do nothing, or nothing but what they share, if they are to compute this prompt: by time, once passes of both kinds have
// been measured, else by its length.
WorkerLink* Scheduler::GroupFor(const Track& track) const {
  if (track.alone) return nullptr;
  for (const auto& link : links_) {
    const std::vector<WorkerLink*> ranks = RanksOf(*link);
    if (ranks.empty() || ranks[0] != link.get() || link->FreePlaces() == 0) continue;
    const bool idle = std::all_of(ranks.begin(), ranks.end(), [](const WorkerLink* rank) { return rank->running() == rank->running_shared(); });
    if (!idle) continue;
    const std::optional<PassCost> alone = costs_.CostOf(link->name()), shared = costs_.SharedCostOf(link->name());
    const bool by_time = !options_.path_by_length && alone.has_value() && shared.has_value();
    const PassWork work = WorkOf(track.work().before, track.work().tokens);
    const bool together = by_time ? shared->Seconds(work) < alone->Seconds(work) : track.work().tokens > options_.group_prefill_min_tokens;
    return together ? link.get() : nullptr;
  }
  return nullptr;
}

}  // namespace hearth::router
