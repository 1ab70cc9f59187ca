// Tests of page adoption and publication: what a crashed writer leaves is believed exactly as far as it may be.
#include "common/worker/stream_pages.h"

#include <gtest/gtest.h>

#include <numeric>

namespace hearth {
namespace {

class StreamPagesTest : public ::testing::Test {
 protected:
  StreamPagesTest() : kv_(KvPool::InMemory({.layers = 2, .row_elements = 8, .num_pages = 8})) {}

  static StreamRequest Tokens(int64_t prompt, int64_t output) {
    StreamRequest request;
    request.prompt_size = prompt;
    request.tokens.resize(static_cast<size_t>(prompt + output));
    std::iota(request.tokens.begin(), request.tokens.end(), 100);
    return request;
  }
  static LiveStream Live(int64_t prompt, int64_t output) { return LiveStream(Tokens(prompt, output), nullptr, 1); }
  static std::vector<PageRef> Rows(std::vector<int32_t> pages, int sealed = 0) {
    std::vector<PageRef> rows;
    for (size_t i = 0; i < pages.size(); ++i) rows.push_back({static_cast<int32_t>(i), pages[i], static_cast<int>(i) < sealed});
    return rows;
  }

  std::shared_ptr<KvPool> kv_;
};

TEST_F(StreamPagesTest, PublishedPositionsAreAdoptedByTheNextWriter) {
  LiveStream first = Live(70, 5);
  ASSERT_EQ(AdoptPages(*kv_, Rows({4, 2}), first), 2);
  EXPECT_EQ(first.valid, 0);
  EXPECT_EQ(PublishPositions(*kv_, 69, first), std::vector<int32_t>{0});
  EXPECT_TRUE(PublishPositions(*kv_, 73, first).empty());
  EXPECT_EQ(kv_->header(4).prefill_tokens, 64u);
  EXPECT_EQ(kv_->header(2).prefill_tokens, 5u) << "positions 64..68 are below n - 1 = 69";
  EXPECT_EQ(kv_->header(2).tokens_valid, 9u);

  LiveStream next = Live(70, 5);
  ASSERT_EQ(AdoptPages(*kv_, Rows({4, 2}, 1), next), 2);
  EXPECT_EQ(next.valid, 73);
  EXPECT_EQ(next.sealed_pages, 1);
}

TEST_F(StreamPagesTest, FullPagesThatNobodyAskedToPublishAreNamedOnce) {
  LiveStream first = Live(200, 5);
  AdoptPages(*kv_, Rows({4, 2, 1, 0}), first);
  PublishPositions(*kv_, 199, first);
  LiveStream next = Live(200, 5);
  ASSERT_EQ(AdoptPages(*kv_, Rows({4, 2, 1, 0}, 1), next), 4);
  EXPECT_EQ(TakeUnsealed(next), (std::vector<int32_t>{1, 2})) << "page 0 is published, page 3 is not full";
  EXPECT_TRUE(TakeUnsealed(next).empty());
  EXPECT_EQ(next.sealed_pages, 3);
}

TEST_F(StreamPagesTest, KvBeyondTheRoutersLastTokenIsKeptForLater) {
  LiveStream first = Live(10, 20);
  AdoptPages(*kv_, Rows({0}), first);
  PublishPositions(*kv_, 30, first);
  LiveStream behind = Live(10, 12);  // the router had seen 12 output tokens only
  AdoptPages(*kv_, Rows({0}), behind);
  EXPECT_EQ(behind.valid, 30);
}

TEST_F(StreamPagesTest, ForeignIdsAndWrongFormsEndTheBelief) {
  LiveStream first = Live(10, 20);
  AdoptPages(*kv_, Rows({0}), first);
  PublishPositions(*kv_, 30, first);
  LiveStream other = Live(10, 20);
  other.request.tokens[15] = 7;
  AdoptPages(*kv_, Rows({0}), other);
  EXPECT_EQ(other.valid, 15);
  EXPECT_EQ(kv_->header(0).tokens_valid, 15u) << "the new writer goes on from there";

  PublishPositions(*kv_, 30, other);
  LiveStream longer_prompt = Live(20, 10);  // the same ids, but positions 9..18 would have to be in the prefill form
  AdoptPages(*kv_, Rows({0}), longer_prompt);
  EXPECT_EQ(longer_prompt.valid, 9);
}

TEST_F(StreamPagesTest, ASealedPageCountsWhateverItsForm) {
  LiveStream first = Live(10, 60);
  AdoptPages(*kv_, Rows({0, 1}), first);
  PublishPositions(*kv_, 65, first);
  LiveStream hit = Live(68, 1);
  EXPECT_EQ(AdoptPages(*kv_, Rows({0, 5}, 1), hit), 2);
  EXPECT_EQ(hit.valid, 64);
}

TEST_F(StreamPagesTest, GapsAndForeignPageNumbersAreRefused) {
  LiveStream stream = Live(200, 0);
  EXPECT_EQ(AdoptPages(*kv_, {{0, 1, false}, {2, 3, false}}, stream), 1);
  EXPECT_EQ(stream.pages.size(), 1u);
  EXPECT_EQ(AdoptPages(*kv_, {{0, 99, false}}, stream), 0);
  EXPECT_EQ(AdoptPages(*kv_, {{0, -1, false}}, stream), 0);
}

TEST_F(StreamPagesTest, ACrashBetweenTheTwoCountsIsReadAsTheSmaller) {
  LiveStream first = Live(40, 0);
  AdoptPages(*kv_, Rows({0}), first);
  PublishPositions(*kv_, 20, first);
  kv_->header(0).prefill_tokens.store(39);  // the crash came before tokens_valid
  LiveStream next = Live(40, 0);
  AdoptPages(*kv_, Rows({0}), next);
  EXPECT_EQ(next.valid, 20);
}

TEST_F(StreamPagesTest, RepeatedGrantsAddNothing) {
  LiveStream stream = Live(10, 0);
  AdoptPages(*kv_, Rows({0}), stream);
  AppendPages({{0, 0, false}, {1, 3, false}}, stream);
  AppendPages({{1, 3, false}, {3, 5, false}}, stream);
  EXPECT_EQ(stream.pages, (std::vector<int32_t>{0, 3}));
}

}  // namespace
}  // namespace hearth
