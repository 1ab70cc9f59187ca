// Experts of an image of which a part lies on disk (common/shm/weight_image.h): what Expect names is read directly into a few buffers, as far ahead as they
// reach; what is in shared memory comes from there.
// Room: common/experts. May touch: common/{device,kernels,shm,disk,base}. Threads: one at a time; Look from any.
//
// A buffer holds one expert, all shards. It is read into when the expert's turn in Expect's order has come, and again when the expert has been released or
// given up and what was under way into it has ended.
// One that nobody expects is read when it is asked for; when all buffers are held, it comes through the image's mapping, by the page cache, with the same
// bytes.
// If the disk gives an error, or nothing for kPatienceNs, status() says so, with the file's name, and the view holds no bytes of the record: the pass fails.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/disk/disk_reader.h"
#include "common/experts/expert_source.h"

namespace hearth {

class DiskExpertSource : public ExpertSource {
 public:
  static constexpr int64_t kPatienceNs = 30'000'000'000;  // as the kernel has with an NVMe command

  // `image`: the same experts through the mapping; outlives the source. `buffers`: at least 2. `queue` null: the best that there is.
  // Errors: FailedPrecondition for an image that is all in shared memory; ResourceExhausted for the buffers' memory; those of DiskReader::Open.
  static absl::StatusOr<std::unique_ptr<DiskExpertSource>> Make(ExpertSource& image, std::shared_ptr<const WeightImage> weights, int64_t buffers,
                                                                std::unique_ptr<ReadQueue> queue = nullptr, int64_t patience_ns = kPatienceNs);
  ~DiskExpertSource() override;

  int64_t num_shards() const override { return image_.num_shards(); }
  void Expect(const std::vector<ExpertId>& order, const StopToken* stop) override;
  ExpertView Acquire(int64_t layer, int64_t expert, int64_t shard) override;
  void Release(int64_t layer, int64_t expert, int64_t shard) override;
  absl::Status status() const override { return status_.ok() ? image_.status() : status_; }
  // One buffer less than there are: it is read into meanwhile.
  int64_t max_held() const override { return static_cast<int64_t>(buffers_.size()) - 1; }

  struct View {
    DiskReader::View reader;
    uint64_t through_mapping = 0;  // records that lie on disk and came by the page cache
  };
  View Look() const { return {reader_->Look(), through_mapping_.load()}; }

 private:
  struct Buffer {
    uint8_t* data = nullptr;
    std::vector<uint64_t> reads;  // numbers of those whose outcome has not been taken
    bool taken = false;           // by a request
  };
  struct Request {
    ExpertId id;
    int64_t place = 0;  // in Expect's order
    size_t buffer = 0;
    std::vector<std::pair<int64_t, uint64_t>> reads;  // shard, number: to be waited for
    bool acquired = false;
    int64_t shards_left = 0;  // to be released
  };

  DiskExpertSource(ExpertSource& image, std::shared_ptr<const WeightImage> weights, std::unique_ptr<DiskReader> reader, int64_t patience_ns)
      : image_(image), weights_(std::move(weights)), patience_ns_(patience_ns), reader_(std::move(reader)) {}
  absl::Status AllocateBuffers(int64_t count);
  Request* Find(const ExpertId& id);
  Request* BeginUnforeseen(const ExpertId& id);
  void GiveUpBefore(int64_t place);
  void ReadAhead();
  std::optional<size_t> FreeBuffer();
  void BeginReads(const ExpertId& id, int64_t place, size_t buffer);
  bool AwaitShard(Request& request, int64_t shard);
  void Fail(absl::Status status);
  // The pass is told to end.
  bool Stopped() const { return stop_ != nullptr && stop_->stopped(); }

  ExpertSource& image_;
  const std::shared_ptr<const WeightImage> weights_;
  const int64_t patience_ns_;
  std::vector<uint64_t> shard_room_;  // where each shard's record begins in a buffer
  void* memory_ = nullptr;            // of all buffers; outlives the reader's reads: ~DiskExpertSource
  uint64_t memory_bytes_ = 0;
  std::unique_ptr<DiskReader> reader_;
  std::vector<Buffer> buffers_;
  const StopToken* stop_ = nullptr;
  std::map<std::pair<int64_t, int64_t>, int64_t> places_;  // by layer and expert: in Expect's order, of all
  std::deque<std::pair<ExpertId, int64_t>> expected_;      // that lie on disk and are not asked for yet
  std::deque<Request> requests_;                           // in order; those given up are not among them
  absl::Status status_;
  std::atomic<uint64_t> through_mapping_{0};
};

}  // namespace hearth
