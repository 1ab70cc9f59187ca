#include "common/experts/disk_expert_source.h"

#include <sys/mman.h>

#include <algorithm>

#include "common/base/align.h"
#include "common/base/check.h"
#include "common/base/logging.h"
#include "common/base/time.h"

namespace hearth {
namespace {

constexpr int64_t kLookNs = 50'000'000;     // between two looks at what else may end a wait
constexpr int64_t kSlowNs = 5'000'000'000;  // after which the log says what is waited for

std::string NothingFor(const std::string& path, int64_t waited_ns) {
  return absl::StrCat("reading ", path, ": nothing for ", HumanDuration(static_cast<double>(waited_ns) * 1e-9),
                      ": look at the disk (dmesg, iostat -x), or choose another weightstore.disk_dir");
}

}  // namespace

absl::StatusOr<std::unique_ptr<DiskExpertSource>> DiskExpertSource::Make(ExpertSource& image, std::shared_ptr<const WeightImage> weights,
                                                                         int64_t buffers, std::unique_ptr<ReadQueue> queue, int64_t patience_ns) {
  HEARTH_CHECK(buffers >= 2);
  if (weights->disk_bytes() == 0) return absl::FailedPreconditionError("the image is all in shared memory: there is no disk to read from");
  std::vector<std::string> paths;
  for (const DiskPart& part : weights->disk_parts()) paths.push_back(part.path);
  ASSIGN_OR_RETURN(std::unique_ptr<DiskReader> reader, DiskReader::Open(paths, std::move(queue)));
  std::unique_ptr<DiskExpertSource> source(new DiskExpertSource(image, std::move(weights), std::move(reader), patience_ns));
  RETURN_IF_ERROR(source->AllocateBuffers(buffers));
  return source;
}

DiskExpertSource::~DiskExpertSource() {
  reader_.reset();  // waits for what is read into the buffers
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
}

absl::Status DiskExpertSource::AllocateBuffers(int64_t count) {
  uint64_t bytes = 0;
  for (const uint64_t record : weights_->disk_record_bytes_max()) {
    shard_room_.push_back(bytes);
    bytes += AlignUp(record, kDiskAlign);
  }
  memory_bytes_ = bytes * static_cast<uint64_t>(count);
  void* memory = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", count, " experts from disk, ", HumanBytes(static_cast<double>(memory_bytes_)), ": lower prefill.ring_slots"));
  }
  memory_ = memory;
  madvise(memory_, memory_bytes_, MADV_HUGEPAGE);
  for (int64_t i = 0; i < count; ++i) buffers_.push_back({.data = static_cast<uint8_t*>(memory_) + bytes * static_cast<uint64_t>(i)});
  return absl::OkStatus();
}

void DiskExpertSource::Expect(const std::vector<ExpertId>& order, const StopToken* stop) {
  stop_ = stop;
  status_ = absl::OkStatus();
  image_.Expect({}, stop);
  GiveUpBefore(INT64_MAX);
  places_.clear();
  expected_.clear();
  for (size_t i = 0; i < order.size(); ++i) {
    places_[{order[i].layer, order[i].expert}] = static_cast<int64_t>(i);
    for (int64_t shard = 0; shard < num_shards(); ++shard) {
      const auto record = weights_->Expert(order[i].layer, order[i].expert, shard);
      if (!record.ok() || !record->disk_offset.has_value()) continue;
      expected_.emplace_back(order[i], static_cast<int64_t>(i));
      break;
    }
  }
  ReadAhead();
}

ExpertView DiskExpertSource::Acquire(int64_t layer, int64_t expert, int64_t shard) {
  const ExpertView view = image_.Acquire(layer, expert, shard);
  // The caller does without those before it.
  const auto place = places_.find({layer, expert});
  if (place != places_.end()) GiveUpBefore(place->second);
  ReadAhead();
  const auto record = weights_->Expert(layer, expert, shard);
  if (!record.ok() || !record->disk_offset.has_value()) return view;
  Request* request = Find({layer, expert});
  if (request == nullptr) request = BeginUnforeseen({layer, expert});
  if (request == nullptr) {
    if (status_.ok() && !Stopped()) ++through_mapping_;  // else the pass ends, and reads no more
    return view;
  }
  request->acquired = true;
  if (!AwaitShard(*request, shard) && status_.ok()) return view;  // the pass ends, and reads no more
  return MovedTo(view, buffers_[request->buffer].data + shard_room_[static_cast<size_t>(shard)]);
}

void DiskExpertSource::Release(int64_t layer, int64_t expert, int64_t shard) {
  image_.Release(layer, expert, shard);
  const auto request = std::ranges::find_if(requests_, [&](const Request& r) { return r.acquired && r.id == ExpertId{layer, expert}; });
  if (request == requests_.end()) return;
  if (--request->shards_left > 0) return;
  buffers_[request->buffer].taken = false;
  requests_.erase(request);
  ReadAhead();
}

// For an expert that nobody expected, or whose turn came while all buffers were read into for experts that are given up now: those are waited for. Null: the
// caller holds all buffers, or a wait has ended otherwise.
DiskExpertSource::Request* DiskExpertSource::BeginUnforeseen(const ExpertId& id) {
  if (!expected_.empty() && expected_.front().first == id) expected_.pop_front();
  const int64_t begin_ns = MonotonicNowNs();
  std::optional<size_t> buffer = FreeBuffer();
  while (!buffer.has_value()) {
    const auto ending = std::ranges::find_if(buffers_, [](const Buffer& b) { return !b.taken; });
    if (ending == buffers_.end() || Stopped()) return nullptr;
    if (MonotonicNowNs() - begin_ns > patience_ns_) {
      Fail(absl::DeadlineExceededError(NothingFor(weights_->disk_dir(), patience_ns_)));
      return nullptr;
    }
    reader_->AwaitEnded(ending->reads.front(), kLookNs);
    buffer = FreeBuffer();
  }
  BeginReads(id, INT64_MAX, *buffer);
  return &requests_.back();
}

DiskExpertSource::Request* DiskExpertSource::Find(const ExpertId& id) {
  const auto request = std::ranges::find_if(requests_, [&](const Request& r) { return r.id == id; });
  return request == requests_.end() ? nullptr : &*request;
}

// What was to be acquired before and has not been. Its buffer is read into anew when what is under way has ended.
void DiskExpertSource::GiveUpBefore(int64_t place) {
  while (!expected_.empty() && expected_.front().second < place) expected_.pop_front();
  std::erase_if(requests_, [&](const Request& request) {
    if (request.acquired || request.place >= place) return false;
    buffers_[request.buffer].taken = false;
    return true;
  });
}

void DiskExpertSource::ReadAhead() {
  while (!expected_.empty()) {
    const std::optional<size_t> buffer = FreeBuffer();
    if (!buffer.has_value()) return;
    BeginReads(expected_.front().first, expected_.front().second, *buffer);
    expected_.pop_front();
  }
}

std::optional<size_t> DiskExpertSource::FreeBuffer() {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& buffer = buffers_[i];
    if (buffer.taken) continue;
    std::erase_if(buffer.reads, [&](uint64_t number) {
      if (!reader_->AwaitEnded(number, 0)) return false;
      reader_->Outcome(number).IgnoreError();  // given up: nobody sees its bytes
      return true;
    });
    if (buffer.reads.empty()) return i;
  }
  return std::nullopt;
}

void DiskExpertSource::BeginReads(const ExpertId& id, int64_t place, size_t index) {
  Buffer& buffer = buffers_[index];
  buffer.taken = true;
  Request request{.id = id, .place = place, .buffer = index, .shards_left = num_shards()};
  for (int64_t shard = 0; shard < num_shards(); ++shard) {
    const auto record = weights_->Expert(id.layer, id.expert, shard);
    if (!record.ok() || !record->disk_offset.has_value()) continue;
    const uint64_t number = reader_->Begin(shard, *record->disk_offset, record->record_bytes, buffer.data + shard_room_[static_cast<size_t>(shard)]);
    buffer.reads.push_back(number);
    request.reads.emplace_back(shard, number);
  }
  requests_.push_back(std::move(request));
}

// Whether the shard's record is in the buffer. Not: status_ says why, or the pass is told to end.
bool DiskExpertSource::AwaitShard(Request& request, int64_t shard) {
  const auto read = std::ranges::find_if(request.reads, [&](const auto& r) { return r.first == shard; });
  if (read == request.reads.end()) return status_.ok();  // waited for before
  const uint64_t number = read->second;
  const int64_t begin_ns = MonotonicNowNs();
  bool said = false;
  while (!reader_->AwaitEnded(number, kLookNs)) {
    if (Stopped()) return false;
    const int64_t waited_ns = MonotonicNowNs() - begin_ns;
    const std::string path = weights_->disk_parts()[static_cast<size_t>(shard)].path;
    if (waited_ns > patience_ns_) {
      Fail(absl::DeadlineExceededError(NothingFor(path, waited_ns)));
      return false;
    }
    if (!said && waited_ns > kSlowNs) {
      said = true;
      spdlog::warn("{}; waiting on", NothingFor(path, waited_ns));
    }
  }
  request.reads.erase(read);
  std::erase(buffers_[request.buffer].reads, number);
  const absl::Status outcome = reader_->Outcome(number);
  if (!outcome.ok()) Fail(outcome);
  return outcome.ok();
}

void DiskExpertSource::Fail(absl::Status status) {
  if (status_.ok()) status_ = std::move(status);
}

}  // namespace hearth
