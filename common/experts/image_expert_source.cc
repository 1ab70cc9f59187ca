#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/experts/expert_source.h"

namespace hearth {
namespace {

WeightView View(DType dtype, const void* data, const float* scales, int64_t rows, int64_t cols) {
  return {.data = data,
          .dtype = dtype,
          .rows = rows,
          .cols = cols,
          .row_stride = cols,
          .scales = scales,
          .scale_stride = ScaleBlocks(cols),
          .scale_row0 = 0};
}

// Asks for the pages of a mapped file that are not in the page cache. In small steps, since the kernel takes only a device's largest request of each call
// (force_page_cache_ra, mm/readahead.c); but for a MiB whose first page is there nothing, since asking costs as much as looking at each page.
void FetchPages(const uint8_t* data, uint64_t bytes) {
  constexpr uint64_t kStep = 128 << 10;  // the least that a device's read-ahead is set to
  constexpr uint64_t kLook = 1 << 20;
  for (uint64_t at = 0; at < bytes; at += kStep) {
    uint8_t* begin = const_cast<uint8_t*>(data + at);
    unsigned char there = 0;
    if (at % kLook == 0 && mincore(begin, kImageAlign, &there) == 0 && (there & 1) != 0) {
      at += kLook - kStep;
      continue;
    }
    madvise(begin, std::min(kStep, bytes - at), MADV_WILLNEED);
  }
}

class ImageExpertSource : public ExpertSource {
 public:
  ImageExpertSource(std::shared_ptr<const WeightImage> image, std::vector<int64_t> first_view, std::vector<ExpertView> views)
      : image_(std::move(image)), num_shards_(image_->num_shards()), first_view_(std::move(first_view)), views_(std::move(views)) {}

  int64_t num_shards() const override { return num_shards_; }
  void Expect(const std::vector<ExpertId>&, const StopToken*) override { mark_ = image_->BeginReads(); }
  absl::Status status() const override { return mark_.empty() ? absl::OkStatus() : image_->LostSince(mark_); }
  ExpertView Acquire(int64_t layer, int64_t expert, int64_t shard) override {
    return views_[static_cast<size_t>(first_view_[static_cast<size_t>(layer)] + expert * num_shards_ + shard)];
  }
  void Release(int64_t, int64_t, int64_t) override {}
  void Fetch(int64_t layer, const std::vector<int64_t>& experts) override {
    if (image_->disk_bytes() == 0) return;
    for (const int64_t expert : experts) {
      for (int64_t shard = 0; shard < num_shards_; ++shard) {
        const absl::StatusOr<ImageExpert> found = image_->Expert(layer, expert, shard);
        if (found.ok() && found->disk_offset.has_value()) FetchPages(found->record, found->record_bytes);
      }
    }
  }

 private:
  std::shared_ptr<const WeightImage> image_;  // keeps the mapping
  const int64_t num_shards_;
  std::vector<int64_t> first_view_;  // by layer
  std::vector<ExpertView> views_;    // [layers given, experts, shards]
  WeightImage::Mark mark_;           // of Expect; empty: nobody has called it, or nothing lies on disk
};

}  // namespace

ExpertView MovedTo(ExpertView shard, const uint8_t* record) {
  for (WeightView* view : {&shard.gate, &shard.up, &shard.down}) {
    view->data = record + (static_cast<const uint8_t*>(view->data) - shard.record);
    if (view->scales != nullptr) {
      view->scales = reinterpret_cast<const float*>(record + (reinterpret_cast<const uint8_t*>(view->scales) - shard.record));
    }
  }
  shard.record = record;
  return shard;
}

absl::StatusOr<std::unique_ptr<ExpertSource>> MakeImageExpertSource(std::shared_ptr<const WeightImage> image, const std::vector<int64_t>& layers,
                                                                    int64_t num_experts, int64_t hidden) {
  std::vector<int64_t> first_view;
  std::vector<ExpertView> views;
  for (const int64_t layer : layers) {
    if (static_cast<int64_t>(first_view.size()) <= layer) first_view.resize(static_cast<size_t>(layer) + 1, -1);
    first_view[static_cast<size_t>(layer)] = static_cast<int64_t>(views.size());
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      for (int64_t shard = 0; shard < image->num_shards(); ++shard) {
        auto found = image->Expert(layer, expert, shard);
        if (!found.ok()) return Annotate(found.status(), absl::StrCat("layer ", layer, ", expert ", expert, ", shard ", shard));
        views.push_back({.count = found->count,
                         .gate = View(found->dtypes.gate, found->gate, found->gate_scales, found->count, hidden),
                         .up = View(found->dtypes.up, found->up, found->up_scales, found->count, hidden),
                         .down = View(found->dtypes.down, found->down, found->down_scales, hidden, found->count),
                         .record = found->record,
                         .record_bytes = found->record_bytes});
      }
    }
  }
  return std::make_unique<ImageExpertSource>(std::move(image), std::move(first_view), std::move(views));
}

absl::StatusOr<std::unique_ptr<ExpertSource>> MakeImageExpertSource(std::shared_ptr<const WeightImage> image, int64_t first_layer, int64_t num_layers,
                                                                    int64_t num_experts, int64_t hidden) {
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < num_layers; ++i) layers.push_back(first_layer + i);
  return MakeImageExpertSource(std::move(image), layers, num_experts, hidden);
}

}  // namespace hearth
