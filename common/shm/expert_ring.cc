#include "common/shm/expert_ring.h"

#include <string.h>

#include "absl/strings/str_format.h"
#include "common/base/align.h"
#include "common/base/publish_point.h"
#include "common/base/time.h"
#include "common/shm/futex.h"

namespace hearth {
namespace {

constexpr std::string_view kWhatPrefix = "ring";  // ring<shard>-<lease, 16 hex digits>
constexpr uint32_t kShardsMax = 64;
constexpr uint64_t kSlotBytesMax = 1ull << 36;  // far above any expert; keeps every product below 2^63

uint64_t DataOffset(uint32_t num_slots) {
  const uint64_t end = sizeof(ExpertRingHeader) + num_slots * (sizeof(std::atomic<uint64_t>) + sizeof(ExpertRingSlot));
  return AlignUp(end, kRingSlotAlign);
}

absl::Status CheckGeometry(const ExpertRingGeometry& g) {
  if (g.num_slots < kRingSlotsMin || g.num_slots > kRingSlotsMax || g.slot_bytes == 0 || g.slot_bytes % kRingSlotAlign != 0 ||
      g.slot_bytes > kSlotBytesMax || g.shard >= kShardsMax) {
    return absl::InvalidArgumentError(absl::StrCat("expert ring: ", g.num_slots, " slots of ", g.slot_bytes, " bytes for shard ", g.shard,
                                                   "; supported are ", kRingSlotsMin, " to ", kRingSlotsMax, " slots of whole ", kRingSlotAlign,
                                                   "-byte pages and shards below ", kShardsMax));
  }
  return absl::OkStatus();
}

uint64_t SumOf(const ExpertRingHeader& header) { return Xxh3_64(&header, offsetof(ExpertRingHeader, sum)); }

// Until `done` or the time is over, sleeping on the word.
template <typename Done>
bool AwaitOn(const std::atomic<uint32_t>& word, int64_t timeout_ns, const Done& done) {
  const int64_t deadline_ns = MonotonicNowNs() + timeout_ns;
  while (true) {
    const uint32_t seen = word.load(std::memory_order_acquire);  // before the look: a change after it ends the sleep at once
    if (done()) return true;
    const int64_t left_ns = deadline_ns - MonotonicNowNs();
    if (left_ns <= 0) return false;
    FutexWait(word, seen, left_ns);
  }
}

void Ring(std::atomic<uint32_t>& bell) {
  bell.store(bell.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  FutexWake(bell);
}

}  // namespace

uint64_t ExpertRingGeometry::body_bytes() const { return DataOffset(num_slots) + num_slots * slot_bytes; }

std::string ExpertRingWhat(uint64_t lease_id, uint32_t shard) { return absl::StrFormat("ring%d-%016x", shard, lease_id); }

std::optional<uint64_t> LeaseOfExpertRing(std::string_view what) {
  const size_t dash = what.find('-');
  if (!what.starts_with(kWhatPrefix) || dash == std::string_view::npos || what.size() != dash + 17) return std::nullopt;
  uint64_t lease = 0;
  for (const char c : what.substr(dash + 1)) {
    const size_t digit = std::string_view("0123456789abcdef").find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    lease = lease << 4 | digit;
  }
  return lease;
}

// ---- The mapping ----

absl::StatusOr<std::unique_ptr<ExpertRing>> ExpertRing::Create(const RegionPlace& place, const Hash128& generation,
                                                               const ExpertRingGeometry& geometry, const AllocationHook& on_allocated) {
  RETURN_IF_ERROR(CheckGeometry(geometry));
  ASSIGN_OR_RETURN(ShmRegion region, ShmRegion::Create(place.Path(ExpertRingWhat(geometry.lease_id, geometry.shard), generation),
                                                       RegionKind::kExpertRing, kExpertRingVersion, generation, geometry.body_bytes(), on_allocated));
  std::unique_ptr<ExpertRing> ring(new ExpertRing(std::move(region), geometry));
  // Fresh shared memory is zero: nothing is posted, nothing filled.
  ExpertRingHeader& header = ring->header();
  header.geometry = geometry;
  header.data_offset = DataOffset(geometry.num_slots);
  header.sum = SumOf(header);
  PublishPoint("ring.geometry");
  ring->region_.SetState(RegionState::kReady);
  PublishPoint("ring.ready");
  return ring;
}

absl::StatusOr<std::unique_ptr<ExpertRing>> ExpertRing::Open(const RegionPlace& place, const Hash128& generation, uint64_t lease_id, uint32_t shard) {
  const std::string path = place.Path(ExpertRingWhat(lease_id, shard), generation);
  ASSIGN_OR_RETURN(ShmRegion region, ShmRegion::Open(path, RegionKind::kExpertRing, kExpertRingVersion, MapMode::kReadWrite));
  if (region.header().generation != generation) {
    return absl::DataLossError(absl::StrCat(path, ": belongs to generation ", region.header().generation.ToHex()));
  }
  if (region.state() != RegionState::kReady)
    return absl::FailedPreconditionError(absl::StrCat(path, ": not READY, its maker died while creating it"));
  if (region.body_bytes() < sizeof(ExpertRingHeader)) return absl::DataLossError(absl::StrCat(path, ": too small for an expert ring"));
  const auto& header = *reinterpret_cast<const ExpertRingHeader*>(region.body());
  const ExpertRingGeometry geometry = header.geometry;
  if (header.sum != SumOf(header)) return absl::DataLossError(absl::StrCat(path, ": the geometry's sum does not match: it is damaged"));
  if (const absl::Status status = CheckGeometry(geometry); !status.ok()) return absl::DataLossError(absl::StrCat(path, ": ", status.message()));
  if (geometry.lease_id != lease_id || geometry.shard != shard || header.data_offset != DataOffset(geometry.num_slots) ||
      geometry.body_bytes() > region.body_bytes()) {
    return absl::DataLossError(absl::StrCat(path, ": ", geometry.num_slots, " slots of ", geometry.slot_bytes, " bytes for lease ", geometry.lease_id,
                                            ", shard ", geometry.shard, " contradict its name or its ", region.body_bytes(), " bytes"));
  }
  return std::unique_ptr<ExpertRing>(new ExpertRing(std::move(region), geometry));
}

std::atomic<uint64_t>& ExpertRing::request(uint64_t number) const {
  return reinterpret_cast<std::atomic<uint64_t>*>(region_.body() + sizeof(ExpertRingHeader))[IndexOf(number)];
}

ExpertRingSlot& ExpertRing::slot(uint64_t number) const {
  uint8_t* slots = region_.body() + sizeof(ExpertRingHeader) + geometry_.num_slots * sizeof(std::atomic<uint64_t>);
  return reinterpret_cast<ExpertRingSlot*>(slots)[IndexOf(number)];
}

uint8_t* ExpertRing::record(uint64_t number) const {
  return region_.body() + DataOffset(geometry_.num_slots) + IndexOf(number) * geometry_.slot_bytes;
}

// ---- The worker's end ----

absl::StatusOr<std::unique_ptr<ExpertRingReader>> ExpertRingReader::Make(std::unique_ptr<ExpertRing> ring) {
  if (const uint64_t posted = ring->header().posted.load(std::memory_order_acquire); posted != 0) {
    return absl::FailedPreconditionError(absl::StrCat(ring->region().path(), ": ", posted, " requests have been posted to it already"));
  }
  return std::unique_ptr<ExpertRingReader>(new ExpertRingReader(std::move(ring)));
}

uint64_t ExpertRingReader::Post(int64_t layer, int64_t expert) {
  ExpertRingHeader& header = ring_->header();
  const uint64_t number = posted_++;
  ring_->request(number).store(static_cast<uint64_t>(layer) << 32 | static_cast<uint64_t>(expert), std::memory_order_relaxed);
  PublishPoint("ring.request");
  header.posted.store(posted_, std::memory_order_release);
  PublishPoint("ring.posted");
  Ring(header.posted_bell);
  PublishPoint("ring.posted_bell");
  return number;
}

void ExpertRingReader::GiveUpBefore(uint64_t number) {
  if (number <= unwanted_) return;
  unwanted_ = number;
  ring_->header().unwanted.store(number, std::memory_order_release);
  PublishPoint("ring.unwanted");
}

bool ExpertRingReader::AwaitFilled(uint64_t number, int64_t timeout_ns) const {
  return AwaitOn(ring_->header().filled_bell, timeout_ns, [&] { return Filled(number); });
}

const uint8_t* ExpertRingReader::Record(uint64_t number) const {
  const bool holds = ring_->slot(number).outcome.load(std::memory_order_relaxed) == static_cast<uint32_t>(FillOutcome::kRecord);
  return holds ? ring_->record(number) : nullptr;
}

bool ExpertRingReader::StoreAlive() const {
  const ProcessId owner = ring_->region().owner();
  return owner.pid != 0 && IsAlive(owner);
}

// ---- The store's end ----

ExpertRingFiller::ExpertRingFiller(std::unique_ptr<ExpertRing> ring) : ring_(std::move(ring)) {
  const uint64_t posted = ring_->header().posted.load(std::memory_order_acquire);
  const uint64_t slots = ring_->geometry().num_slots;
  next_ = posted > slots ? posted - slots : 0;
  while (next_ < posted && ring_->slot(next_).filled.load(std::memory_order_relaxed) == next_ + 1) ++next_;
}

absl::StatusOr<std::optional<ExpertRingFiller::Request>> ExpertRingFiller::AwaitRequest(int64_t timeout_ns, const std::atomic<bool>* stop) {
  const ExpertRingHeader& header = ring_->header();
  uint64_t posted = next_;
  const auto stopped = [&] { return stop != nullptr && stop->load(std::memory_order_acquire); };
  const auto look = [&] { return stopped() || (posted = header.posted.load(std::memory_order_acquire)) != next_; };
  if (!AwaitOn(header.posted_bell, timeout_ns, look) || stopped()) return std::optional<Request>();
  if (posted < next_ || posted - next_ > ring_->geometry().num_slots) {
    return absl::DataLossError(absl::StrCat(ring_->region().path(), ": ", posted, " requests posted where ", next_, " have been filled in ",
                                            ring_->geometry().num_slots, " slots: its worker is broken"));
  }
  return At(next_);
}

std::optional<ExpertRingFiller::Request> ExpertRingFiller::Posted(uint64_t number) const {
  const uint64_t posted = ring_->header().posted.load(std::memory_order_acquire);
  const bool possible = posted >= next_ && posted - next_ <= ring_->geometry().num_slots;  // else AwaitRequest says so
  if (!possible || number < next_ || number >= posted) return std::nullopt;
  return At(number);
}

ExpertRingFiller::Request ExpertRingFiller::At(uint64_t number) const {
  const uint64_t request = ring_->request(number).load(std::memory_order_relaxed);
  return {.layer = static_cast<int64_t>(request >> 32),
          .expert = static_cast<int64_t>(request & 0xffff'ffff),
          .wanted = ring_->header().unwanted.load(std::memory_order_acquire) <= number,
          .record = ring_->record(number)};
}

void ExpertRingFiller::Filled(FillOutcome outcome) {
  ExpertRingSlot& slot = ring_->slot(next_);
  PublishPoint("ring.record");
  slot.outcome.store(static_cast<uint32_t>(outcome), std::memory_order_relaxed);
  PublishPoint("ring.outcome");
  ++next_;
  slot.filled.store(next_, std::memory_order_release);
  PublishPoint("ring.filled");
  Ring(ring_->header().filled_bell);
  PublishPoint("ring.filled_bell");
}

void ExpertRingFiller::Wake() { FutexWake(ring_->header().posted_bell); }

}  // namespace hearth
