// The page policy over real regions in a temporary directory: each call, its repetition, and a crash after every single store.
#include "services/weightstore/page_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string.h>

#include <filesystem>
#include <random>
#include <set>

namespace hearth {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;
using Row = PageTable::Row;

constexpr uint64_t kA = 11, kB = 12, kC = 13;
constexpr int64_t kGrace = 1000;
constexpr Hash128 kR1{1, 0}, kR2{2, 0}, kR3{3, 0}, kR4{4, 0};

std::vector<int32_t> Tokens(int count, int first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) tokens[static_cast<size_t>(i)] = first + i;
  return tokens;
}

// One generation's memory, and the store over it. `Restart` is what the next store process does.
class World {
 public:
  explicit World(int pages, const Hash128& fingerprint = {7, 7}) : fingerprint_(fingerprint) {
    std::string name = testing::TempDir() + "/page_table_XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    place_ = {name, "test"};
    pool_ = *KvPool::Create(place_, generation_, {.layers = 1, .row_elements = 8, .num_pages = static_cast<uint64_t>(pages)});
    table_ = *StoreTable::Create(place_, generation_, {.num_pages = static_cast<uint64_t>(pages), .num_rows = 4 * static_cast<uint64_t>(pages)});
  }
  ~World() { std::filesystem::remove_all(place_.dir); }

  PageTable& Start() {
    PageTableOptions options;
    options.fingerprint = fingerprint_;
    options.reuse_decoded_pages = reuse_decoded;
    options.orphan_grace_ns = kGrace;
    options.now_ns = [this] { return now; };
    options.after_store = [this] {
      if (after_store) after_store();
    };
    pages_ = std::make_unique<PageTable>(table_, pool_, options, [this](const ProcessId& id) { return !dead.contains(id.pid); });
    return *pages_;
  }
  PageTable& operator*() { return *pages_; }
  PageTable* operator->() { return pages_.get(); }

  void Lease(uint64_t id, uint64_t numerics = 1) {
    ASSERT_TRUE(pages_->MakeLease(id, {LeaseKind::kDecode, {static_cast<int32_t>(id), 1}, numerics, absl::StrCat("w", id)}).ok());
  }
  // What a worker does: ids, then who wrote them, then the count.
  void Fill(int32_t page, const std::vector<int32_t>& tokens, size_t from, uint32_t prefill = 64, uint32_t valid = 64) {
    KvPageHeader& header = pool_->header(page);
    for (uint32_t i = 0; i < valid; ++i) header.token_ids[i] = tokens[from + i];
    header.prefill_tokens = prefill;
    header.tokens_valid = valid;
  }
  // Allocates, fills and seals the full pages of `tokens`.
  std::vector<Row> Publish(uint64_t lease, const Hash128& request, const std::vector<int32_t>& tokens, uint32_t prefill = 64) {
    const auto count = static_cast<int32_t>(tokens.size() / 64);
    auto rows = pages_->Alloc(lease, request, 0, count);
    EXPECT_TRUE(rows.ok()) << rows.status();
    if (!rows.ok()) return {};
    std::vector<int32_t> indexes;
    for (const Row& row : *rows) {
      Fill(row.page, tokens, static_cast<size_t>(row.index) * 64, prefill);
      indexes.push_back(row.index);
    }
    EXPECT_TRUE(pages_->Seal(lease, request, indexes).ok());
    return *rows;
  }

  std::vector<uint8_t> Snapshot() const {
    std::vector<uint8_t> bytes(table_->region().body_bytes() + headers_bytes());
    memcpy(bytes.data(), table_->region().body(), table_->region().body_bytes());
    for (int32_t page = 0; page < table_->num_pages(); ++page) {
      memcpy(bytes.data() + table_->region().body_bytes() + static_cast<size_t>(page) * kPageHeaderBytes,
             static_cast<const void*>(&pool_->header(page)), kPageHeaderBytes);
    }
    return bytes;
  }
  void Restore(const std::vector<uint8_t>& bytes) {
    pages_.reset();
    memcpy(table_->region().body(), bytes.data(), table_->region().body_bytes());
    for (int32_t page = 0; page < table_->num_pages(); ++page) {
      memcpy(static_cast<void*>(&pool_->header(page)), bytes.data() + table_->region().body_bytes() + static_cast<size_t>(page) * kPageHeaderBytes,
             kPageHeaderBytes);
    }
  }

  struct Reference {
    uint64_t lease;
    uint32_t state;
    int32_t page;
    bool sealed;
    friend bool operator==(const Reference&, const Reference&) = default;
  };
  using State = std::map<std::pair<uint64_t, int32_t>, Reference>;  // (request, index); the requests of these tests have high = 0
  State Rows() const {
    State state;
    for (int32_t i = 0; i < table_->num_rows(); ++i) {
      const RowEntry& r = table_->rows()[i];
      if (r.state == 0) continue;
      const bool sealed = table_->pages()[r.page].state == static_cast<uint32_t>(PageState::kSealed);
      const bool fresh =
          state.emplace(std::pair(r.request.low ^ (r.request.high * 0x9e3779b97f4a7c15), r.index), Reference{r.lease_id, r.state, r.page, sealed})
              .second;
      EXPECT_TRUE(fresh) << "two rows for one index of a stream";
    }
    return state;
  }

  // What must hold in an adopted table, whatever was before.
  void CheckInvariants() {
    std::vector<int> rows_of(static_cast<size_t>(table_->num_pages()), 0);
    for (const auto& [key, reference] : Rows()) {
      ASSERT_GE(reference.page, 0);
      ASSERT_LT(reference.page, table_->num_pages());
      ++rows_of[static_cast<size_t>(reference.page)];
    }
    std::set<std::pair<uint64_t, uint64_t>> published;
    for (int32_t page = 0; page < table_->num_pages(); ++page) {
      const PageEntry& entry = table_->pages()[page];
      const int rows = rows_of[static_cast<size_t>(page)];
      switch (static_cast<PageState>(entry.state.load())) {
        case PageState::kFree: EXPECT_EQ(rows, 0) << page; break;
        case PageState::kOpen: EXPECT_EQ(rows, 1) << page; break;
        case PageState::kSealed:
          if (entry.flags & (kPageUnindexed | kPageMixed)) {
            EXPECT_GT(rows, 0) << page;
          } else {
            EXPECT_EQ(pool_->header(page).tokens_valid, 64u) << page;
            EXPECT_TRUE(published.emplace(entry.hash.low, entry.hash.high).second) << "published twice";
          }
          break;
        default: FAIL() << "page state " << entry.state;
      }
    }
  }

  // Ends everybody and gives out the whole pool: what can't be given out has leaked.
  void CheckNothingLeaked() {
    for (const PageTable::Lease& lease : pages_->Leases()) pages_->EndLease(lease.id);
    now += kGrace + PageTable::kOfferMaxAgeNs;
    pages_->Sweep();
    EXPECT_THAT(pages_->Leases(), IsEmpty());
    EXPECT_EQ(pages_->Count().rows, 0);
    Lease(999);
    auto all = pages_->Alloc(999, {99, 99}, 0, table_->num_pages());
    ASSERT_TRUE(all.ok()) << all.status();
    std::set<int32_t> distinct;
    for (const Row& row : *all) distinct.insert(row.page);
    EXPECT_EQ(static_cast<int32_t>(distinct.size()), table_->num_pages());
  }

  StoreTable& table() { return *table_; }
  KvPool& pool() { return *pool_; }

  int64_t now = 1'000'000;
  bool reuse_decoded = true;
  std::set<int32_t> dead;
  std::function<void()> after_store;

 private:
  size_t headers_bytes() const { return static_cast<size_t>(table_->num_pages()) * kPageHeaderBytes; }

  const Hash128 fingerprint_;
  const Hash128 generation_{5, 6};
  RegionPlace place_;
  std::shared_ptr<KvPool> pool_;
  std::shared_ptr<StoreTable> table_;
  std::unique_ptr<PageTable> pages_;
};

std::vector<int32_t> PagesOf(const std::vector<Row>& rows) {
  std::vector<int32_t> pages;
  for (const Row& row : rows) pages.push_back(row.page);
  return pages;
}

TEST(PageTable, AllocIsRepeatableAndFillsGaps) {
  World world(8);
  world.Start();
  world.Lease(kA);
  const auto first = world->Alloc(kA, kR1, 0, 2);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(*first, *world->Alloc(kA, kR1, 0, 2));
  const auto more = world->Alloc(kA, kR1, 1, 3);
  ASSERT_TRUE(more.ok());
  EXPECT_EQ((*more)[0], (*first)[1]);
  EXPECT_EQ(world->Count().open, 4);
  EXPECT_EQ(world->Count().free, 4);
  EXPECT_TRUE(absl::IsInvalidArgument(world->Alloc(kA, kR1, -1, 2).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(world->Alloc(kA, kR1, 0, 0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(world->Alloc(kA, kR1, 2'000'000'000, 2'000'000'000).status()));
  EXPECT_TRUE(absl::IsNotFound(world->Alloc(kC, kR1, 0, 1).status()));
}

TEST(PageTable, AllocGivesAllOrNothing) {
  World world(4);
  world.Start();
  world.Lease(kA);
  ASSERT_TRUE(world->Alloc(kA, kR1, 0, 3).ok());
  const auto none = world->Alloc(kA, kR2, 0, 2);
  EXPECT_TRUE(absl::IsResourceExhausted(none.status()));
  EXPECT_THAT(std::string(none.status().message()), testing::HasSubstr("needed 2 KV pages, 1 of 4"));
  EXPECT_EQ(world->Count().open, 3);
  EXPECT_TRUE(world->Alloc(kA, kR2, 0, 1).ok());
}

TEST(PageTable, AllocGivesWhatThereIsToWhomThatWillDo) {
  World world(5);
  world.Start();
  world.Lease(kA);
  world.Lease(kB);
  ASSERT_TRUE(world->Alloc(kA, kR1, 0, 2).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(world->Alloc(kB, kR2, 0, 5).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(world->Alloc(kB, kR2, 0, 5, 4).status()));
  EXPECT_EQ(world->Count().open, 2) << "what is refused takes nothing";
  const auto some = world->Alloc(kB, kR2, 0, 5, 1);
  ASSERT_TRUE(some.ok()) << some.status();
  ASSERT_THAT(*some, SizeIs(3));
  for (int32_t i = 0; i < 3; ++i) EXPECT_EQ((*some)[static_cast<size_t>(i)].index, i);
  EXPECT_EQ(*world->Alloc(kB, kR2, 0, 5, 1), *some) << "repeated: pages that the stream has count";
  EXPECT_EQ(*world->Alloc(kB, kR2, 0, 5, 3), *some);
  EXPECT_TRUE(absl::IsResourceExhausted(world->Alloc(kB, kR2, 3, 2, 1).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(world->Alloc(kB, kR2, 0, 5, 4).status()));
  // What becomes free goes behind what it has, and never over a gap.
  ASSERT_TRUE(world->Free(kA, kR1, 1).ok());
  const auto more = world->Alloc(kB, kR2, 2, 3, 1);
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ((*more)[0], (*some)[2]);
  EXPECT_THAT(*more, SizeIs(2));
  EXPECT_TRUE(absl::IsInvalidArgument(world->Alloc(kB, kR2, 0, 2, 3).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(world->Alloc(kB, kR2, 0, 2, -1).status()));
  // Rows run out as pages do: 4 a page here, and SEALED pages that many streams share take them all.
  World shared(2);
  shared.Start();
  shared.Lease(kA);
  shared.Publish(kA, kR1, Tokens(64));
  for (uint64_t i = 0; i < 6; ++i) ASSERT_THAT(*shared->Match(kA, {100 + i, 0}, Tokens(65)), SizeIs(1));
  EXPECT_THAT(*shared->Alloc(kA, kR2, 0, 2, 1), SizeIs(1));
  EXPECT_TRUE(absl::IsResourceExhausted(shared->Alloc(kA, kR3, 0, 1, 1).status()));
}

TEST(PageTable, AllocHandsOutZeroedHeaders) {
  World world(1);
  world.Start();
  world.Lease(kA);
  const int32_t page = (*world->Alloc(kA, kR1, 0, 1))[0].page;
  world.Fill(page, Tokens(64), 0, 10, 20);
  world.pool().header(page).progress = 77;
  ASSERT_TRUE(world->Free(kA, kR1, 0).ok());
  ASSERT_TRUE(world->Alloc(kA, kR2, 0, 1).ok());
  EXPECT_EQ(world.pool().header(page).tokens_valid, 0u);
  EXPECT_EQ(world.pool().header(page).prefill_tokens, 0u);
  EXPECT_EQ(world.pool().header(page).progress, 0u);
}

TEST(PageTable, MatchFindsWholePagesBelowTheLastToken) {
  World world(8);
  world.Start();
  world.Lease(kA);
  const std::vector<Row> published = world.Publish(kA, kR1, Tokens(192));
  for (const auto& [tokens, hits] : std::vector<std::pair<int, size_t>>{{1, 0}, {64, 0}, {65, 1}, {128, 1}, {129, 2}, {192, 2}, {193, 3}, {500, 3}}) {
    const auto rows = world->Match(kA, kR2, Tokens(tokens));
    ASSERT_TRUE(rows.ok());
    EXPECT_THAT(*rows, SizeIs(hits)) << tokens;
    EXPECT_EQ(world->Peek(Tokens(tokens)), static_cast<int64_t>(hits) * 64) << tokens;
    for (size_t i = 0; i < rows->size(); ++i) EXPECT_EQ((*rows)[i], (Row{static_cast<int32_t>(i), published[i].page, true}));
    ASSERT_TRUE(world->Free(kA, kR2, 0).ok());
  }
  auto other = Tokens(193);
  other[70] = 9999;
  EXPECT_THAT(*world->Match(kA, kR2, other), SizeIs(1));
  EXPECT_THAT(*world->Match(kA, kR2, other), SizeIs(1));  // repeated
  EXPECT_THAT(*world->Match(kA, kR3, {}), IsEmpty());
  EXPECT_EQ(world->Count().rows, 3 + 1);
}

TEST(PageTable, MatchComparesTheIdsThemselves) {
  World world(4);
  world.Start();
  world.Lease(kA);
  const std::vector<Row> published = world.Publish(kA, kR1, Tokens(64));
  world.pool().header(published[0].page).token_ids[5] = -1;
  EXPECT_THAT(*world->Match(kA, kR2, Tokens(65)), IsEmpty());
  EXPECT_EQ(world->Peek(Tokens(65)), 0);
}

TEST(PageTable, OnlyOneNumericsShares) {
  World world(8);
  world.Start();
  world.Lease(kA, 1);
  world.Lease(kB, 2);
  world.Publish(kA, kR1, Tokens(64));
  EXPECT_THAT(*world->Match(kB, kR2, Tokens(65)), IsEmpty());
  EXPECT_THAT(*world->Match(kA, kR3, Tokens(65)), SizeIs(1));
  EXPECT_EQ(world->Peek(Tokens(65)), 64);
  world->EndLease(kA);
  EXPECT_EQ(world->Peek(Tokens(65)), 0);  // nobody left who could use it
}

TEST(PageTable, PageOfTwoNumericsIsNeverPublished) {
  World world(8);
  world.Start();
  world.Lease(kA, 1);
  world.Lease(kB, 2);
  const auto rows = world->Alloc(kA, kR1, 0, 2);
  world.Fill((*rows)[0].page, Tokens(128), 0, 64, 30);
  ASSERT_TRUE(world->Offer(kA, kR1).ok());
  uint64_t holder = 0;
  ASSERT_TRUE(world->Take(kB, kR1, &holder).ok());
  world.Fill((*rows)[0].page, Tokens(128), 0);
  world.Fill((*rows)[1].page, Tokens(128), 64);
  ASSERT_TRUE(world->Seal(kB, kR1, {0, 1}).ok());
  EXPECT_EQ(world.table().pages()[(*rows)[0].page].flags & kPageMixed, kPageMixed);
  EXPECT_EQ(world.table().pages()[(*rows)[1].page].flags & kPageMixed, kPageMixed);
  EXPECT_THAT(*world->Match(kB, kR2, Tokens(129)), IsEmpty());
  EXPECT_THAT(*world->Match(kA, kR3, Tokens(129)), IsEmpty());
  world.Start();
  EXPECT_THAT(*world->Match(kB, kR2, Tokens(129)), IsEmpty());
  ASSERT_TRUE(world->Free(kB, kR1, 0).ok());
  EXPECT_EQ(world->Count().free, 8);
}

TEST(PageTable, AnotherModelSharesNothing) {
  World one(4, {1, 1}), two(4, {2, 2});
  one.Start();
  two.Start();
  one.Lease(kA);
  two.Lease(kA);
  const auto a = one.Publish(kA, kR1, Tokens(64));
  const auto b = two.Publish(kA, kR1, Tokens(64));
  EXPECT_NE(one.table().pages()[a[0].page].hash, two.table().pages()[b[0].page].hash);
}

TEST(PageTable, DecodeWrittenIsInheritedAndCanBeShutOut) {
  for (const bool reuse : {true, false}) {
    World world(8);
    world.reuse_decoded = reuse;
    world.Start();
    world.Lease(kA);
    const auto rows = *world->Alloc(kA, kR1, 0, 3);
    const auto tokens = Tokens(193);
    world.Fill(rows[0].page, tokens, 0, 64);
    world.Fill(rows[1].page, tokens, 64, 63);  // its last token by decode
    world.Fill(rows[2].page, tokens, 128, 64);
    ASSERT_TRUE(world->Seal(kA, kR1, {0, 1, 2}).ok());
    EXPECT_EQ(world.table().pages()[rows[0].page].flags, 0u);
    EXPECT_EQ(world.table().pages()[rows[1].page].flags, kPageDecodeWritten);
    EXPECT_EQ(world.table().pages()[rows[2].page].flags, kPageDecodeWritten);
    EXPECT_THAT(*world->Match(kA, kR2, tokens), SizeIs(reuse ? 3 : 1));
    EXPECT_EQ(world->Peek(tokens), reuse ? 192 : 64);
  }
}

TEST(PageTable, TheLongestChainWinsOverThePurest) {
  World world(8);
  world.Start();
  world.Lease(kA);
  world.Publish(kA, kR1, Tokens(64), 64);                      // one page by prefill
  const auto longer = world.Publish(kA, kR2, Tokens(128), 0);  // two by decode
  EXPECT_EQ(PagesOf(*world->Match(kA, kR3, Tokens(129))), PagesOf(longer));
}

TEST(PageTable, PrefillTokensBeyondTheValidOnesCountAsValid) {
  World world(2);
  world.Start();
  world.Lease(kA);
  const auto rows = world.Publish(kA, kR1, Tokens(64), 100);
  EXPECT_EQ(world.table().pages()[rows[0].page].flags, 0u);
}

TEST(PageTable, SealWantsFullPagesInOrderAndRepeats) {
  World world(8);
  world.Start();
  world.Lease(kA);
  world.Lease(kB);
  const auto rows = *world->Alloc(kA, kR1, 0, 3);
  const auto tokens = Tokens(192);
  world.Fill(rows[0].page, tokens, 0);
  world.Fill(rows[1].page, tokens, 64);
  world.Fill(rows[2].page, tokens, 128, 64, 63);
  EXPECT_TRUE(absl::IsFailedPrecondition(world->Seal(kA, kR1, {1})));  // its parent is not sealed
  EXPECT_TRUE(absl::IsFailedPrecondition(world->Seal(kB, kR1, {0})));  // not his
  EXPECT_TRUE(absl::IsInvalidArgument(world->Seal(kA, kR1, {0, 2})));  // not consecutive
  EXPECT_TRUE(absl::IsNotFound(world->Seal(kA, kR1, {3})));
  EXPECT_TRUE(absl::IsFailedPrecondition(world->Seal(kA, kR1, {0, 1, 2})));  // the last is not full; the others are sealed
  EXPECT_TRUE(world->Seal(kA, kR1, {0, 1}).ok());
  EXPECT_EQ(world->Count().sealed_referenced, 2);
  EXPECT_EQ((*world->Alloc(kA, kR1, 0, 1))[0], (Row{0, rows[0].page, true}));
}

TEST(PageTable, AnEqualPageIsNotPublishedTwiceAndGoesWithItsLastRow) {
  World world(8);
  world.Start();
  world.Lease(kA);
  const auto first = world.Publish(kA, kR1, Tokens(128));
  const auto second = world.Publish(kA, kR2, Tokens(128));
  EXPECT_EQ(world.table().pages()[second[0].page].flags, kPageUnindexed);
  EXPECT_EQ(PagesOf(*world->Match(kA, kR3, Tokens(129))), PagesOf(first));
  // A stream of an unindexed page goes on publishing what is new.
  const auto third = world->Alloc(kA, kR2, 2, 1);
  world.Fill((*third)[0].page, Tokens(192), 128);
  ASSERT_TRUE(world->Seal(kA, kR2, {2}).ok());
  EXPECT_THAT(*world->Match(kA, kR4, Tokens(193)), SizeIs(3));
  ASSERT_TRUE(world->Free(kA, kR2, 0).ok());
  EXPECT_EQ(world->Count().free, 8 - 3);
  world.Start();
  world.CheckInvariants();
  EXPECT_EQ(world->Count().free, 8 - 3);
}

TEST(PageTable, LeastRecentlyUsedIsEvictedFirstAndHeldNever) {
  World world(4);
  world.Start();
  world.Lease(kA);
  const auto one = world.Publish(kA, kR1, Tokens(64, 1000));
  const auto two = world.Publish(kA, kR2, Tokens(64, 2000));
  const auto three = world.Publish(kA, kR3, Tokens(64, 3000));
  ASSERT_TRUE(world->Free(kA, kR1, 0).ok());
  ASSERT_TRUE(world->Free(kA, kR2, 0).ok());
  ASSERT_THAT(*world->Match(kA, kR1, Tokens(65, 1000)), SizeIs(1));  // used again: two is now the oldest
  ASSERT_TRUE(world->Free(kA, kR1, 0).ok());
  EXPECT_EQ(world->Count().sealed_cached, 2);
  world.Start();                                  // the order survives the process
  ASSERT_TRUE(world->Alloc(kA, kR4, 0, 1).ok());  // the free one
  EXPECT_EQ(PagesOf(*world->Alloc(kA, kR4, 1, 1)), PagesOf(two));
  EXPECT_THAT(*world->Match(kA, kR2, Tokens(65, 2000)), IsEmpty());
  EXPECT_EQ(PagesOf(*world->Alloc(kA, kR4, 2, 1)), PagesOf(one));
  EXPECT_TRUE(absl::IsResourceExhausted(world->Alloc(kA, kR4, 3, 1).status()));
  EXPECT_EQ(PagesOf(*world->Match(kA, kR2, Tokens(65, 3000))), PagesOf(three));
}

TEST(PageTable, NobodyTakesFromTheLiving) {
  World world(4);
  world.Start();
  world.Lease(kA);
  world.Lease(kB);
  const auto rows = *world->Alloc(kA, kR1, 0, 2);
  uint64_t holder = 0;
  EXPECT_TRUE(absl::IsFailedPrecondition(world->Take(kB, kR1, &holder).status()));
  EXPECT_EQ(holder, kA);
  EXPECT_EQ(*world->Take(kA, kR1, &holder), rows);  // its own is no theft
  EXPECT_TRUE(absl::IsFailedPrecondition(world->Alloc(kB, kR1, 0, 1).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(world->Match(kB, kR1, Tokens(65)).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(world->Free(kB, kR1, 0)));
  holder = 0;
  EXPECT_TRUE(absl::IsFailedPrecondition(world->FreeUnheld(kR1, 0, &holder)));
  EXPECT_EQ(holder, kA);
  EXPECT_THAT(*world->Take(kB, kR2, &holder), IsEmpty());  // nothing is left of it
}

TEST(PageTable, AnOfferIsTakenOnceAndBothCallsRepeat) {
  World world(4);
  world.Start();
  world.Lease(kA);
  world.Lease(kB);
  world.Lease(kC);
  const auto rows = *world->Alloc(kA, kR1, 0, 2);
  ASSERT_TRUE(world->Offer(kA, kR1).ok());
  ASSERT_TRUE(world->Offer(kA, kR1).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(world->Alloc(kA, kR1, 2, 1).status()));  // it has given it away
  uint64_t holder = 0;
  EXPECT_EQ(*world->Take(kB, kR1, &holder), rows);
  EXPECT_EQ(*world->Take(kB, kR1, &holder), rows);
  ASSERT_TRUE(world->Offer(kA, kR1).ok());  // a late repetition changes nothing
  EXPECT_TRUE(absl::IsFailedPrecondition(world->Take(kC, kR1, &holder).status()));
  EXPECT_EQ(holder, kB);
  EXPECT_TRUE(absl::IsNotFound(world->Offer(kA, kR2)));
  ASSERT_TRUE(world->Free(kB, kR1, 1).ok());
  ASSERT_TRUE(world->Free(kB, kR1, 1).ok());
  EXPECT_EQ(world->Count().rows, 1);
}

TEST(PageTable, OrphansWaitForTheirGrace) {
  World world(4);
  world.Start();
  world.Lease(kA);
  world.Lease(kB);
  ASSERT_TRUE(world->Alloc(kA, kR1, 0, 1).ok());
  ASSERT_TRUE(world->Alloc(kA, kR2, 0, 1).ok());
  world->EndLease(kA);
  world->EndLease(kA);
  EXPECT_TRUE(absl::IsNotFound(world->Alloc(kA, kR1, 0, 1).status()));
  world.now += kGrace - 1;
  world->Sweep();
  uint64_t holder = 0;
  EXPECT_THAT(*world->Take(kB, kR1, &holder), SizeIs(1));
  world.now += 1;
  world->Sweep();
  EXPECT_THAT(*world->Take(kB, kR2, &holder), IsEmpty());
  EXPECT_EQ(world->Count().open, 1);  // what was taken stays
  EXPECT_THAT(world->Leases(), SizeIs(1));
  EXPECT_EQ(world->Leases()[0].id, kB);
}

TEST(PageTable, TheRouterFreesWhatNobodyHolds) {
  World world(4);
  world.Start();
  world.Lease(kA);
  ASSERT_TRUE(world->Alloc(kA, kR1, 0, 1).ok());
  ASSERT_TRUE(world->Alloc(kA, kR2, 0, 1).ok());
  ASSERT_TRUE(world->Offer(kA, kR1).ok());
  uint64_t holder = 0;
  EXPECT_TRUE(world->FreeUnheld(kR1, 0, &holder).ok());
  EXPECT_TRUE(world->FreeUnheld(kR1, 0, &holder).ok());
  world->EndLease(kA);
  EXPECT_TRUE(world->FreeUnheld(kR2, 0, &holder).ok());
  EXPECT_EQ(world->Count().free, 4);
}

TEST(PageTable, AnOfferThatNobodyWantsEnds) {
  World world(4);
  world.Start();
  world.Lease(kA);
  ASSERT_TRUE(world->Alloc(kA, kR1, 0, 2).ok());
  ASSERT_TRUE(world->Offer(kA, kR1).ok());
  world.now += PageTable::kOfferMaxAgeNs - 1;
  world->Sweep();
  EXPECT_EQ(world->Count().open, 2);
  world.now += 1;
  world->Sweep();
  EXPECT_EQ(world->Count().open, 0);
}

TEST(PageTable, WhatNobodyHoldsWaitsOnlyShortlyWhileThePoolIsFull) {
  World world(4);
  world.Start();
  world.Lease(kA);
  world.Lease(kB);
  ASSERT_TRUE(world->Alloc(kA, kR1, 0, 2).ok());
  ASSERT_TRUE(world->Offer(kA, kR1).ok());
  world.now += PageTable::kOfferMaxAgeWhenFullNs;
  world->Sweep();
  EXPECT_EQ(world->Count().open, 2) << "nobody was refused a page";
  EXPECT_TRUE(absl::IsResourceExhausted(world->Alloc(kB, kR2, 0, 3).status()));
  world->Sweep();
  EXPECT_EQ(world->Count().open, 0);
  EXPECT_TRUE(world->Alloc(kB, kR2, 0, 3).ok());
}

TEST(PageTable, ReattachFreesWhatIsHeldAndNotNamed) {
  World world(8);
  world.Start();
  world.Lease(kA);
  const auto one = *world->Alloc(kA, kR1, 0, 2);
  ASSERT_TRUE(world->Alloc(kA, kR2, 0, 1).ok());
  ASSERT_TRUE(world->Alloc(kA, kR3, 0, 1).ok());
  ASSERT_TRUE(world->Offer(kA, kR3).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(world->Reattach(kA, {77, 1}, {})));
  EXPECT_TRUE(absl::IsNotFound(world->Reattach(kB, {static_cast<int32_t>(kB), 1}, {})));
  ASSERT_TRUE(world->Reattach(kA, {static_cast<int32_t>(kA), 1}, {{kR1, {one[0].page}}}).ok());
  const World::State rows = world.Rows();
  EXPECT_EQ(rows.size(), 2u);
  EXPECT_TRUE(rows.contains({kR1.low, 0}));
  EXPECT_TRUE(rows.contains({kR3.low, 0}));  // offered: another's to take
}

TEST(PageTable, ATakeWithoutAnswerIsUndoneAtReattach) {
  World world(8);
  world.Start();
  world.Lease(kA);
  world.Lease(kB);
  const auto rows = *world->Alloc(kA, kR1, 0, 2);
  ASSERT_TRUE(world->Offer(kA, kR1).ok());
  uint64_t holder = 0;
  ASSERT_TRUE(world->Take(kB, kR1, &holder).ok());
  ASSERT_TRUE(world->Reattach(kB, {static_cast<int32_t>(kB), 1}, {{kR1, {}}}).ok());
  EXPECT_EQ(*world->Take(kA, kR1, &holder), rows);
}

TEST(PageTable, LeasesOfTheDeadAreSeenAtAdoption) {
  World world(4);
  world.Start();
  world.Lease(kA);
  world.Lease(kB);
  ASSERT_TRUE(world->Alloc(kA, kR1, 0, 2).ok());
  world.dead = {static_cast<int32_t>(kA), static_cast<int32_t>(kB)};
  world.Start();
  const auto leases = world->Leases();
  ASSERT_THAT(leases, SizeIs(1));  // B held nothing
  EXPECT_EQ(leases[0].state, LeaseState::kDead);
  EXPECT_EQ(leases[0].rows, 2);
  world.Lease(kC);
  uint64_t holder = 0;
  EXPECT_THAT(*world->Take(kC, kR1, &holder), SizeIs(2));
  world->Sweep();
  EXPECT_THAT(world->Leases(), SizeIs(1));
}

TEST(PageTable, LeasesRunOutWithAnErrorAndComeBack) {
  World world(4);
  world.Start();
  for (uint64_t id = 1; id <= static_cast<uint64_t>(kLeasesMax); ++id) world.Lease(id);
  EXPECT_TRUE(absl::IsResourceExhausted(world->MakeLease(1000, {})));
  world->EndLease(5);
  world->Sweep();
  EXPECT_TRUE(world->MakeLease(1000, {}).ok());
}

// ---- Crashes ----

struct Step {
  std::string name;
  std::function<absl::Status(PageTable&)> call;
  std::function<void(World&)> before;  // what workers do in between
};

// A working day: every call, with sharing, duplicates, hand-off, orphans and eviction in it.
std::vector<Step> Day() {
  const auto tokens = [] { return Tokens(256); };
  const auto fill = [tokens](const Hash128& request, std::vector<int32_t> indexes) {
    return [=](World& world) {
      const World::State rows = world.Rows();
      for (const int32_t index : indexes) world.Fill(rows.at({request.low, index}).page, tokens(), static_cast<size_t>(index) * 64);
    };
  };
  const auto lease = [](uint64_t id) {
    return [id](PageTable& t) { return t.MakeLease(id, {LeaseKind::kDecode, {static_cast<int32_t>(id), 1}, 1, "w"}); };
  };
  static uint64_t holder;
  return {
      {"lease A", lease(kA), {}},
      {"lease B", lease(kB), {}},
      {"alloc", [](PageTable& t) { return t.Alloc(kA, kR1, 0, 3).status(); }, {}},
      {"seal",
       [](PageTable& t) {
         return t.Seal(kA, kR1, {0, 1});
       },
       fill(kR1, {0, 1})},
      {"alloc equal", [](PageTable& t) { return t.Alloc(kA, kR2, 0, 2).status(); }, {}},
      {"seal equal",
       [](PageTable& t) {
         return t.Seal(kA, kR2, {0, 1});
       },
       fill(kR2, {0, 1})},
      {"match", [tokens](PageTable& t) { return t.Match(kB, kR3, tokens()).status(); }, {}},
      {"alloc behind the match", [](PageTable& t) { return t.Alloc(kB, kR3, 2, 1).status(); }, {}},
      {"offer", [](PageTable& t) { return t.Offer(kA, kR1); }, {}},
      {"take", [](PageTable& t) { return t.Take(kB, kR1, &holder).status(); }, {}},
      {"free the tail", [](PageTable& t) { return t.Free(kB, kR1, 1); }, {}},
      {"free all", [](PageTable& t) { return t.Free(kB, kR1, 0); }, {}},
      {"reattach",
       [](PageTable& t) {
         return t.Reattach(kB, {static_cast<int32_t>(kB), 1}, {});
       },
       {}},
      {"end A",
       [](PageTable& t) {
         t.EndLease(kA);
         return absl::OkStatus();
       },
       {}},
      {"take an orphan", [](PageTable& t) { return t.Take(kB, kR2, &holder).status(); }, {}},
      {"end B",
       [](PageTable& t) {
         t.EndLease(kB);
         return absl::OkStatus();
       },
       {}},
      {"sweep",
       [](PageTable& t) {
         t.Sweep();
         return absl::OkStatus();
       },
       [](World& world) { world.now += kGrace; }},
      {"lease C", lease(kC), {}},
      {"alloc with eviction", [](PageTable& t) { return t.Alloc(kC, kR4, 0, 6).status(); }, {}},
      {"seal over the evicted",
       [](PageTable& t) {
         return t.Seal(kC, kR4, {0, 1, 2});
       },
       fill(kR4, {0, 1, 2})},
  };
}

TEST(PageTableCrash, AfterEverySingleStoreNothingRepliedIsLostAndNothingLeaks) {
  constexpr int kPages = 7;
  World world(kPages), next(kPages);
  world.Start();
  int crashes = 0;
  for (const Step& step : Day()) {
    SCOPED_TRACE(step.name);
    if (step.before) step.before(world);
    const World::State before = world.Rows();
    std::vector<std::vector<uint8_t>> snapshots = {world.Snapshot()};
    world.after_store = [&] { snapshots.push_back(world.Snapshot()); };
    const absl::Status done = step.call(*world);
    world.after_store = nullptr;
    ASSERT_TRUE(done.ok()) << done;
    const World::State after = world.Rows();
    world.CheckInvariants();

    for (size_t i = 0; i < snapshots.size(); ++i) {
      SCOPED_TRACE("crash after store " + std::to_string(i));
      ++crashes;
      next.now = world.now;
      next.Restore(snapshots[i]);
      next.Start();
      next.CheckInvariants();
      // Each reference is as before the call or as after it, and no stream has a hole.
      const World::State adopted = next.Rows();
      for (const auto& [key, reference] : adopted) {
        EXPECT_TRUE(key.second == 0 || adopted.contains({key.first, key.second - 1})) << "page " << key.second - 1 << " of stream " << key.first;
      }
      for (const auto& [key, reference] : before) {
        const auto later = after.find(key);
        const auto now = adopted.find(key);
        if (later != after.end()) {
          ASSERT_TRUE(now != adopted.end()) << "row " << key.second << " of stream " << key.first << " is lost";
        }
        if (now != adopted.end()) {
          EXPECT_EQ(now->second.page, reference.page);
        }
      }
      for (const auto& [key, reference] : adopted) {
        const auto earlier = before.find(key);
        const auto later = after.find(key);
        ASSERT_TRUE(earlier != before.end() || later != after.end()) << "a row from nowhere";
        const auto one_of = [&](auto field) {
          return (earlier != before.end() && earlier->second.*field == reference.*field) ||
                 (later != after.end() && later->second.*field == reference.*field);
        };
        EXPECT_TRUE(one_of(&World::Reference::lease));
        EXPECT_TRUE(one_of(&World::Reference::state));
        EXPECT_TRUE(one_of(&World::Reference::sealed));
      }
      // The caller repeats the call, and then all is as if nothing had happened.
      ASSERT_TRUE(step.call(*next).ok());
      next.CheckInvariants();
      const World::State repeated = next.Rows();
      ASSERT_EQ(repeated.size(), after.size());
      for (const auto& [key, reference] : after) {
        ASSERT_TRUE(repeated.contains(key));
        EXPECT_EQ(repeated.at(key).lease, reference.lease);
        EXPECT_EQ(repeated.at(key).state, reference.state);
        EXPECT_EQ(repeated.at(key).sealed, reference.sealed);
      }
      next.CheckNothingLeaked();
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
  EXPECT_GT(crashes, 200);
}

// A second crash, in the middle of the mending of the first.
TEST(PageTableCrash, AdoptionItselfMayBeCutShort) {
  World world(4), next(4);
  world.Start();
  world.Lease(kA);
  std::vector<std::vector<uint8_t>> first = {world.Snapshot()};
  world.after_store = [&] { first.push_back(world.Snapshot()); };
  world.Publish(kA, kR1, Tokens(128));
  ASSERT_TRUE(world->Alloc(kA, kR1, 2, 1).ok());
  ASSERT_TRUE(world->Free(kA, kR1, 0).ok());
  world.after_store = nullptr;
  for (const auto& snapshot : first) {
    std::vector<std::vector<uint8_t>> second;
    next.Restore(snapshot);
    next.dead = {static_cast<int32_t>(kA)};
    next.after_store = [&] { second.push_back(next.Snapshot()); };
    next.Start();
    next.after_store = nullptr;
    for (const auto& cut : second) {
      next.Restore(cut);
      next.Start();
      next.CheckInvariants();
      next.CheckNothingLeaked();
      if (HasFailure()) return;
    }
  }
}

// A worker's stray write, or another program's: whatever stands there, adoption ends with a table that works.
TEST(PageTableCrash, AnyBytesAreAdoptedIntoAWorkingTable) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  World world(6);
  world.Start();
  world.Lease(kA);
  world.Lease(kB);
  world.Publish(kA, kR1, Tokens(128));
  ASSERT_TRUE(world->Match(kB, kR2, Tokens(129)).ok());
  const std::vector<uint8_t> good = world.Snapshot();
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint8_t> bytes = good;
    const int changes = 1 + static_cast<int>(random() % 40);
    for (int i = 0; i < changes; ++i) {
      const size_t at = sizeof(StoreTableHeader) + random() % (bytes.size() - sizeof(StoreTableHeader) - 4);
      const uint32_t value = random() % 2 == 0 ? static_cast<uint32_t>(random() % 4) : static_cast<uint32_t>(random());
      memcpy(bytes.data() + at / 4 * 4, &value, 4);
    }
    world.now = 1'000'000;
    world.Restore(bytes);
    world.Start();
    world.CheckInvariants();
    world.CheckNothingLeaked();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace hearth
