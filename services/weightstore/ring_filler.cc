#include "services/weightstore/ring_filler.h"

#include <pthread.h>
#include <string.h>

#include "common/base/logging.h"
#include "common/base/time.h"
#include "common/numa/placement.h"
#include "common/trace/trace.h"

namespace hearth {
namespace {

constexpr int64_t kLookNs = 200'000'000;  // how long a thread that nobody woke sleeps
// How often a thread that waits for the disk looks at what has been posted meanwhile: a part of the time in which a fast disk reads one record.
constexpr int64_t kPostedLookNs = 500'000;

}  // namespace

RingFiller::RingFiller(std::string name, std::unique_ptr<ExpertRing> ring, std::shared_ptr<const WeightImage> image, const ShardHome& home,
                       std::unique_ptr<DiskReader> disk)
    : name_(std::move(name)),
      image_(std::move(image)),
      filler_(std::move(ring)),
      disk_(std::move(disk)),
      looked_at_(filler_.next()),
      track_(TraceTrackNamed(absl::StrCat("ring ", filler_.ring().geometry().shard, " of ", name_))) {
  thread_ = std::thread([this, home] { Run(home); });
}

RingFiller::~RingFiller() {
  stop_ = true;
  filler_.Wake();
  thread_.join();
}

RingFiller::View RingFiller::Look() const {
  const ExpertRingGeometry& geometry = filler_.ring().geometry();
  return {.shard = geometry.shard,
          .slots = geometry.num_slots,
          .bytes = kRegionHeaderBytes + geometry.body_bytes(),
          .records = records_.load(),
          .record_bytes = record_bytes_.load(),
          .busy_seconds = static_cast<double>(busy_ns_.load()) * 1e-9,
          .broken = broken_.load(),
          .disk = disk_ == nullptr ? std::nullopt : std::optional(disk_->Look())};
}

void RingFiller::Run(const ShardHome& home) {
  pthread_setname_np(pthread_self(), "ring-filler");
  PinThisThread(home.cpus);
  while (!stop_) {
    const auto request = filler_.AwaitRequest(kLookNs, &stop_);
    if (!request.ok()) {
      spdlog::error("{}: {}; it reads from the image until it is restarted", name_, std::string(request.status().message()));
      broken_ = true;
      return;
    }
    if (!request->has_value()) continue;
    ReadAhead();
    const std::optional<FillOutcome> outcome = Fill(**request);
    if (!outcome.has_value()) return;  // the next store fills it
    filler_.Filled(*outcome);
  }
}

std::optional<FillOutcome> RingFiller::Fill(const ExpertRingFiller::Request& request) {
  const int64_t begin_ns = MonotonicNowNs();
  // Wanted or not: until a read has ended, nothing else may go into its slot.
  const bool is_read = !reads_.empty() && reads_.front().first == filler_.next();
  if (is_read) {
    const uint64_t number = reads_.front().second;
    reads_.pop_front();
    const std::optional<FillOutcome> outcome = AwaitRead(number);
    if (outcome != FillOutcome::kRecord) return outcome;
  } else if (!request.wanted) {
    return FillOutcome::kUnwanted;
  }
  const absl::StatusOr<ImageExpert> expert = RecordOf(request);
  if (!expert.ok()) {
    if (auto permit = LogAllowed("ring-refused", 6)) {
      spdlog::error("{} asks for expert {} of layer {}: {}{}", name_, request.expert, request.layer, std::string(expert.status().message()),
                    permit->Note());
    }
    return FillOutcome::kRefused;
  }
  if (!is_read && expert->count > 0) memcpy(request.record, expert->record, expert->record_bytes);
  const int64_t end_ns = MonotonicNowNs();
  TraceSpanAt(track_, "fill", begin_ns, end_ns, "layer expert bytes", request.layer, request.expert, static_cast<int64_t>(expert->record_bytes));
  busy_ns_ += end_ns - begin_ns;
  record_bytes_ += expert->record_bytes;
  ++records_;
  return FillOutcome::kRecord;
}

absl::StatusOr<ImageExpert> RingFiller::RecordOf(const ExpertRingFiller::Request& request) const {
  const ExpertRingGeometry& geometry = filler_.ring().geometry();
  ASSIGN_OR_RETURN(const ImageExpert expert, image_->Expert(request.layer, request.expert, geometry.shard));
  if (expert.record_bytes > geometry.slot_bytes) return absl::InvalidArgumentError("its record is larger than a slot");
  return expert;
}

// So that the disk has as much to do as the ring has slots, whatever is copied from memory meanwhile.
void RingFiller::ReadAhead() {
  if (disk_ == nullptr) return;
  while (const std::optional<ExpertRingFiller::Request> request = filler_.Posted(looked_at_)) {
    const uint64_t number = looked_at_++;
    const absl::StatusOr<ImageExpert> expert = RecordOf(*request);
    if (!request->wanted || !expert.ok() || !expert->disk_offset.has_value()) continue;
    reads_.emplace_back(number, disk_->Begin(0, *expert->disk_offset, expert->record_bytes, request->record));
  }
}

// However long it takes: a worker that does not wait so long helps itself.
std::optional<FillOutcome> RingFiller::AwaitRead(uint64_t number) {
  while (!disk_->AwaitEnded(number, kPostedLookNs)) {
    if (stop_) return std::nullopt;
    ReadAhead();
  }
  const absl::Status read = disk_->Outcome(number);
  if (read.ok()) return FillOutcome::kRecord;
  if (auto permit = LogAllowed("ring-disk", 6)) spdlog::error("{}: {}{}", name_, std::string(read.message()), permit->Note());
  return FillOutcome::kRefused;
}

}  // namespace hearth
