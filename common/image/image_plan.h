// Where every byte of a checkpoint goes in a weight image: rows of the manifest, and the copies that fill them. Layout:
// docs/weight-image.md. Room: common/image. May touch: common/{formats,shm,base}. Threads: any; a value, const
// once made. Reads headers, and of the weights only the tensors that an MTP module repeats.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/formats/model_config.h"
#include "common/formats/safetensors.h"
#include "common/shm/manifest.h"

namespace hearth {

// A rectangle of a source tensor, seen as [rows, row_bytes], and where it goes. A target is a row of the manifest:
// tensor rows first, expert rows behind them.
struct CopyRect {
  uint32_t target = 0;
  uint32_t segment = 0;
  uint64_t row_begin = 0;
  uint64_t rows = 0;
  uint64_t col_begin = 0;  // bytes
  uint64_t col_bytes = 0;
  uint64_t to = 0;         // in the segment's body
  uint64_t to_stride = 0;  // bytes between rows there
};

// One tensor of the checkpoint.
struct ImageSource {
  const CheckpointTensor* tensor = nullptr;  // into ImagePlan::checkpoint
  bool is_scale = false;
  bool widen = false;      // BF16 scales become F32 in the image; rows and columns above count F32 bytes then
  uint64_t row_bytes = 0;  // as placed
  // INT4: its nibbles and its scales come in two tensors and are placed in one, run_bytes of this source every run_stride bytes. 0: without gaps.
  uint64_t run_bytes = 0;
  uint64_t run_stride = 0;
  std::vector<CopyRect> rects;
};

struct ImagePlan {
  ModelConfig config;
  Checkpoint checkpoint;
  Manifest manifest;                   // all but generation, fingerprint and sums
  std::vector<ImageSource> sources;    // in reading order: by file and offset
  std::vector<uint32_t> target_parts;  // rectangles that a target waits for
  uint64_t read_bytes = 0;             // of all sources

  uint64_t segment_bytes() const;  // in shared memory and on disk
  uint64_t expert_bytes() const;   // of them, the routed experts' records: what may lie on disk
  // "model.layers.3.mlp.gate.weight", or "model.layers.3, expert 7, shard 1 of 2".
  std::string TargetName(uint32_t target) const;
};

// image_bytes_max: what the segments may take of shared memory; experts beyond it go to the disk parts, in every layer the same ones, spread evenly over the
// ids (see IsOnDisk). 0: no limit.
// Errors: those of formats/*.h for config, checkpoint and plan; InvalidArgument for num_shards, for experts of mixed dtypes, and for a limit below what must
// be in memory, with both numbers.
absl::StatusOr<ImagePlan> PlanImage(const std::string& model_path, int num_shards, uint64_t image_bytes_max = 0);

// Whether an expert is one of the `on_disk` of `num_experts` that lie on disk. Evenly spread, so that a pass, which takes experts by ascending id, finds the
// disk's among the others and can read the one while it copies the other; ranks that share the ids share the disk's alike.
constexpr bool IsOnDisk(int64_t expert, int64_t on_disk, int64_t num_experts) {
  return (expert + 1) * on_disk / num_experts > expert * on_disk / num_experts;
}

// The image that a checkpoint of this config would make, without its MTP module: rows and sizes, no sums. From config.json alone, for simulation
// (WeightImage::WithoutWeights). Errors: those of ParseModelConfig; InvalidArgument for num_shards.
absl::StatusOr<Manifest> DescribeImage(const ModelTexts& texts, int num_shards);

// The model's identity: XXH3-128 of config.json and of all sources, sorted by name: (name, dtype, shape, XXH3-128 of
// the checkpoint's bytes). It does not depend on the shard count. `digests` is parallel to plan.sources.
Hash128 ModelFingerprint(const ImagePlan& plan, const std::vector<Hash128>& digests);

std::string ManifestTargetName(const Manifest& manifest, uint32_t target);

}  // namespace hearth
