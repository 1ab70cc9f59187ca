#include "common/shm/group_region.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/base/publish_point.h"

namespace hearth {
namespace {

constexpr std::string_view kWhatPrefix = "group-";  // group-<id, 16 hex digits>
constexpr uint64_t kExchangeBytesMax = 1ull << 32;  // far above what eight ranks' mailboxes take

absl::Status CheckSpec(const GroupSpec& spec) {
  if (spec.id == 0 || spec.members.size() < 2 || spec.members.size() > kGroupRanksMax || spec.exchange_bytes > kExchangeBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("group ", spec.id, " of ", spec.members.size(), " ranks with ", spec.exchange_bytes,
                                                   " bytes to exchange through; supported are 2 to ", kGroupRanksMax, " ranks and up to ",
                                                   kExchangeBytesMax, " bytes"));
  }
  return absl::OkStatus();
}

uint64_t SumOf(const GroupHeader& header) { return Xxh3_64(&header, offsetof(GroupHeader, sum)); }

}  // namespace

std::string GroupWhat(uint64_t id) { return absl::StrFormat("group-%016x", id); }

std::optional<uint64_t> IdOfGroup(std::string_view what) {
  if (!what.starts_with(kWhatPrefix) || what.size() != kWhatPrefix.size() + 16) return std::nullopt;
  uint64_t id = 0;
  for (const char c : what.substr(kWhatPrefix.size())) {
    const size_t digit = std::string_view("0123456789abcdef").find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    id = id << 4 | digit;
  }
  return id;
}

absl::StatusOr<std::unique_ptr<GroupRegion>> GroupRegion::Create(const RegionPlace& place, const Hash128& generation, const GroupSpec& spec) {
  RETURN_IF_ERROR(CheckSpec(spec));
  ASSIGN_OR_RETURN(ShmRegion region, ShmRegion::Create(place.Path(GroupWhat(spec.id), generation), RegionKind::kGroup, kGroupRegionVersion,
                                                       generation, sizeof(GroupHeader) + spec.exchange_bytes));
  std::unique_ptr<GroupRegion> group(new GroupRegion(std::move(region), spec));
  // Fresh shared memory is zero: all ranks are idle, no mailbox holds anything.
  GroupHeader& header = group->header();
  header.id = spec.id;
  header.size = spec.members.size();
  header.exchange_bytes = spec.exchange_bytes;
  for (size_t rank = 0; rank < spec.members.size(); ++rank) {
    const GroupMember& member = spec.members[rank];
    header.members[rank] = {.lease_id = member.lease_id, .start_ticks = member.process.start_ticks, .pid = member.process.pid, .reserved = 0};
  }
  header.sum = SumOf(header);
  PublishPoint("group.spec");
  group->region_.SetState(RegionState::kReady);
  PublishPoint("group.ready");
  return group;
}

absl::StatusOr<std::unique_ptr<GroupRegion>> GroupRegion::Open(const RegionPlace& place, const Hash128& generation, uint64_t id) {
  const std::string path = place.Path(GroupWhat(id), generation);
  ASSIGN_OR_RETURN(ShmRegion region, ShmRegion::Open(path, RegionKind::kGroup, kGroupRegionVersion, MapMode::kReadWrite));
  if (region.header().generation != generation) {
    return absl::DataLossError(absl::StrCat(path, ": belongs to generation ", region.header().generation.ToHex()));
  }
  if (region.state() != RegionState::kReady) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": not READY, its maker died while creating it"));
  }
  if (region.body_bytes() < sizeof(GroupHeader)) return absl::DataLossError(absl::StrCat(path, ": too small for a group"));
  const auto& header = *reinterpret_cast<const GroupHeader*>(region.body());
  if (header.sum != SumOf(header)) return absl::DataLossError(absl::StrCat(path, ": the sum of its header does not match: it is damaged"));
  GroupSpec spec{.id = header.id, .members = {}, .exchange_bytes = header.exchange_bytes};
  for (size_t rank = 0; rank < std::min<size_t>(header.size, kGroupRanksMax); ++rank) {
    const GroupHeader::Member& member = header.members[rank];
    spec.members.push_back({.lease_id = member.lease_id, .process = {.pid = member.pid, .start_ticks = member.start_ticks}});
  }
  if (const absl::Status status = CheckSpec(spec); !status.ok()) return absl::DataLossError(absl::StrCat(path, ": ", status.message()));
  if (spec.id != id || header.size > kGroupRanksMax || region.body_bytes() < sizeof(GroupHeader) + spec.exchange_bytes) {
    return absl::DataLossError(
        absl::StrCat(path, ": group ", spec.id, " of ", header.size, " ranks contradicts its name or its ", region.body_bytes(), " bytes"));
  }
  return std::unique_ptr<GroupRegion>(new GroupRegion(std::move(region), std::move(spec)));
}

void GroupRegion::SetState(size_t rank, RankState state) {
  header().states[rank].state.store(static_cast<uint32_t>(state), std::memory_order_seq_cst);
  PublishPoint("group.state");
}

RankState GroupRegion::state(size_t rank) const {
  const uint32_t state = header().states[rank].state.load(std::memory_order_seq_cst);
  // What can't be is believed to be the worst.
  return state <= static_cast<uint32_t>(RankState::kLeft) ? static_cast<RankState>(state) : RankState::kComputing;
}

}  // namespace hearth
