#include "common/worker/stream_pages.h"

#include <algorithm>

#include "common/base/check.h"
#include "common/base/publish_point.h"

namespace hearth {

int64_t AdoptPages(const KvPool& kv, const std::vector<PageRef>& rows, LiveStream& stream) {
  const StreamRequest& request = stream.request;
  const int64_t size = static_cast<int64_t>(request.tokens.size());
  stream.pages.clear();
  stream.valid = 0;
  stream.sealed_pages = 0;
  bool growing = true;  // false behind the first position that can't be believed: later pages can only be written anew
  for (const PageRef& row : rows) {
    const int64_t index = static_cast<int64_t>(stream.pages.size());
    if (row.index != index || row.page < 0 || static_cast<uint64_t>(row.page) >= kv.geometry().num_pages) return index;
    KvPageHeader& header = kv.header(row.page);
    const int64_t start = index * kPageTokens;
    const int64_t in_page = std::min<int64_t>(header.tokens_valid.load(std::memory_order_acquire), kPageTokens);
    const int64_t by_prefill = std::min<int64_t>(header.prefill_tokens.load(std::memory_order_acquire), in_page);
    int64_t fits = 0;
    while (growing && fits < in_page) {
      const int64_t position = start + fits;
      // KV behind the router's last token is believed later, when the token is drawn again and equals the id here.
      if (position < size && header.token_ids[fits] != request.tokens[position]) break;
      // A hit on a SEALED page counts as its page says; an OPEN page is this stream's own and must have the form that is due.
      if (!row.sealed && (fits < by_prefill) != (position < request.prefill_until())) break;
      ++fits;
    }
    if (row.sealed && fits < kPageTokens) return index;  // immutable and of no use
    stream.pages.push_back(row.page);
    if (growing) stream.valid = start + fits;
    if (row.sealed) stream.sealed_pages = index + 1;
    if (fits < kPageTokens) growing = false;
    if (!row.sealed) {
      header.progress.store(0, std::memory_order_relaxed);
      if (fits < in_page) header.tokens_valid.store(static_cast<uint32_t>(fits), std::memory_order_release);
    }
  }
  return static_cast<int64_t>(stream.pages.size());
}

std::vector<int32_t> TakeUnsealed(LiveStream& stream) {
  std::vector<int32_t> full;
  for (; (stream.sealed_pages + 1) * kPageTokens <= stream.valid; ++stream.sealed_pages) full.push_back(static_cast<int32_t>(stream.sealed_pages));
  return full;
}

void AppendPages(const std::vector<PageRef>& rows, LiveStream& stream) {
  for (const PageRef& row : rows) {
    if (row.index < static_cast<int64_t>(stream.pages.size())) continue;  // a repeated call names what we have
    if (row.index > static_cast<int64_t>(stream.pages.size())) break;
    stream.pages.push_back(row.page);
  }
}

std::vector<int32_t> PublishPositions(const KvPool& kv, int64_t until, LiveStream& stream) {
  HEARTH_CHECK(until <= static_cast<int64_t>(stream.request.tokens.size()));
  std::vector<int32_t> full;
  while (stream.valid < until) {
    const int64_t index = stream.valid / kPageTokens;
    const int64_t start = index * kPageTokens;
    const int64_t end = std::min(until, start + kPageTokens);
    KvPageHeader& header = kv.header(stream.pages[index]);
    PublishPoint("kv.rows");
    for (int64_t p = stream.valid; p < end; ++p) header.token_ids[p - start] = stream.request.tokens[p];
    PublishPoint("kv.token_ids");
    const int64_t by_prefill = std::clamp<int64_t>(stream.request.prefill_until() - start, 0, end - start);
    header.prefill_tokens.store(static_cast<uint32_t>(by_prefill), std::memory_order_relaxed);
    PublishPoint("kv.prefill_tokens");
    header.tokens_valid.store(static_cast<uint32_t>(end - start), std::memory_order_release);
    PublishPoint("kv.tokens_valid");
    stream.valid = end;
    if (end == start + kPageTokens) {
      full.push_back(static_cast<int32_t>(index));
      stream.sealed_pages = index + 1;
    }
  }
  return full;
}

void PublishProgress(const KvPool& kv, const LiveStream& stream, int64_t pending_until, int64_t layers_ready) {
  for (int64_t index = stream.valid / kPageTokens; index * kPageTokens < pending_until; ++index) {
    const int64_t pending = std::min(pending_until - index * kPageTokens, kPageTokens);
    kv.header(stream.pages[index])
        .progress.store(static_cast<uint64_t>(pending) << 32 | static_cast<uint64_t>(layers_ready), std::memory_order_release);
    PublishPoint("kv.progress");
  }
}

}  // namespace hearth
