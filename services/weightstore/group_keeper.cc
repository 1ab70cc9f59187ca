#include "services/weightstore/group_keeper.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_join.h"
#include "common/base/logging.h"
#include "common/base/time.h"

namespace hearth {

absl::StatusOr<uint64_t> GroupKeeper::Join(const Request& request) {
  if (request.size < 2 || request.size > kGroupRanksMax || request.rank >= request.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", request.rank, " of a group of ", request.size, ": groups have 2 to ", kGroupRanksMax, " ranks, from 0"));
  }
  std::lock_guard lock(mutex_);
  for (const auto& [id, group] : groups_) {
    if (!group.over && Has(group, request.member.lease_id)) return id;
  }
  // A worker that was restarted asks under a new lease; the old one's word is gone with it.
  std::erase_if(waiting_, [&](const auto& entry) { return entry.second.worker == request.worker && entry.first != request.member.lease_id; });
  waiting_[request.member.lease_id] = request;
  std::vector<const Request*> ranks(request.size, nullptr);
  for (const auto& [lease, other] : waiting_) {
    const bool fits = other.size == request.size && other.generation == request.generation && other.exchange_bytes == request.exchange_bytes;
    if (fits) ranks[other.rank] = &other;
  }
  std::vector<std::string> missing;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank] == nullptr) missing.push_back(absl::StrCat(rank));
  }
  if (!missing.empty()) return absl::UnavailableError(absl::StrCat("the group waits for rank ", absl::StrJoin(missing, ", ")));

  GroupSpec spec{.id = RandomHash128().low | 1, .members = {}, .exchange_bytes = request.exchange_bytes};
  Group group{.generation = request.generation, .region = nullptr, .watches = {}, .workers = {}, .over = false};
  for (const Request* rank : ranks) {
    spec.members.push_back(rank->member);
    group.workers.push_back(rank->worker);
  }
  ASSIGN_OR_RETURN(group.region, GroupRegion::Create(place_, request.generation, spec));
  Watch(group);
  spdlog::info("{} are a group, {} to exchange through", absl::StrJoin(group.workers, ", "), HumanBytes(static_cast<double>(spec.exchange_bytes)));
  for (const GroupMember& member : spec.members) waiting_.erase(member.lease_id);
  groups_.emplace(spec.id, std::move(group));
  return spec.id;
}

void GroupKeeper::Open(const Hash128& generation) {
  std::lock_guard lock(mutex_);
  for (const RegionFile& file : ListRegionFiles(place_)) {
    const std::optional<uint64_t> id = IdOfGroup(file.what);
    if (file.generation != generation || !id.has_value() || groups_.contains(*id)) continue;
    absl::StatusOr<std::unique_ptr<GroupRegion>> region = GroupRegion::Open(place_, generation, *id);
    if (!region.ok()) {
      // Its maker died before any rank heard of it, or it is damaged: then no rank's word can be read.
      spdlog::warn("a group that can't be taken over is removed: {}", std::string(region.status().message()));
      unlink(file.path.c_str());
      continue;
    }
    (*region)->region().SetOwner(SelfProcess());
    Group group{.generation = generation, .region = *std::move(region), .watches = {}, .workers = {}, .over = false};
    Watch(group);
    for (const GroupMember& member : group.region->spec().members) group.workers.push_back(absl::StrCat("process ", member.process.pid));
    groups_.emplace(*id, std::move(group));
  }
}

void GroupKeeper::Settle(const std::function<bool(uint64_t lease)>& lives) {
  {
    std::lock_guard lock(mutex_);
    for (auto& [id, group] : groups_) {
      const std::vector<GroupMember>& members = group.region->spec().members;
      group.over = group.over || !std::all_of(members.begin(), members.end(), [&](const GroupMember& m) { return lives(m.lease_id); });
    }
  }
  Sweep();
}

void GroupKeeper::Watch(Group& group) {
  for (const GroupMember& member : group.region->spec().members) group.watches.push_back(std::make_unique<ProcessWatch>(member.process));
}

// Of the ranks behind the first, whose pages all write.
std::vector<uint64_t> GroupKeeper::Writers(const Group& group) {
  std::vector<uint64_t> writers;
  const std::vector<GroupMember>& members = group.region->spec().members;
  for (size_t rank = 1; rank < members.size(); ++rank) {
    if (group.region->state(rank) == RankState::kComputing && !group.watches[rank]->Exited()) writers.push_back(members[rank].lease_id);
  }
  return writers;
}

bool GroupKeeper::Has(const Group& group, uint64_t lease) {
  const std::vector<GroupMember>& members = group.region->spec().members;
  return std::any_of(members.begin(), members.end(), [&](const GroupMember& m) { return m.lease_id == lease; });
}

std::vector<uint64_t> GroupKeeper::WritersInto(uint64_t lease) const {
  std::lock_guard lock(mutex_);
  std::vector<uint64_t> writers;
  for (const auto& [id, group] : groups_) {
    if (group.region->spec().members[0].lease_id != lease) continue;
    for (const uint64_t writer : Writers(group)) writers.push_back(writer);
  }
  return writers;
}

bool GroupKeeper::HasWritersInto(const ProcessId& process) const {
  std::lock_guard lock(mutex_);
  return std::any_of(groups_.begin(), groups_.end(),
                     [&](const auto& entry) { return entry.second.region->spec().members[0].process == process && !Writers(entry.second).empty(); });
}

void GroupKeeper::End(uint64_t lease) {
  {
    std::lock_guard lock(mutex_);
    waiting_.erase(lease);
    for (auto& [id, group] : groups_) group.over = group.over || Has(group, lease);
  }
  Sweep();
}

// Nobody begins to write in a group that is over: who says that he computes looks then whether all ranks live.
void GroupKeeper::Sweep() {
  std::lock_guard lock(mutex_);
  for (auto it = groups_.begin(); it != groups_.end();) {
    if (!it->second.over || !Writers(it->second).empty()) {
      ++it;
      continue;
    }
    spdlog::info("the group of {} is over", absl::StrJoin(it->second.workers, ", "));
    unlink(it->second.region->region().path().c_str());
    it = groups_.erase(it);
  }
}

std::vector<GroupKeeper::View> GroupKeeper::Look() const {
  std::lock_guard lock(mutex_);
  std::vector<View> views;
  for (const auto& [id, group] : groups_) {
    views.push_back({.id = id, .workers = group.workers, .bytes = group.region->spec().exchange_bytes, .over = group.over});
  }
  std::map<uint32_t, View> coming;  // by size
  for (const auto& [lease, request] : waiting_) {
    View& view = coming[request.size];
    view.workers.resize(request.size);
    view.workers[request.rank] = request.worker;
  }
  for (auto& [size, view] : coming) views.push_back(std::move(view));
  return views;
}

}  // namespace hearth
