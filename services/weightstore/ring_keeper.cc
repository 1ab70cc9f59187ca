#include "services/weightstore/ring_keeper.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <set>

#include "common/base/align.h"
#include "common/base/logging.h"
#include "common/base/time.h"
#include "common/formats/model_config.h"
#include "common/numa/placement.h"
#include "common/numa/topology.h"

namespace hearth {
namespace {

std::vector<ShardHome> HomesOf(const Generation& generation) {
  const Topology topology = DiscoverTopology();
  std::vector<ShardHome> homes = PlaceShards(topology, static_cast<int>(generation.image->num_shards()));
  if (topology.nodes.size() < 2) {
    for (ShardHome& home : homes) home.cpus.clear();  // nothing to choose
  }
  return homes;
}

// The largest record of each shard, in whole os pages.
absl::StatusOr<std::vector<uint64_t>> SlotBytes(const WeightImage& image) {
  ASSIGN_OR_RETURN(const ModelConfig model, ParseModelConfig(image.config_json(), image.generation_config_json()));
  std::vector<uint64_t> bytes(static_cast<size_t>(image.num_shards()), 0);
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    if (!model.IsMoeLayer(layer)) continue;
    for (int64_t expert = 0; expert < model.n_routed_experts; ++expert) {
      for (size_t shard = 0; shard < bytes.size(); ++shard) {
        ASSIGN_OR_RETURN(const ImageExpert record, image.Expert(layer, expert, static_cast<int64_t>(shard)));
        bytes[shard] = std::max(bytes[shard], record.record_bytes);
      }
    }
  }
  if (*std::max_element(bytes.begin(), bytes.end()) == 0) {
    return absl::InvalidArgumentError("the model has no routed experts: set prefill.expert_source = \"image\"");
  }
  // A shard may be empty (fewer blocks than shards); its ring still answers.
  for (uint64_t& b : bytes) b = AlignUp(std::max<uint64_t>(b, 1), kRingSlotAlign);
  return bytes;
}

}  // namespace

void RingKeeper::Admit(uint64_t lease) {
  std::lock_guard lock(mutex_);
  rings_.try_emplace(lease);
}

absl::Status RingKeeper::Make(const Generation& generation, uint64_t lease, const std::string& worker, int64_t slots) {
  if (slots < kRingSlotsMin || slots > kRingSlotsMax) {
    return absl::InvalidArgumentError(absl::StrCat("expert rings of ", slots, " slots; supported are ", kRingSlotsMin, " to ", kRingSlotsMax));
  }
  const absl::Status gone = absl::NotFoundError(absl::StrCat("lease ", lease, " has ended"));
  {
    std::lock_guard lock(mutex_);
    const auto it = rings_.find(lease);
    if (it == rings_.end()) return gone;
    Rings& rings = it->second;
    if (rings.making) return absl::UnavailableError("its expert rings are being made");
    if (!rings.fillers.empty()) {
      const int64_t have = rings.fillers[0]->Look().slots;
      if (have == slots) return absl::OkStatus();
      return absl::FailedPreconditionError(absl::StrCat(worker, " has rings of ", have, " slots, and asks for ", slots));
    }
    rings.worker = worker;
    rings.making = true;
  }
  auto made = Allocate(generation, lease, worker, slots);
  std::vector<std::unique_ptr<RingFiller>> fillers;
  absl::Status status = made.status();
  if (made.ok()) {
    auto served = Serve(generation, worker, *std::move(made));
    status = served.status();
    if (served.ok()) fillers = *std::move(served);
  }
  if (!status.ok()) RemoveFiles(generation.id, lease);
  {
    std::lock_guard lock(mutex_);
    const auto it = rings_.find(lease);
    if (it != rings_.end()) {
      it->second.making = false;
      it->second.fillers = std::move(fillers);
      return status;
    }
  }
  fillers.clear();
  RemoveFiles(generation.id, lease);
  return gone;
}

absl::StatusOr<std::vector<std::unique_ptr<ExpertRing>>> RingKeeper::Allocate(const Generation& generation, uint64_t lease, const std::string& worker,
                                                                              int64_t slots) const {
  ASSIGN_OR_RETURN(const std::vector<uint64_t> slot_bytes, SlotBytes(*generation.image));
  std::vector<ExpertRingGeometry> geometries;
  uint64_t needed = 0;
  for (size_t shard = 0; shard < slot_bytes.size(); ++shard) {
    geometries.push_back(
        {.lease_id = lease, .shard = static_cast<uint32_t>(shard), .num_slots = static_cast<uint32_t>(slots), .slot_bytes = slot_bytes[shard]});
    needed += kRegionHeaderBytes + geometries.back().body_bytes();
  }
  ASSIGN_OR_RETURN(const uint64_t available, ShmAvailableBytes(place_.dir));
  if (needed > available) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "expert rings of ", slots, " slots for ", worker, " need ", HumanBytes(static_cast<double>(needed)), " in ", place_.dir, ", which has ",
        HumanBytes(static_cast<double>(available)), " left: lower prefill.ring_slots, or set ", "prefill.expert_source = \"image\""));
  }
  const std::vector<ShardHome> homes = HomesOf(generation);
  std::vector<std::unique_ptr<ExpertRing>> rings;
  for (const ExpertRingGeometry& geometry : geometries) {
    const PreferNode prefer(homes[geometry.shard].node);
    auto ring = ExpertRing::Create(place_, generation.id, geometry);
    if (!ring.ok()) {
      rings.clear();
      RemoveFiles(generation.id, lease);
      return ring.status();
    }
    rings.push_back(*std::move(ring));
  }
  spdlog::info("{}: {} expert rings of {} slots, {}", worker, rings.size(), slots, HumanBytes(static_cast<double>(needed)));
  return rings;
}

absl::StatusOr<std::vector<std::unique_ptr<RingFiller>>> RingKeeper::Serve(const Generation& generation, const std::string& worker,
                                                                           std::vector<std::unique_ptr<ExpertRing>> rings) const {
  const std::vector<ShardHome> homes = HomesOf(generation);
  const std::vector<DiskPart> parts = generation.image->disk_parts();
  std::vector<std::unique_ptr<RingFiller>> fillers;
  for (std::unique_ptr<ExpertRing>& ring : rings) {
    const uint32_t shard = ring->geometry().shard;
    std::unique_ptr<DiskReader> disk;
    if (!parts[shard].path.empty()) {
      ASSIGN_OR_RETURN(disk, DiskReader::Open({parts[shard].path}));
    }
    fillers.push_back(std::make_unique<RingFiller>(worker, std::move(ring), generation.image, homes[shard], std::move(disk)));
  }
  return fillers;
}

void RingKeeper::Adopt(const Generation& generation) {
  std::map<uint64_t, std::string> living;
  for (const PageTable::Lease& lease : generation.pages->Leases()) {
    if (lease.state == LeaseState::kLive) living[lease.id] = lease.spec.name;
  }
  std::set<uint64_t> found;
  for (const RegionFile& file : ListRegionFiles(place_)) {
    if (file.generation != generation.id) continue;
    if (const std::optional<uint64_t> lease = LeaseOfExpertRing(file.what)) found.insert(*lease);
  }
  for (const uint64_t lease : found) {
    const auto worker = living.find(lease);
    if (worker == living.end()) {
      RemoveFiles(generation.id, lease);
      continue;
    }
    std::vector<std::unique_ptr<ExpertRing>> rings;
    absl::Status status;
    for (int64_t shard = 0; shard < generation.image->num_shards() && status.ok(); ++shard) {
      auto ring = ExpertRing::Open(place_, generation.id, lease, static_cast<uint32_t>(shard));
      status = ring.status();
      if (status.ok()) rings.push_back(*std::move(ring));
    }
    if (!status.ok()) {
      // Either its maker died before the worker heard of it, which then asks again; or it is damaged.
      spdlog::warn("{}: expert rings that can't be adopted are removed: {}", worker->second, std::string(status.message()));
      RemoveFiles(generation.id, lease);
      continue;
    }
    for (const std::unique_ptr<ExpertRing>& ring : rings) ring->region().SetOwner(SelfProcess());
    auto fillers = Serve(generation, worker->second, std::move(rings));
    if (!fillers.ok()) {
      spdlog::warn("{}: expert rings that can't be served are removed: {}", worker->second, std::string(fillers.status().message()));
      RemoveFiles(generation.id, lease);
      continue;
    }
    spdlog::info("{}: {} expert rings adopted", worker->second, fillers->size());
    std::lock_guard lock(mutex_);
    rings_[lease].worker = worker->second;
    rings_[lease].fillers = *std::move(fillers);
  }
}

void RingKeeper::End(uint64_t lease) {
  std::vector<std::unique_ptr<RingFiller>> fillers;
  {
    std::lock_guard lock(mutex_);
    const auto it = rings_.find(lease);
    if (it == rings_.end()) return;
    fillers = std::move(it->second.fillers);
    rings_.erase(it);
  }
  for (std::unique_ptr<RingFiller>& filler : fillers) {
    const std::string path = filler->path();
    filler.reset();
    unlink(path.c_str());
  }
}

void RingKeeper::RemoveFiles(const Hash128& generation, uint64_t lease) const {
  for (const RegionFile& file : ListRegionFiles(place_)) {
    if (file.generation == generation && LeaseOfExpertRing(file.what) == lease) unlink(file.path.c_str());
  }
}

std::vector<RingKeeper::View> RingKeeper::Look() const {
  std::lock_guard lock(mutex_);
  std::vector<View> views;
  for (const auto& [lease, rings] : rings_) {
    for (const std::unique_ptr<RingFiller>& filler : rings.fillers) views.push_back({lease, rings.worker, filler->Look()});
  }
  return views;
}

}  // namespace hearth
