// Checkpoint -> published weight image: plan, refuse, read, check, place, hash, publish. Layout: docs/weight-image.md.
// Room: common/image. May touch: common/{formats,shm,numa,base}. Not: gRPC. Threads: one caller; makes its own
// reader threads. If the process dies at any point before the last step, no region is READY and the next store removes
// the leftovers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/shm/manifest.h"
#include "common/shm/region.h"

namespace hearth {

struct LoadProgress {
  uint64_t done_bytes = 0;
  uint64_t total_bytes = 0;
  double bytes_per_second = 0;
  double eta_seconds = 0;
};

struct BuildOptions {
  std::string model_dir;
  RegionPlace place;
  uint64_t image_bytes_max = 0;  // what the segments may take of place.dir; experts beyond it go to place.disk_dir. 0: no limit
  int num_shards = 1;            // NUMA shards of routed experts; may exceed the machine's nodes (a pretended topology)
  int num_threads = 0;           // readers; 0: as many as the machine has cores, but 8 to 16
  std::function<void(const LoadProgress&)> allocating;  // as `progress`, before the first read: memory that has been allocated
  std::function<void(const LoadProgress&)> progress;    // several times a second, from the calling thread; may be empty
  std::function<void(const LoadProgress&)> flushing;    // as `progress`, behind it: what of the disk parts has reached the disk
  std::function<bool()> cancelled;                      // asked on the calling thread about twenty times a second; may be empty
  // Called when all else is done, just before the manifest becomes READY: what must exist together with the generation
  // (KV pool, table) is made here. Its error removes everything.
  std::function<absl::Status(const Hash128& generation)> before_ready;
  // Bytes of the model that `planned` is of that must stay available in the shm directory afterwards (KV pool, rings); empty: none. Its error is the image's.
  std::function<absl::StatusOr<uint64_t>(const Manifest& planned)> reserve;
};

struct BuildResult {
  Hash128 generation;
  Hash128 fingerprint;
  uint64_t bytes = 0;       // of all segments, both parts
  uint64_t disk_bytes = 0;  // of the disk parts
  double seconds = 0;
  std::vector<std::string> notes;  // what was assumed, and how memory was placed: for the log
};

// Everything that can be known before the first byte is read is refused before it: config, plan, missing shards, memory
// and disk (needed and available). What can be known only from bytes (NaN codes, bad scales) removes all that was made. Errors:
// see formats/*.h; ResourceExhausted for memory; Cancelled.
absl::StatusOr<BuildResult> BuildImage(const BuildOptions& options);

// Holds a published image against its manifest's sums, and, if `model_dir` is not empty, against the checkpoint's
// bytes. DataLoss names the first tensor that differs.
absl::Status VerifyImage(const RegionPlace& place, const Hash128& generation, const std::string& model_dir,
                         const std::function<void(const LoadProgress&)>& progress);

}  // namespace hearth
