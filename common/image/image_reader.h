// Streams a checkpoint's tensors from disk: direct reads in big pieces, several at once, in file order.
// Room: common/image. May touch: common/{formats,base}. Threads: makes its own readers; visitors are called
// from all of them. Where a file system refuses O_DIRECT, reads go through the page cache instead.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "common/base/status.h"
#include "common/image/image_builder.h"
#include "common/image/image_plan.h"

namespace hearth {

// A piece, and one unit of direct reads at each end.
inline constexpr uint64_t kReadPieceBytes = 8 << 20;
inline constexpr uint64_t kPieceUnit = 8;
inline constexpr uint64_t kDirectAlign = 4096;
inline constexpr uint64_t kReadBufferBytes = kReadPieceBytes + 2 * kDirectAlign;

struct ReadOptions {
  int num_threads = 1;
  std::function<void(const LoadProgress&)> progress;  // from the calling thread, about five times a second and once at the end
  std::function<bool()> cancelled;                    // from the calling thread, about twenty times a second
};

// What is done with the bytes. Pieces of one source come in order from one thread; different sources in parallel.
class SourceVisitor {
 public:
  virtual ~SourceVisitor() = default;
  // Bytes [at, at + bytes) of source `index`; `at` is a multiple of kPieceUnit and of the dtype's block, `data` may lie on any address.
  virtual absl::Status Piece(size_t index, uint64_t at, const uint8_t* data, uint64_t bytes) = 0;
  // After the last piece of a source, from the same thread.
  virtual absl::Status Done(size_t index) = 0;
};

// Errors: the first one of a visitor; Cancelled; DataLoss for a file that ends early; NotFound, PermissionDenied,
// Internal for one that can't be opened or read.
absl::Status ReadSources(const ImagePlan& plan, SourceVisitor& visitor, const ReadOptions& options);

// Runs `work(thread)` on num_threads threads while the calling thread reports progress and looks at `cancelled`. Once
// `work` returns an error or the work is cancelled, `stop` is true, and workers should return.
absl::Status RunWithProgress(const ReadOptions& options, uint64_t total_bytes, const std::atomic<uint64_t>& done_bytes, std::atomic<bool>& stop,
                             const std::function<absl::Status(int thread)>& work);

// 0: as many threads as this process may use cores, but 8 to 16: threads wait for the disk more than they work, and a
// disk wants several requests at once (2.9 GB on two cores: 9.1 s with 2 readers, 5.9 s with 4, 3.4 s with 8, which was
// this disk's own pace).
int ReaderThreads(int wanted);

}  // namespace hearth
