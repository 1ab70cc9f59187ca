// The KV pool: where pages lie, what attaching refuses.
#include "common/shm/kv_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

namespace hearth {
namespace {

namespace fs = std::filesystem;

class KvPoolTest : public testing::Test {
 protected:
  KvPoolTest() {
    char dir[] = "/dev/shm/hearth_kv_test_XXXXXX";
    place_ = {mkdtemp(dir), "n1"};
  }
  ~KvPoolTest() override { fs::remove_all(place_.dir); }
  static KvGeometry Geometry() {
    KvGeometry g;
    g.layers = 6;
    g.row_elements = 80;
    g.num_pages = 5;
    return g;
  }
  absl::StatusCode AttachCode() { return KvPool::Attach(place_, generation_).status().code(); }

  RegionPlace place_;
  const Hash128 generation_ = RandomHash128();
};

TEST_F(KvPoolTest, WhatOneMappingWritesAnotherReads) {
  absl::StatusOr<std::shared_ptr<KvPool>> store = KvPool::Create(place_, generation_, Geometry());
  ASSERT_TRUE(store.ok()) << std::string(store.status().message());
  absl::StatusOr<std::shared_ptr<KvPool>> worker = KvPool::Attach(place_, generation_);
  ASSERT_TRUE(worker.ok()) << std::string(worker.status().message());
  EXPECT_EQ((*worker)->geometry().num_pages, 5u);
  // 1024 header + 6 layers * 64 tokens * 80 elements * 2 bytes = 62464, rounded up to 16 os pages.
  EXPECT_EQ((*worker)->geometry().page_bytes(), 65536u);
  for (int32_t page = 0; page < 5; ++page) {
    EXPECT_EQ((*store)->header(page).tokens_valid.load(), 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*store)->layer(page, 0)) % 64, 0u);
    for (int64_t layer = 0; layer < 6; ++layer) {
      for (int i = 0; i < 64 * 80; ++i)
        reinterpret_cast<bf16*>((*store)->layer(page, layer))[i].bits = static_cast<uint16_t>(page * 1000 + layer * 100 + i % 7);
    }
    for (int t = 0; t < kPageTokens; ++t) (*store)->header(page).token_ids[t] = page * 64 + t;
    (*store)->header(page).tokens_valid.store(64, std::memory_order_release);
  }
  for (int32_t page = 0; page < 5; ++page) {
    EXPECT_EQ((*worker)->header(page).tokens_valid.load(std::memory_order_acquire), 64u);
    EXPECT_EQ((*worker)->header(page).token_ids[63], page * 64 + 63);
    for (int64_t layer = 0; layer < 6; ++layer) {
      for (int i = 0; i < 64 * 80; ++i) ASSERT_EQ(reinterpret_cast<bf16*>((*worker)->layer(page, layer))[i].bits, page * 1000 + layer * 100 + i % 7);
    }
  }
  const uint8_t* end = (*worker)->pages() + 5 * 65536;
  EXPECT_EQ(end, (*worker)->region()->base() + (*worker)->region()->bytes());
}

TEST_F(KvPoolTest, InMemoryHasTheSameShape) {
  const std::shared_ptr<KvPool> pool = KvPool::InMemory(Geometry());
  EXPECT_EQ(pool->region(), nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(pool->pages()) % 4096, 0u);
  reinterpret_cast<bf16*>(pool->layer(4, 5))[64 * 80 - 1] = ToBf16(1.5f);
  EXPECT_EQ(pool->header(4).tokens_valid.load(), 0u);
  EXPECT_EQ(ToFloat(reinterpret_cast<bf16*>(pool->layer(4, 5))[64 * 80 - 1]), 1.5f);
}

TEST_F(KvPoolTest, AttachRefusesWhatItCannotBelieve) {
  EXPECT_EQ(AttachCode(), absl::StatusCode::kNotFound);
  absl::StatusOr<std::shared_ptr<KvPool>> pool = KvPool::Create(place_, generation_, Geometry());
  ASSERT_TRUE(pool.ok());
  ShmRegion& region = *(*pool)->region();
  for (size_t bit = 0; bit < sizeof(KvPoolHeader) * 8; ++bit) {
    region.body()[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    EXPECT_EQ(AttachCode(), absl::StatusCode::kDataLoss) << "bit " << bit;
    region.body()[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
  }
  // A right sum over a geometry that points outside.
  KvPoolHeader header;
  memcpy(&header, region.body(), sizeof(header));
  const KvPoolHeader good = header;
  header.geometry.num_pages = 6;
  header.sum = Xxh3_64(&header, offsetof(KvPoolHeader, sum));
  memcpy(region.body(), &header, sizeof(header));
  EXPECT_EQ(AttachCode(), absl::StatusCode::kDataLoss);
  memcpy(region.body(), &good, sizeof(good));
  EXPECT_EQ(AttachCode(), absl::StatusCode::kOk);
  region.SetState(RegionState::kLoading);
  EXPECT_EQ(AttachCode(), absl::StatusCode::kFailedPrecondition);
  region.SetState(RegionState::kReady);

  const Hash128 other = RandomHash128();
  fs::rename(place_.Path(kKvPoolWhat, generation_), place_.Path(kKvPoolWhat, other));
  EXPECT_EQ(KvPool::Attach(place_, other).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(KvPoolTest, AModelFitsAPoolOfItsRowsAndAtLeastItsLayers) {
  const KvGeometry pool = Geometry();
  EXPECT_TRUE(CheckFits(pool, pool).ok());
  const auto status = [&](auto change) {
    KvGeometry wanted = pool;
    change(wanted);
    return CheckFits(pool, wanted);
  };
  EXPECT_TRUE(status([](KvGeometry& g) { ++g.num_pages; }).ok());
  EXPECT_TRUE(status([](KvGeometry& g) { --g.layers; }).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(status([](KvGeometry& g) { ++g.layers; })));
  EXPECT_TRUE(absl::IsFailedPrecondition(status([](KvGeometry& g) { --g.row_elements; })));
  const absl::Status other = status([](KvGeometry& g) { g.dtype = DType::kF32; });
  EXPECT_THAT(std::string(other.message()), testing::HasSubstr("BF16, the model needs"));
}

TEST_F(KvPoolTest, ImpossibleGeometriesAreRefusedByName) {
  const auto status = [&](auto change) {
    KvGeometry g = Geometry();
    change(g);
    return KvPool::Create(place_, generation_, g).status();
  };
  EXPECT_THAT(std::string(status([](KvGeometry& g) { g.layers = 0; }).message()), testing::HasSubstr("0 layers"));
  EXPECT_THAT(std::string(status([](KvGeometry& g) { g.row_elements = 0; }).message()), testing::HasSubstr("0 elements"));
  EXPECT_THAT(std::string(status([](KvGeometry& g) { g.num_pages = 0; }).message()), testing::HasSubstr("0 pages"));
  EXPECT_THAT(std::string(status([](KvGeometry& g) { g.dtype = DType::kF32; }).message()), testing::HasSubstr("BF16"));
  EXPECT_EQ(status([](KvGeometry& g) { g.num_pages = uint64_t{1} << 62; }).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status([](KvGeometry& g) { g.num_pages = 2'000'000'000; }).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(ListRegions(place_).empty());
}

}  // namespace
}  // namespace hearth
