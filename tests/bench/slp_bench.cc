// Streamed prefill on the host device, over a link that is held to a pace: how much of the copy hides behind the arithmetic. A pass takes at least as long
// as the longer of the two; printed is how much longer it took, for links on which the copy alone takes half to twice the arithmetic's time. Arithmetic is
// a pass over a link without a pace, run before and after each one that is judged.
// With --disk: the same with 0, 25, 50 and 100 % of the experts' bytes on disk (TMPDIR's), read directly; the disk alone reads the same records by the same
// reader, with nothing beside it. Then a pass takes at least as long as the longest of disk, link (--link, bytes/s; 0: without a pace) and arithmetic.
// Usage: slp_bench [MODEL_DIR] [--disk] [--threads-read] [--link N] [--buffers N] [--prefill N] [--chunk N] [--slots N] [--rounds N] [--threads N] [--isa NAME] [--terms 1|2]
//        --slots 0 (the default): a layer's experts
// MODEL_DIR: as forward_bench has it. Never run by ctest.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>

#include "common/base/align.h"
#include "common/base/time.h"
#include "common/disk/disk_reader.h"
#include "common/experts/disk_expert_source.h"
#include "common/slp/slp_engine.h"
#include "tests/bench/limits.h"
#include "tests/model_harness.h"

namespace hearth {
namespace {

struct Flags {
  std::string model_dir;
  ModelHarness::Options harness;
  SlpOptions slp;
  int64_t prefill = 2048;
  int64_t rounds = 5;
  bool disk = false;
  bool threads_read = false;
  int64_t link_bytes_per_s = 0;
  int64_t buffers = 8;
};

std::unique_ptr<ReadQueue> Queue(const Flags& flags) { return flags.threads_read ? MakeThreadQueue(16) : nullptr; }

// An engine over a link of its own pace, with a prompt to pass through it.
class Link {
 public:
  static absl::StatusOr<std::unique_ptr<Link>> Make(const Flags& flags, int64_t bytes_per_s) {
    auto link = std::make_unique<Link>();
    ModelHarness::Options options = flags.harness;
    options.device.link_bytes_per_s = bytes_per_s;
    ASSIGN_OR_RETURN(link->harness_, ModelHarness::Make(flags.model_dir, options));
    SlpOptions slp = flags.slp;
    if (link->harness_->image().disk_bytes() > 0) {
      ASSIGN_OR_RETURN(link->disk_, DiskExpertSource::Make(*link->harness_->model().weights().experts, link->harness_->shared_image(), flags.buffers,
                                                           Queue(flags)));
      slp.experts = link->disk_;
    }
    ASSIGN_OR_RETURN(link->engine_, SlpEngine::Make(link->harness_->device(), link->harness_->model(), slp));
    link->prompt_ = link->harness_->NewStream(flags.prefill);
    link->batch_.form = Form::kPrefill;
    for (int64_t i = 0; i < flags.prefill; ++i) link->batch_.token_ids.push_back(static_cast<int32_t>(i * 7919 % link->harness_->vocab()));
    link->batch_.sequences = {{.first_row = 0, .num_rows = flags.prefill, .pages = link->prompt_.pages.data()}};
    RETURN_IF_ERROR(link->engine_->Run(link->harness_->kv(), link->batch_, nullptr, {}));  // warms up
    return link;
  }

  absl::StatusOr<SlpPassStats> Pass() {
    RETURN_IF_ERROR(engine_->Run(harness_->kv(), batch_, nullptr, {}));
    return engine_->last_pass();
  }

  ~Link() {
    if (room_ != nullptr) munmap(room_, room_bytes_);
  }

  // What a pass reads from disk, and how long that takes with nothing beside it. Every expert is read: with thousands of tokens each is chosen.
  struct DiskTime {
    uint64_t bytes = 0;
    double seconds = 0;
  };
  absl::StatusOr<DiskTime> ReadDisk(const Flags& flags) {
    const WeightImage& image = harness_->image();
    DiskTime time;
    if (image.disk_bytes() == 0) return time;
    std::vector<std::string> paths;
    for (const DiskPart& part : image.disk_parts()) paths.push_back(part.path);
    ASSIGN_OR_RETURN(const auto reader, DiskReader::Open(paths, Queue(flags)));
    const ModelConfig& c = harness_->model().config();
    const std::vector<uint64_t> most = image.disk_record_bytes_max();
    const uint64_t room = AlignUp(*std::ranges::max_element(most), kDiskAlign);
    if (room_ == nullptr) {
      // In huge pages, as the source's buffers: a read into small ones is cut into as many requests as the disk's longest list of them makes it.
      room_bytes_ = room * static_cast<uint64_t>(flags.buffers * image.num_shards());
      void* room_at = mmap(nullptr, room_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (room_at == MAP_FAILED) return absl::ResourceExhaustedError("no memory for buffers");
      room_ = static_cast<uint8_t*>(room_at);
      madvise(room_, room_bytes_, MADV_HUGEPAGE);
      std::memset(room_, 1, room_bytes_);
    }
    std::deque<uint64_t> under_way;
    uint64_t begun = 0;
    const auto end_oldest = [&]() -> absl::Status {
      reader->AwaitEnded(under_way.front(), INT64_MAX / 2);
      const absl::Status status = reader->Outcome(under_way.front());
      under_way.pop_front();
      return status;
    };
    const int64_t begin_ns = MonotonicNowNs();
    for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
      for (int64_t expert = 0; c.IsMoeLayer(layer) && expert < c.n_routed_experts; ++expert) {
        for (int64_t shard = 0; shard < image.num_shards(); ++shard) {
          ASSIGN_OR_RETURN(const ImageExpert record, image.Expert(layer, expert, shard));
          if (!record.disk_offset.has_value()) continue;
          const uint64_t slot = begun++ % static_cast<uint64_t>(flags.buffers * image.num_shards());
          if (under_way.size() == static_cast<size_t>(flags.buffers * image.num_shards())) RETURN_IF_ERROR(end_oldest());
          under_way.push_back(reader->Begin(shard, *record.disk_offset, record.record_bytes, room_ + slot * room));
          time.bytes += record.record_bytes;
        }
      }
    }
    while (!under_way.empty()) RETURN_IF_ERROR(end_oldest());
    time.seconds = static_cast<double>(MonotonicNowNs() - begin_ns) * 1e-9;
    return time;
  }

  // Seconds that the copy of as many bytes takes with nothing beside it.
  double Copy(uint64_t bytes) {
    const std::vector<uint8_t> from(1 << 20, 1);
    std::vector<uint8_t> to(from.size());
    const auto stream = harness_->device().MakeStream("copy alone");
    const int64_t begin_ns = MonotonicNowNs();
    for (uint64_t at = 0; at < bytes; at += from.size()) {
      harness_->device().ops().ToDevice(*stream, {.host = from.data(), .device = to.data(), .bytes = std::min<uint64_t>(from.size(), bytes - at)});
    }
    return static_cast<double>(MonotonicNowNs() - begin_ns) * 1e-9;
  }

 private:
  uint8_t* room_ = nullptr;  // of ReadDisk
  uint64_t room_bytes_ = 0;
  std::unique_ptr<ModelHarness> harness_;
  std::shared_ptr<DiskExpertSource> disk_;  // null: all in memory
  std::unique_ptr<SlpEngine> engine_;
  TestStream prompt_;
  ForwardBatch batch_;
};

double Seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

absl::Status Run(Flags flags) {
  flags.slp.max_rows = flags.prefill;
  flags.harness.num_pages = flags.prefill / kPageTokens + 1;
  ASSIGN_OR_RETURN(const auto unpaced, Link::Make(flags, 0));
  ASSIGN_OR_RETURN(const SlpPassStats first, unpaced->Pass());
  std::printf("%s\n%ld tokens, chunks of %ld, %s, %.1f MB loaded a pass\n", flags.model_dir.c_str(), static_cast<long>(flags.prefill),
              static_cast<long>(flags.slp.chunk_rows),
              flags.slp.expert_slots == 0 ? "a layer's slots" : (std::to_string(flags.slp.expert_slots) + " slots").c_str(),
              static_cast<double>(first.bytes_loaded) * 1e-6);
  std::printf("%12s %10s %12s %10s %10s %26s\n", "link MB/s", "copy ms", "compute ms", "pass ms", "waited ms", "pass / max(copy, compute)");
  for (const double ratio : {0.5, 0.75, 1.0, 1.33, 2.0}) {
    ASSIGN_OR_RETURN(const SlpPassStats recent, unpaced->Pass());
    const double rate = static_cast<double>(recent.bytes_loaded) / (ratio * Seconds(recent.duration_ns));
    ASSIGN_OR_RETURN(const auto paced, Link::Make(flags, static_cast<int64_t>(rate)));
    std::vector<double> copies, computes, passes, waits, ratios;
    for (int64_t round = 0; round < flags.rounds; ++round) {
      // What is compared runs within the same second: shared machines swing.
      ASSIGN_OR_RETURN(const SlpPassStats before, unpaced->Pass());
      ASSIGN_OR_RETURN(const SlpPassStats pass, paced->Pass());
      ASSIGN_OR_RETURN(const SlpPassStats after, unpaced->Pass());
      copies.push_back(paced->Copy(pass.bytes_loaded));
      computes.push_back(Seconds(before.duration_ns + after.duration_ns) / 2);
      passes.push_back(Seconds(pass.duration_ns));
      waits.push_back(Seconds(pass.waited_ns));
      ratios.push_back(passes.back() / std::max(copies.back(), computes.back()));
    }
    std::printf("%12.1f %10.1f %12.1f %10.1f %10.1f %26.2f\n", rate * 1e-6, Median(copies) * 1e3, Median(computes) * 1e3, Median(passes) * 1e3,
                Median(waits) * 1e3, Median(ratios));
  }
  return absl::OkStatus();
}

absl::Status RunDisk(Flags flags) {
  flags.slp.max_rows = flags.prefill;
  flags.harness.num_pages = flags.prefill / kPageTokens + 1;
  std::printf("%s\n%ld tokens, chunks of %ld, %ld buffers, %s\n", flags.model_dir.c_str(), static_cast<long>(flags.prefill),
              static_cast<long>(flags.slp.chunk_rows), static_cast<long>(flags.buffers),
              flags.threads_read ? "threads" : "io_uring where it is allowed");
  std::printf("%8s %10s %10s %10s %10s %12s %10s %10s %36s\n", "on disk", "disk MB", "disk MB/s", "disk ms", "link ms", "compute ms", "pass ms",
              "waited ms", "pass / max(disk, link, compute)");
  ASSIGN_OR_RETURN(const auto in_memory, Link::Make(flags, 0));
  for (const double share : {0.0, 0.25, 0.5, 1.0}) {
    flags.harness.on_disk = share;
    ASSIGN_OR_RETURN(const auto link, Link::Make(flags, flags.link_bytes_per_s));
    sync();  // what the kernel still writes of the images would be in the disk's way
    std::vector<double> disks, links, computes, passes, waits, ratios;
    uint64_t disk_bytes = 0;
    for (int64_t round = 0; round < flags.rounds; ++round) {
      ASSIGN_OR_RETURN(const Link::DiskTime before, link->ReadDisk(flags));
      ASSIGN_OR_RETURN(const SlpPassStats compute, in_memory->Pass());
      ASSIGN_OR_RETURN(const SlpPassStats pass, link->Pass());
      ASSIGN_OR_RETURN(const SlpPassStats compute_after, in_memory->Pass());
      ASSIGN_OR_RETURN(const Link::DiskTime after, link->ReadDisk(flags));
      disk_bytes = before.bytes;
      disks.push_back((before.seconds + after.seconds) / 2);
      links.push_back(flags.link_bytes_per_s > 0 ? link->Copy(pass.bytes_loaded) : 0);
      computes.push_back(Seconds(compute.duration_ns + compute_after.duration_ns) / 2);
      passes.push_back(Seconds(pass.duration_ns));
      waits.push_back(Seconds(pass.waited_ns));
      ratios.push_back(passes.back() / std::max({disks.back(), links.back(), computes.back()}));
    }
    const double disk_s = Median(disks);
    std::printf("%7.0f%% %10.1f %10.1f %10.1f %10.1f %12.1f %10.1f %10.1f %36.2f\n", share * 100, static_cast<double>(disk_bytes) * 1e-6,
                disk_s > 0 ? static_cast<double>(disk_bytes) * 1e-6 / disk_s : 0, disk_s * 1e3, Median(links) * 1e3, Median(computes) * 1e3,
                Median(passes) * 1e3, Median(waits) * 1e3, Median(ratios));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  using namespace hearth;
  Flags flags;
  flags.model_dir = SourceDir() + "/deploy/models/fable-moe";
  // Flags without a value, which TakeFlags knows nothing of.
  std::vector<char*> rest;
  for (int i = 0; i < argc; ++i) {
    const std::string argument = argv[i];
    flags.disk |= argument == "--disk";
    flags.threads_read |= argument == "--threads-read";
    if (argument != "--disk" && argument != "--threads-read") rest.push_back(argv[i]);
  }
  argc = static_cast<int>(rest.size());
  argv = rest.data();
  const bool understood = TakeFlags(argc, argv, &flags.harness.device, &flags.model_dir, [&](const std::string& name, const char* value) {
    const int64_t number = std::atoll(value);
    if (name == "--prefill") return (flags.prefill = number) > 0;
    if (name == "--chunk") return (flags.slp.chunk_rows = number) > 0;
    if (name == "--slots") return (flags.slp.expert_slots = number) >= 0;
    if (name == "--rounds") return (flags.rounds = number) > 0;
    if (name == "--link") return (flags.link_bytes_per_s = number) >= 0;
    if (name == "--buffers") return (flags.buffers = number) >= 2;
    return false;
  });
  if (!understood) return 2;
  if (const absl::Status status = flags.disk ? RunDisk(flags) : Run(flags); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
}
