// What rank 0 of a prefill group tells the others of a shared pass: the batch, as the bytes of a protobuf message (proto/hearth/v1/pass.proto).
// Room: services/prefill. May touch: common/{model,device,shm,base}. Threads: any; pure functions.
// The bytes come from another process, so a reader checks every count; what they mean is checked with the batch (SlpEngine).
#pragma once

#include <cstdint>
#include <vector>

#include "common/base/status.h"
#include "common/model/forward.h"

namespace hearth {

// A batch, and what it points to.
struct PassMessage {
  PassMessage() = default;
  PassMessage(PassMessage&&) = default;  // vectors keep their memory, so the batch's pointers stay
  ForwardBatch batch;
  std::vector<std::vector<int32_t>> pages;  // by sequence
  std::vector<std::vector<float>> hidden;   // by sequence; empty: none
};

// hidden_size: of the vectors in prior_hidden.
std::vector<uint8_t> EncodePass(const ForwardBatch& batch, int64_t hidden_size);
// DataLoss: not the bytes of a batch of a model with this hidden_size.
absl::StatusOr<PassMessage> DecodePass(const std::vector<uint8_t>& bytes, int64_t hidden_size);

}  // namespace hearth
