// How the table's region is laid out, made and checked. Contract: store_table.h. Room: common/shm.
#include "common/shm/store_table.h"

#include <limits>

namespace hearth {
namespace {

// Entries are named by int32 on the wire and in memory.
constexpr uint64_t kEntriesMax = std::numeric_limits<int32_t>::max();
// Each entry is a multiple of 64 bytes, so the arrays follow one another without gaps.
static_assert(sizeof(StoreTableHeader) % 64 == 0 && sizeof(LeaseEntry) % 64 == 0 && sizeof(PageEntry) % 64 == 0 && sizeof(RowEntry) % 64 == 0);

uint64_t BodyBytes(uint64_t num_pages, uint64_t num_rows) {
  return sizeof(StoreTableHeader) + kLeasesMax * sizeof(LeaseEntry) + num_pages * sizeof(PageEntry) + num_rows * sizeof(RowEntry);
}

class SharedStoreTable : public StoreTable {
 public:
  SharedStoreTable(ShmRegion region, uint64_t num_pages, uint64_t num_rows)
      : region_(std::move(region)), num_pages_(static_cast<int32_t>(num_pages)), num_rows_(static_cast<int32_t>(num_rows)) {}
  StoreTableHeader& header() override { return *reinterpret_cast<StoreTableHeader*>(region_.body()); }
  LeaseEntry* leases() override { return reinterpret_cast<LeaseEntry*>(region_.body() + sizeof(StoreTableHeader)); }
  PageEntry* pages() override { return reinterpret_cast<PageEntry*>(leases() + kLeasesMax); }
  RowEntry* rows() override { return reinterpret_cast<RowEntry*>(pages() + num_pages_); }
  int32_t num_pages() const override { return num_pages_; }
  int32_t num_rows() const override { return num_rows_; }
  ShmRegion& region() override { return region_; }

 private:
  ShmRegion region_;
  const int32_t num_pages_;
  const int32_t num_rows_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<StoreTable>> StoreTable::Create(const RegionPlace& place, const Hash128& generation, const StoreTableSpec& spec) {
  if (spec.num_pages == 0 || spec.num_pages > kEntriesMax || spec.num_rows == 0 || spec.num_rows > kEntriesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("a store table of ", spec.num_pages, " pages and ", spec.num_rows, " rows; each must be between 1 and ", kEntriesMax));
  }
  ASSIGN_OR_RETURN(ShmRegion region, ShmRegion::Create(place.Path(kStoreTableWhat, generation), RegionKind::kStoreTable, kStoreTableVersion,
                                                       generation, BodyBytes(spec.num_pages, spec.num_rows)));
  auto table = std::make_shared<SharedStoreTable>(std::move(region), spec.num_pages, spec.num_rows);
  // Fresh shared memory is zero: every lease, page and row is free.
  StoreTableHeader& header = table->header();
  header.num_leases = kLeasesMax;
  header.num_pages = spec.num_pages;
  header.num_rows = spec.num_rows;
  header.sequence = spec.sequence;
  header.source_stamp = spec.source_stamp;
  header.config_stamp = spec.config_stamp;
  table->region().SetState(RegionState::kReady);
  return table;
}

absl::StatusOr<std::shared_ptr<StoreTable>> StoreTable::Open(const RegionPlace& place, const Hash128& generation, MapMode mode) {
  const std::string path = place.Path(kStoreTableWhat, generation);
  ASSIGN_OR_RETURN(ShmRegion region, ShmRegion::Open(path, RegionKind::kStoreTable, kStoreTableVersion, mode));
  if (region.header().generation != generation) {
    return absl::DataLossError(absl::StrCat(path, ": belongs to generation ", region.header().generation.ToHex()));
  }
  if (region.state() != RegionState::kReady)
    return absl::FailedPreconditionError(absl::StrCat(path, ": not READY, its maker died while creating it"));
  if (region.body_bytes() < sizeof(StoreTableHeader)) {
    return absl::DataLossError(absl::StrCat(path, ": ", region.body_bytes(), " bytes are less than a table's header"));
  }
  const auto& header = *reinterpret_cast<const StoreTableHeader*>(region.body());
  const uint64_t num_leases = header.num_leases, num_pages = header.num_pages, num_rows = header.num_rows;
  if (num_leases != kLeasesMax || num_pages == 0 || num_pages > kEntriesMax || num_rows == 0 || num_rows > kEntriesMax ||
      BodyBytes(num_pages, num_rows) > region.body_bytes()) {
    return absl::DataLossError(absl::StrCat(path, ": says ", num_leases, " leases, ", num_pages, " pages and ", num_rows, " rows, which its ",
                                            region.body_bytes(), " bytes can't hold"));
  }
  return std::make_shared<SharedStoreTable>(std::move(region), num_pages, num_rows);
}

std::vector<const LeaseEntry*> LivingLeases(StoreTable& table) {
  std::vector<const LeaseEntry*> living;
  for (int64_t i = 0; i < kLeasesMax; ++i) {
    const LeaseEntry& lease = table.leases()[i];
    const bool live = lease.state.load(std::memory_order_acquire) == static_cast<uint32_t>(LeaseState::kLive);
    if (live && IsAlive({lease.pid, lease.start_ticks})) living.push_back(&lease);
  }
  return living;
}

}  // namespace hearth
