// What a stream's pages hold and how positions are published in them; the order of stores is docs/shared-memory.md, "KV page".
// Room: common/worker. May touch: common/{shm,base}. Threads: the pages' one writer.
#pragma once

#include <cstdint>
#include <vector>

#include "common/rpc/page_store.h"
#include "common/shm/kv_pool.h"
#include "common/worker/stream.h"

namespace hearth {

// Pages needed for positions [0, positions).
inline int64_t PagesFor(int64_t positions) { return (positions + kPageTokens - 1) / kPageTokens; }

// Takes the rows that the store has for a stream and finds how far its KV may be believed: pages are consecutive from index 0, their
// token ids are the stream's own, and each position has the form that it must have. Sets pages, valid and sealed_pages.
// Returns the first page index to be freed at the store because it does not fit (one past the end: none).
int64_t AdoptPages(const KvPool& kv, const std::vector<PageRef>& rows, LiveStream& stream);

// The pages of [0, valid) that are full and not yet published, ascending: the last writer ended before it had asked for it. They count as
// asked for from here on.
std::vector<int32_t> TakeUnsealed(LiveStream& stream);

// Adds newly granted pages; they must follow on those the stream has.
void AppendPages(const std::vector<PageRef>& rows, LiveStream& stream);

// Positions [stream.valid, until) are complete in every layer: writes their ids and publishes them. Returns the indexes of pages that became full.
std::vector<int32_t> PublishPositions(const KvPool& kv, int64_t until, LiveStream& stream);

// A hint for who follows layer by layer.
void PublishProgress(const KvPool& kv, const LiveStream& stream, int64_t pending_until, int64_t layers_ready);

}  // namespace hearth
