// Prefill ranks of a test, as threads or forked processes, each with a device, a bound model and an engine of its own, over one image and one group's memory.
// Room: tests. Threads: Run makes one a rank and joins them.
#pragma once

#include <sys/mman.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/device/host/host_device.h"
#include "common/device/host/shm_collectives.h"
#include "common/experts/cpu_expert_engine.h"
#include "common/formats/model_config.h"
#include "common/slp/slp_engine.h"
#include "tests/model_harness.h"
#include "tests/served_rings.h"

namespace hearth {

// Memory that threads, and processes forked later, share.
class GroupMemory {
 public:
  explicit GroupMemory(int ranks)
      : bytes_(ShmCollectivesBytes(ranks)), data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  GroupMemory(const GroupMemory&) = delete;
  GroupMemory& operator=(const GroupMemory&) = delete;
  ~GroupMemory() { munmap(data_, bytes_); }
  void* data() const { return data_; }

 private:
  const uint64_t bytes_;
  void* const data_;
};

struct PrefillRank {
  std::unique_ptr<Collectives> group;
  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Model> model;
  std::unique_ptr<ServedRings> rings;  // null: experts straight from the image
  std::unique_ptr<SlpEngine> engine;

  // ring_slots > 0: experts through rings of so many slots.
  static absl::StatusOr<std::unique_ptr<PrefillRank>> Make(const std::string& model_dir, int num_shards, const HostDeviceOptions& device_options,
                                                           SlpOptions options, int rank, int ranks, void* memory, uint32_t ring_slots = 0) {
    auto made = std::make_unique<PrefillRank>();
    ASSIGN_OR_RETURN(made->group, JoinShmCollectives({.rank = rank, .size = ranks, .memory = memory}));
    ASSIGN_OR_RETURN(made->device, MakeHostDevice(device_options));
    ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(model_dir));
    ASSIGN_OR_RETURN(const std::shared_ptr<const WeightImage> image, ImageOf(model_dir, num_shards));
    ASSIGN_OR_RETURN(made->model, Model::Bind(config, image, *made->device));
    options.ranks = ranks;
    if (ring_slots > 0) {
      made->rings = std::make_unique<ServedRings>(*image, *made->model, ring_slots);
      options.experts = made->rings->source();
    }
    ASSIGN_OR_RETURN(made->engine, SlpEngine::Make(*made->device, *made->model, options));
    RETURN_IF_ERROR(made->engine->SetGroup(made->group.get()));
    return made;
  }
};

class RankGroup {
 public:
  static absl::StatusOr<std::unique_ptr<RankGroup>> Make(const std::string& model_dir, int num_shards, const HostDeviceOptions& device_options,
                                                         const SlpOptions& options, int ranks) {
    auto group = std::unique_ptr<RankGroup>(new RankGroup(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      ASSIGN_OR_RETURN(std::unique_ptr<PrefillRank> made,
                       PrefillRank::Make(model_dir, num_shards, device_options, options, rank, ranks, group->memory_.data()));
      group->ranks_.push_back(std::move(made));
    }
    return group;
  }

  // hooks: by rank, or none. The ranks' statuses.
  std::vector<absl::Status> Run(const KvPool& kv, const ForwardBatch& batch, float* logits, const std::vector<SlpHooks>& hooks = {}) {
    std::vector<absl::Status> statuses(ranks_.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      threads.emplace_back(
          [&, rank] { statuses[rank] = ranks_[rank]->engine->RunShared(kv, batch, logits, hooks.empty() ? SlpHooks{} : hooks[rank]); });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

  PrefillRank& rank(size_t index) { return *ranks_[index]; }
  size_t size() const { return ranks_.size(); }
  // What all ranks sent in the last pass under these names.
  uint64_t Sent(const std::vector<std::string>& names) const {
    uint64_t bytes = 0;
    for (const auto& rank : ranks_) {
      for (const Traffic& traffic : rank->engine->last_pass().traffic) {
        for (const std::string& name : names) bytes += traffic.name == name ? traffic.bytes : 0;
      }
    }
    return bytes;
  }

 private:
  explicit RankGroup(int ranks) : memory_(ranks) {}

  GroupMemory memory_;
  std::vector<std::unique_ptr<PrefillRank>> ranks_;
};

}  // namespace hearth
