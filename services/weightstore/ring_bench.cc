// What a ring costs: all experts of a model, in order, by each way to a worker's copy of them, in turn within a round:
//   a plain memcpy of the records into as many slots, one thread; from the image (expert source "image"); through a ring of its (source "ring"), which the store's thread fills.
// With --disk the experts lie on TMPDIR's disk, and the first two are the disk alone: the same reader into as many buffers, nothing beside it.
// Usage: ring_bench MODEL_DIR [--disk] [--threads-read] [--slots N] [--rounds N]; MODEL_DIR: `hearth synth`. Never run by ctest.
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "common/base/align.h"
#include "common/base/time.h"
#include "common/disk/disk_reader.h"
#include "common/experts/ring_expert_source.h"
#include "common/formats/model_config.h"
#include "common/image/image_builder.h"
#include "common/image/image_plan.h"
#include "services/weightstore/ring_filler.h"

namespace hearth {
namespace {

namespace fs = std::filesystem;

struct Flags {
  std::string model_dir;
  bool disk = false;
  bool threads_read = false;
  uint32_t slots = 8;
  int rounds = 7;
};

// Directories that go with it.
struct Place {
  explicit Place(const std::string& disk_dir) {
    char shm[] = "/dev/shm/hearth_ring_bench_XXXXXX";
    std::string disk = disk_dir + "/hearth_ring_bench_XXXXXX";
    regions = {mkdtemp(shm), "bench", mkdtemp(disk.data())};
  }
  ~Place() {
    fs::remove_all(regions.dir);
    fs::remove_all(regions.disk_dir);
  }
  RegionPlace regions;
};

// What the worker copies records into, and the disk alone reads: in huge pages, as the buffers of a worker.
struct Room {
  explicit Room(uint64_t bytes) : bytes(bytes) {
    data = static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    madvise(data, bytes, MADV_HUGEPAGE);
    std::memset(data, 1, bytes);
  }
  ~Room() { munmap(data, bytes); }
  uint8_t* data;
  uint64_t bytes;
};

class Bench {
 public:
  absl::Status Run(const Flags& flags) {
    RETURN_IF_ERROR(Build(flags));
    std::printf("%s: %zu experts, %.0f MB, %s, %u slots\n", flags.model_dir.c_str(), order_.size(), static_cast<double>(bytes_) * 1e-6,
                flags.disk ? (flags.threads_read ? "on disk, by threads" : "on disk, by io_uring where it is allowed") : "in memory", flags.slots);
    std::vector<double> alone, image, ring, of_alone, of_image;
    for (int round = 0; round < flags.rounds; ++round) {
      ASSIGN_OR_RETURN(const double a, flags.disk ? DiskAlone(flags) : Plain(flags));
      ASSIGN_OR_RETURN(const double r, Through(*rings_));
      alone.push_back(a);
      ring.push_back(r);
      of_alone.push_back(r / a);
      if (flags.disk) continue;
      ASSIGN_OR_RETURN(const double i, Through(*direct_));
      image.push_back(i);
      of_image.push_back(r / i);
    }
    std::printf("%s %.2f GB/s; ring %.2f GB/s, %.0f%% of it", flags.disk ? "the disk alone" : "memcpy", Median(alone), Median(ring),
                100 * Median(of_alone));
    if (!flags.disk) std::printf("; from the image %.2f GB/s, the ring %.0f%% of it", Median(image), 100 * Median(of_image));
    const RingFiller::View filled = filler_->Look();
    std::printf("; the store's thread fills %.2f GB/s while it fills\n", static_cast<double>(filled.record_bytes) * 1e-9 / filled.busy_seconds);
    return absl::OkStatus();
  }

 private:
  static double Median(std::vector<double> values) {
    std::ranges::nth_element(values, values.begin() + static_cast<int64_t>(values.size() / 2));
    return values[values.size() / 2];
  }

  absl::Status Build(const Flags& flags) {
    ASSIGN_OR_RETURN(const ImagePlan plan, PlanImage(flags.model_dir, 1));
    for (const ExpertRow& row : plan.manifest.experts) record_room_ = std::max(record_room_, AlignUp(row.bytes, kRingSlotAlign));
    const uint64_t limit = flags.disk ? plan.segment_bytes() - plan.expert_bytes() : 0;
    ASSIGN_OR_RETURN(
        const BuildResult built,
        BuildImage({.model_dir = flags.model_dir, .place = place_.regions, .image_bytes_max = limit, .num_shards = 1, .num_threads = 2}));
    ASSIGN_OR_RETURN(image_, WeightImage::Attach(place_.regions, built.generation));
    ASSIGN_OR_RETURN(const ModelConfig model, ParseModelConfig(image_->config_json(), image_->generation_config_json()));
    std::vector<int64_t> layers;
    for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
      if (!model.IsMoeLayer(layer)) continue;
      layers.push_back(layer);
      for (int64_t expert = 0; expert < model.n_routed_experts; ++expert) {
        order_.push_back({layer, expert});
        bytes_ += image_->Expert(layer, expert, 0)->record_bytes;
      }
    }
    ASSIGN_OR_RETURN(direct_, MakeImageExpertSource(image_, layers, model.n_routed_experts, model.hidden_size));
    constexpr uint64_t kLease = 1;
    ASSIGN_OR_RETURN(
        std::unique_ptr<ExpertRing> ring,
        ExpertRing::Create(place_.regions, built.generation, {.lease_id = kLease, .num_slots = flags.slots, .slot_bytes = record_room_}));
    std::unique_ptr<DiskReader> disk;
    if (flags.disk) {
      ASSIGN_OR_RETURN(disk, OpenDisk(flags));
    }
    filler_ = std::make_unique<RingFiller>("bench", std::move(ring), image_, ShardHome{}, std::move(disk));
    ASSIGN_OR_RETURN(rings_, RingExpertSource::Open(*direct_, place_.regions, built.generation, kLease));
    to_ = std::make_unique<Room>(flags.slots * record_room_);
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<DiskReader>> OpenDisk(const Flags& flags) {
    return DiskReader::Open({image_->disk_parts()[0].path}, flags.threads_read ? MakeThreadQueue(16) : nullptr);
  }

  double Rate(int64_t begin_ns) const { return static_cast<double>(bytes_) / static_cast<double>(MonotonicNowNs() - begin_ns); }

  absl::StatusOr<double> Plain(const Flags& flags) {
    std::vector<ImageExpert> records;
    for (const ExpertId& id : order_) records.push_back(*image_->Expert(id.layer, id.expert, 0));
    const int64_t begin_ns = MonotonicNowNs();
    for (size_t i = 0; i < records.size(); ++i) {
      std::memcpy(to_->data + i % flags.slots * record_room_, records[i].record, records[i].record_bytes);
    }
    return Rate(begin_ns);
  }

  absl::StatusOr<double> DiskAlone(const Flags& flags) {
    ASSIGN_OR_RETURN(const auto reader, OpenDisk(flags));
    std::deque<uint64_t> under_way;
    const auto end_oldest = [&] {
      reader->AwaitEnded(under_way.front(), INT64_MAX / 2);
      const absl::Status status = reader->Outcome(under_way.front());
      under_way.pop_front();
      return status;
    };
    const int64_t begin_ns = MonotonicNowNs();
    for (size_t i = 0; i < order_.size(); ++i) {
      if (under_way.size() == flags.slots) RETURN_IF_ERROR(end_oldest());
      const ImageExpert record = *image_->Expert(order_[i].layer, order_[i].expert, 0);
      under_way.push_back(reader->Begin(0, *record.disk_offset, record.record_bytes, to_->data + i % flags.slots * record_room_));
    }
    while (!under_way.empty()) RETURN_IF_ERROR(end_oldest());
    return Rate(begin_ns);
  }

  // The worker's part: each record copied once, as to a device.
  absl::StatusOr<double> Through(ExpertSource& source) {
    const int64_t begin_ns = MonotonicNowNs();
    source.Expect(order_, nullptr);
    for (const ExpertId& id : order_) {
      const ExpertView view = source.Acquire(id.layer, id.expert, 0);
      std::memcpy(to_->data, view.record, view.record_bytes);
      source.Release(id.layer, id.expert, 0);
    }
    const double rate = Rate(begin_ns);
    RETURN_IF_ERROR(source.status());
    if (source.counts().from_image > 0) return absl::InternalError("the ring did not bring every record: there is nothing to measure");
    return rate;
  }

  Place place_{fs::temp_directory_path()};
  std::shared_ptr<const WeightImage> image_;
  std::vector<ExpertId> order_;
  uint64_t bytes_ = 0, record_room_ = 0;
  std::unique_ptr<ExpertSource> direct_;
  std::unique_ptr<RingFiller> filler_;
  std::unique_ptr<RingExpertSource> rings_;
  std::unique_ptr<Room> to_;
};

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  hearth::Flags flags;
  bool understood = true;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const int number = i + 1 < argc ? std::atoi(argv[i + 1]) : 0;
    if (argument == "--disk") {
      flags.disk = true;
    } else if (argument == "--threads-read") {
      flags.threads_read = true;
    } else if (argument == "--slots" && number >= 2) {
      flags.slots = static_cast<uint32_t>(number), ++i;
    } else if (argument == "--rounds" && number >= 1) {
      flags.rounds = number, ++i;
    } else if (argument[0] != '-' && flags.model_dir.empty()) {
      flags.model_dir = argument;
    } else {
      understood = false;
    }
  }
  if (!understood || flags.model_dir.empty()) {
    std::fprintf(stderr, "usage: ring_bench MODEL_DIR [--disk] [--threads-read] [--slots N] [--rounds N]\n");
    return 2;
  }
  if (const absl::Status status = hearth::Bench().Run(flags); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
}
