#include "services/prefill/prefill_loop.h"

#include "common/worker/stream_pages.h"

namespace hearth {

int64_t PrefillLoop::InitialPages(const StreamRequest& request) const { return PagesFor(request.prefill_until()); }

bool PrefillLoop::Work() {
  for (const std::shared_ptr<LiveStream>& stream : std::vector(running_)) {
    if (!stream->prepared) continue;
    if (stream->valid >= stream->request.prefill_until()) {
      Offer(stream);
      return true;
    }
    if (static_cast<int64_t>(stream->pages.size()) < InitialPages(stream->request)) continue;  // waits for the store
    PrefillChunk(*stream, options_.idle_chunk_tokens);
    return true;
  }
  return false;
}

void PrefillLoop::OnOffered(LiveStream& stream) { stream.sink->OnPrefilled(stream.request.prefill_until()); }

}  // namespace hearth
