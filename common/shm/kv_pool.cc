// The KV pool's region: geometry first, pages behind it. Contract: kv_pool.h, docs/kv-pool.md. Room: common/shm.
#include "common/shm/kv_pool.h"

#include <string.h>
#include <sys/mman.h>

#include <cerrno>
#include <limits>

#include "common/base/check.h"
#include "common/base/time.h"

namespace hearth {
namespace {

// Bounds far above any model; they keep every product below 2^63.
constexpr uint32_t kLayersMax = 4096;
constexpr uint32_t kRowElementsMax = 1u << 20;
constexpr uint64_t kPagesMax = std::numeric_limits<int32_t>::max();  // page numbers travel as int32

absl::Status CheckGeometry(const KvGeometry& g) {
  if (g.layers == 0 || g.layers > kLayersMax) {
    return absl::InvalidArgumentError(absl::StrCat("KV geometry: ", g.layers, " layers, supported are 1 to ", kLayersMax));
  }
  if (g.row_elements == 0 || g.row_elements > kRowElementsMax) {
    return absl::InvalidArgumentError(absl::StrCat("KV geometry: rows of ", g.row_elements, " elements, supported are 1 to ", kRowElementsMax));
  }
  if (g.dtype != DType::kBF16 && g.dtype != DType::kF8E4M3) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV geometry: dtype number ", static_cast<uint32_t>(g.dtype), ", supported are BF16 (3) and F8_E4M3 (4)"));
  }
  if (g.num_pages == 0 || g.num_pages > kPagesMax) {
    return absl::InvalidArgumentError(absl::StrCat("KV geometry: ", g.num_pages, " pages, supported are 1 to ", kPagesMax));
  }
  if (g.num_pages > std::numeric_limits<int64_t>::max() / 2 / g.page_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("KV geometry: ", g.num_pages, " pages of ", g.page_bytes(), " bytes are beyond any memory"));
  }
  return absl::OkStatus();
}

class SharedKvPool : public KvPool {
 public:
  SharedKvPool(ShmRegion region, const KvGeometry& geometry) : region_(std::move(region)), geometry_(geometry) {}
  const KvGeometry& geometry() const override { return geometry_; }
  uint8_t* pages() const override { return region_.body() + kKvPagesOffset; }
  ShmRegion* region() override { return &region_; }

 private:
  ShmRegion region_;
  const KvGeometry geometry_;  // a private copy: later damage to the shared one moves no page
};

class PrivateKvPool : public KvPool {
 public:
  PrivateKvPool(const KvGeometry& geometry, void* memory, uint64_t bytes)
      : geometry_(geometry), bytes_(bytes), pages_(static_cast<uint8_t*>(memory)) {}
  ~PrivateKvPool() override { munmap(pages_, bytes_); }
  const KvGeometry& geometry() const override { return geometry_; }
  uint8_t* pages() const override { return pages_; }
  ShmRegion* region() override { return nullptr; }

 private:
  const KvGeometry geometry_;
  const uint64_t bytes_;
  uint8_t* const pages_;
};

}  // namespace

absl::Status CheckFits(const KvGeometry& pool, const KvGeometry& wanted) {
  if (pool.layers >= wanted.layers && pool.row_elements == wanted.row_elements && pool.dtype == wanted.dtype) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat("the KV pool holds ", pool.layers, " layers of ", pool.row_elements, " ",
                                                    Sv(DTypeName(pool.dtype)), ", the model needs ", wanted.layers, " of ", wanted.row_elements, " ",
                                                    Sv(DTypeName(wanted.dtype))));
}

absl::StatusOr<std::shared_ptr<KvPool>> KvPool::Create(const RegionPlace& place, const Hash128& generation, const KvGeometry& geometry,
                                                       const AllocationHook& on_allocated) {
  RETURN_IF_ERROR(CheckGeometry(geometry));
  const uint64_t body = kKvPagesOffset + geometry.num_pages * geometry.page_bytes();
  ASSIGN_OR_RETURN(ShmRegion region,
                   ShmRegion::Create(place.Path(kKvPoolWhat, generation), RegionKind::kKvPool, kKvPoolVersion, generation, body, on_allocated));
  // Fresh shared memory is zero: every page says tokens_valid = 0.
  KvPoolHeader header{};
  header.geometry = geometry;
  header.geometry.reserved = 0;
  header.page_bytes = geometry.page_bytes();
  header.pages_offset = kKvPagesOffset;
  header.sum = Xxh3_64(&header, offsetof(KvPoolHeader, sum));
  memcpy(region.body(), &header, sizeof(header));
  region.SetState(RegionState::kReady);
  return std::make_shared<SharedKvPool>(std::move(region), header.geometry);
}

absl::StatusOr<std::shared_ptr<KvPool>> KvPool::Attach(const RegionPlace& place, const Hash128& generation) {
  const std::string path = place.Path(kKvPoolWhat, generation);
  ASSIGN_OR_RETURN(ShmRegion region, ShmRegion::Open(path, RegionKind::kKvPool, kKvPoolVersion, MapMode::kReadWrite));
  if (region.header().generation != generation) {
    return absl::DataLossError(absl::StrCat(path, ": belongs to generation ", region.header().generation.ToHex()));
  }
  if (region.state() != RegionState::kReady) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": is in state ", region.header().state.load(), ", not READY (2)"));
  }
  KvPoolHeader header;
  if (region.body_bytes() < kKvPagesOffset) return absl::DataLossError(absl::StrCat(path, ": too small for a KV pool"));
  memcpy(&header, region.body(), sizeof(header));
  if (header.sum != Xxh3_64(&header, offsetof(KvPoolHeader, sum))) {
    return absl::DataLossError(absl::StrCat(path, ": the geometry's sum does not match: it is damaged"));
  }
  if (absl::Status status = CheckGeometry(header.geometry); !status.ok()) {
    return absl::DataLossError(absl::StrCat(path, ": ", status.message()));
  }
  if (header.page_bytes != header.geometry.page_bytes() || header.pages_offset != kKvPagesOffset ||
      header.geometry.num_pages * header.page_bytes > region.body_bytes() - kKvPagesOffset) {
    return absl::DataLossError(absl::StrCat(path, ": ", header.geometry.num_pages, " pages of ", header.page_bytes, " bytes at ", header.pages_offset,
                                            " contradict the region's ", region.body_bytes(), " bytes"));
  }
  return std::make_shared<SharedKvPool>(std::move(region), header.geometry);
}

absl::StatusOr<std::shared_ptr<KvPool>> KvPool::Private(const KvGeometry& geometry) {
  RETURN_IF_ERROR(CheckGeometry(geometry));
  const uint64_t bytes = geometry.num_pages * geometry.page_bytes();
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("no ", HumanBytes(static_cast<double>(bytes)), " of addresses for a KV pool: ", strerror(errno),
                                                     "; raise the limit of address space (ulimit -v)"));
  }
  return std::make_shared<PrivateKvPool>(geometry, memory, bytes);
}

std::shared_ptr<KvPool> KvPool::InMemory(const KvGeometry& geometry) {
  absl::StatusOr<std::shared_ptr<KvPool>> pool = Private(geometry);
  HEARTH_CHECK(pool.ok());
  return *std::move(pool);
}

}  // namespace hearth
