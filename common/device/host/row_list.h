// The rows of a batch's sequences as one list, for ops whose tasks are rows.
// Room: common/device/host. Threads: one at a time, as the stream.
#pragma once

#include <cstdint>
#include <utility>

#include "common/device/host/host_stream.h"
#include "common/device/ops.h"

namespace hearth {

struct RowAt {
  const KvSequence* sequence;
  int64_t row;
  int64_t position;
};

// In the stream's scratch memory, where `more_bytes` may be taken behind it.
inline std::pair<const RowAt*, int64_t> ListRows(HostStream& stream, const KvSequence* sequences, int64_t num_sequences, size_t more_bytes = 0) {
  int64_t count = 0;
  for (int64_t s = 0; s < num_sequences; ++s) count += sequences[s].num_rows;
  stream.scratch.Reserve(Scratch::Bytes<RowAt>(count) + more_bytes);
  RowAt* rows = stream.scratch.Take<RowAt>(count);
  int64_t next = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    for (int64_t i = 0; i < sequences[s].num_rows; ++i) {
      rows[next++] = {&sequences[s], sequences[s].first_row + i, sequences[s].start_position + i};
    }
  }
  return {rows, count};
}

}  // namespace hearth
