// The KV pool: pages of 64 tokens in shared memory, their header, and who may write which word. Layout:
// docs/kv-pool.md. Room: common/shm. May touch: common/base. Processes: the store creates it and names each page's one
// writer in its table; workers map read-write. If a writer dies in mid-store: `tokens_valid` alone is believed; what
// lies beyond it is recomputed by the next writer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "common/base/dtype.h"
#include "common/base/hash.h"
#include "common/base/status.h"
#include "common/shm/region.h"

namespace hearth {

inline constexpr uint64_t kKvPoolVersion = 1;
inline constexpr int64_t kPageTokens = 64;
inline constexpr uint64_t kPageHeaderBytes = 1024;

// At the start of each page. Writer: the page's owner (one stream's one worker), until SEALED; then nobody.
struct KvPageHeader {
  // Tokens [0, tokens_valid) of the page are complete in every layer, their ids below are written. Release store after
  // the KV and the ids.
  std::atomic<uint32_t> tokens_valid;
  // How many of them, from the page's start, the prefill form wrote; the rest were written by the decode form. Stored
  // before tokens_valid.
  std::atomic<uint32_t> prefill_tokens;
  // The pass in progress: pending_tokens << 32 | layers_ready. Zeroed by each new writer; a hint for a reader that
  // follows layer by layer.
  std::atomic<uint64_t> progress;
  int32_t token_ids[kPageTokens];
  uint8_t reserved[kPageHeaderBytes - 16 - 4 * kPageTokens];
};
static_assert(sizeof(KvPageHeader) == kPageHeaderBytes && offsetof(KvPageHeader, token_ids) == 16);

// What a page holds: for each layer 64 tokens of so many elements, laid out as the model's attention and the dtype have it (docs/kv-pool.md).
struct KvGeometry {
  uint32_t layers = 0;
  uint32_t row_elements = 0;   // a token and layer; bytes for kF8E4M3, scales and whatever is kept wider among them
  DType dtype = DType::kBF16;  // or kF8E4M3
  uint32_t reserved = 0;
  uint64_t num_pages = 0;

  uint64_t layer_bytes() const { return DTypeBytes(dtype, static_cast<uint64_t>(kPageTokens) * row_elements); }
  // Pages begin on 4 KiB.
  uint64_t page_bytes() const { return (kPageHeaderBytes + layers * layer_bytes() + 4095) / 4096 * 4096; }
};

// Whether a model that wants `wanted` can keep its KV in pages of `pool`, however many there are: as many layers or more,
// rows of the same elements and dtype. FailedPrecondition says what the pool holds and what is needed.
absl::Status CheckFits(const KvGeometry& pool, const KvGeometry& wanted);

// The body of the pool's region begins with this; the pages follow at kKvPagesOffset of the body. Written once, before
// READY.
struct KvPoolHeader {
  KvGeometry geometry;
  uint64_t page_bytes;    // what the geometry gives: a second opinion
  uint64_t pages_offset;  // from the body's start
  uint64_t sum;           // XXH3-64 of the bytes before this field
};
static_assert(sizeof(KvGeometry) == 24 && offsetof(KvGeometry, row_elements) == 4 && offsetof(KvGeometry, dtype) == 8 &&
              offsetof(KvGeometry, num_pages) == 16);
static_assert(sizeof(KvPoolHeader) == 48 && offsetof(KvPoolHeader, page_bytes) == 24 && offsetof(KvPoolHeader, sum) == 40);
inline constexpr uint64_t kKvPagesOffset = 4096;
inline constexpr std::string_view kKvPoolWhat = "kv";  // hearth.<node>.kv.<generation>

class KvPool {
 public:
  // Allocates all pages, zeroed, and leaves the region READY. Errors and `on_allocated`: as ShmRegion::Create;
  // InvalidArgument for the geometry.
  static absl::StatusOr<std::shared_ptr<KvPool>> Create(const RegionPlace& place, const Hash128& generation, const KvGeometry& geometry,
                                                        const AllocationHook& on_allocated = {});
  // Maps it read-write. Errors: as ShmRegion::Open; FailedPrecondition when not READY; DataLoss for a geometry that
  // can't be.
  static absl::StatusOr<std::shared_ptr<KvPool>> Attach(const RegionPlace& place, const Hash128& generation);
  // A pool in this process's own memory, for simulation. Errors: InvalidArgument for a geometry that can't be; ResourceExhausted where the process may
  // not have as many addresses.
  static absl::StatusOr<std::shared_ptr<KvPool>> Private(const KvGeometry& geometry);
  // The same for tests and measurements, which know what they ask for.
  static std::shared_ptr<KvPool> InMemory(const KvGeometry& geometry);
  virtual ~KvPool() = default;

  virtual const KvGeometry& geometry() const = 0;
  virtual uint8_t* pages() const = 0;  // page i begins at pages() + i * page_bytes()
  virtual ShmRegion* region() = 0;     // null for Private

  KvPageHeader& header(int32_t page) const {
    return *reinterpret_cast<KvPageHeader*>(pages() + static_cast<uint64_t>(page) * geometry().page_bytes());
  }
  // 64 tokens of one layer: geometry().layer_bytes(), on 64 bytes.
  uint8_t* layer(int32_t page, int64_t layer) const {
    return pages() + static_cast<uint64_t>(page) * geometry().page_bytes() + kPageHeaderBytes +
           static_cast<uint64_t>(layer) * geometry().layer_bytes();
  }
};

}  // namespace hearth
