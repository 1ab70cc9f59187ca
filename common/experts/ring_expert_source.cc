#include "common/experts/ring_expert_source.h"

#include <algorithm>

#include "common/base/check.h"
#include "common/base/logging.h"
#include "common/base/time.h"
#include "common/trace/trace.h"

namespace hearth {
namespace {

constexpr int64_t kLookNs = 50'000'000;  // between two looks at what else may end a wait

}  // namespace

RingExpertSource::RingExpertSource(ExpertSource& image, std::vector<std::unique_ptr<ExpertRingReader>> rings, int64_t patience_ns,
                                   std::unique_ptr<ExpertSource> second)
    : image_(image),
      rings_(std::move(rings)),
      second_(std::move(second)),
      num_slots_(rings_.at(0)->num_slots()),
      patience_ns_(patience_ns),
      track_(TraceTrackNamed("expert rings")) {
  HEARTH_CHECK(static_cast<int64_t>(rings_.size()) == image.num_shards());
}

absl::StatusOr<std::unique_ptr<RingExpertSource>> RingExpertSource::Open(ExpertSource& image, const RegionPlace& place, const Hash128& generation,
                                                                         uint64_t lease_id, std::unique_ptr<ExpertSource> second) {
  std::vector<std::unique_ptr<ExpertRingReader>> rings;
  for (int64_t shard = 0; shard < image.num_shards(); ++shard) {
    ASSIGN_OR_RETURN(std::unique_ptr<ExpertRing> ring, ExpertRing::Open(place, generation, lease_id, static_cast<uint32_t>(shard)));
    ASSIGN_OR_RETURN(std::unique_ptr<ExpertRingReader> reader, ExpertRingReader::Make(std::move(ring)));
    if (!rings.empty() && reader->num_slots() != rings[0]->num_slots()) {
      return absl::DataLossError(
          absl::StrCat("the expert rings of lease ", lease_id, " have ", rings[0]->num_slots(), " and ", reader->num_slots(), " slots"));
    }
    rings.push_back(std::move(reader));
  }
  return std::make_unique<RingExpertSource>(image, std::move(rings), kPatienceNs, std::move(second));
}

void RingExpertSource::Expect(const std::vector<ExpertId>& order, const StopToken* stop) {
  stop_ = stop;
  ExpertSource& behind = second_ != nullptr ? *second_ : image_;
  behind.Expect({}, stop);  // what it is asked for is never foreseen
  expected_.assign(order.begin(), order.end());
  GiveUpBefore(posted_);
  PostAhead();
}

ExpertView RingExpertSource::Acquire(int64_t layer, int64_t expert, int64_t shard) {
  const ExpertView view = image_.Acquire(layer, expert, shard);
  const std::optional<uint64_t> request = Begin({layer, expert});
  if (view.record_bytes == 0) return view;  // an empty shard
  const uint8_t* record = request.has_value() ? AwaitRecord(*rings_[static_cast<size_t>(shard)], *request) : nullptr;
  ++(record != nullptr ? counts_.from_rings : counts_.from_image);
  if (record != nullptr) return MovedTo(view, record);
  return second_ != nullptr ? second_->Acquire(layer, expert, shard) : view;
}

void RingExpertSource::Release(int64_t layer, int64_t expert, int64_t shard) {
  image_.Release(layer, expert, shard);
  if (second_ != nullptr) second_->Release(layer, expert, shard);
  for (Request& request : requests_) {
    if (request.id != ExpertId{layer, expert} || !request.acquired || request.shards_left == 0) continue;
    if (--request.shards_left == 0) PostAhead();
    return;
  }
}

std::optional<uint64_t> RingExpertSource::Begin(const ExpertId& id) {
  if (const std::optional<uint64_t> request = Take(id)) return request;
  const auto place = std::find(expected_.begin(), expected_.end(), id);
  if (place == expected_.end()) return std::nullopt;
  // The caller does without those before it.
  expected_.erase(expected_.begin(), place);
  GiveUpBefore(posted_);
  if (AwaitPostable()) {
    PostAhead();
    return Take(id);
  }
  expected_.pop_front();
  return std::nullopt;
}

// What was asked for and is not acquired yet; with it, what was asked for before it is given up.
std::optional<uint64_t> RingExpertSource::Take(const ExpertId& id) {
  for (Request& request : requests_) {
    if (request.id != id || request.shards_left == 0) continue;
    if (!request.acquired) {
      request.acquired = true;
      GiveUpBefore(request.number);
    }
    return request.number;
  }
  return std::nullopt;
}

const uint8_t* RingExpertSource::AwaitRecord(ExpertRingReader& ring, uint64_t number) {
  return AwaitFilled(ring, number) ? ring.Record(number) : nullptr;
}

bool RingExpertSource::AwaitFilled(ExpertRingReader& ring, uint64_t number) {
  if (ring.Filled(number)) return true;
  if (asleep_) return false;
  const int64_t begin_ns = MonotonicNowNs();
  const bool filled = AwaitFilledUntil(ring, number, begin_ns + patience_ns_);
  const int64_t end_ns = MonotonicNowNs();
  counts_.waited_ns += end_ns - begin_ns;
  TraceSpanAt(track_, "wait for ring", begin_ns, end_ns, "request", static_cast<int64_t>(number));
  return filled;
}

bool RingExpertSource::AwaitFilledUntil(ExpertRingReader& ring, uint64_t number, int64_t end_ns) {
  while (!ring.AwaitFilled(number, std::min(kLookNs, patience_ns_))) {
    if (stop_ != nullptr && stop_->stopped()) return false;
    const bool alive = ring.StoreAlive();
    if (alive && MonotonicNowNs() < end_ns) continue;
    asleep_ = true;
    if (const auto permit = LogAllowed("rings-asleep", 6)) {
      spdlog::warn("expert rings: the weight store {}; experts come from the image until it fills again{}",
                   alive ? "fills nothing, it is stopped or overloaded" : "is gone", permit->Note());
    }
    return false;
  }
  return true;
}

// Whether there is a slot for one more request. Slots that the caller holds are not waited for; those that the store has not dealt with are.
bool RingExpertSource::AwaitPostable() {
  if (static_cast<int64_t>(requests_.size()) >= num_slots_ || !IsAwake()) return false;
  if (posted_ < static_cast<uint64_t>(num_slots_)) return true;
  return std::ranges::all_of(rings_, [&](const auto& ring) { return AwaitFilled(*ring, posted_ - static_cast<uint64_t>(num_slots_)); });
}

void RingExpertSource::GiveUpBefore(uint64_t number) {
  for (Request& request : requests_) {
    if (request.number < number && !request.acquired) request.shards_left = 0;
  }
  for (const auto& ring : rings_) ring->GiveUpBefore(number);
  while (!requests_.empty() && requests_.front().shards_left == 0) requests_.pop_front();
}

void RingExpertSource::PostAhead() {
  while (!requests_.empty() && requests_.front().shards_left == 0) requests_.pop_front();
  while (!expected_.empty() && static_cast<int64_t>(requests_.size()) < num_slots_ && IsAwake() && CanPost()) {
    const ExpertId id = expected_.front();
    expected_.pop_front();
    for (const auto& ring : rings_) ring->Post(id.layer, id.expert);
    requests_.push_back({.number = posted_++, .id = id, .shards_left = num_shards()});
  }
}

bool RingExpertSource::CanPost() const {
  return std::ranges::all_of(rings_, [](const auto& ring) { return ring->CanPost(); });
}

bool RingExpertSource::IsAwake() {
  if (!asleep_) return true;
  const bool caught_up = std::ranges::all_of(rings_, [&](const auto& ring) { return posted_ == 0 || ring->Filled(posted_ - 1); });
  if (caught_up) {
    asleep_ = false;
    spdlog::info("expert rings: the weight store fills again");
  }
  return caught_up;
}

}  // namespace hearth
