// Writes random checkpoints of any given config, streamed: models of 10-20 GB for measurements, tiny ones for tests.
//
// Room: common/formats. Deterministic in (config, seed).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "common/base/status.h"

namespace hearth {

struct SynthOptions {
  std::string out_dir;                   // made if absent; must be empty
  uint64_t shard_bytes = 4'000'000'000;  // a new safetensors file past this
  uint64_t seed = 1;
  std::string tokenizer_dir;  // tokenizer.json, tokenizer_config.json and chat_template.jinja (if any) are copied from
                              // here; empty: a byte-level one of ids 3 + byte is written
  std::function<void(uint64_t done, uint64_t total)> progress;  // bytes; may be null
};

// `config_json`: a config.json of a supported architecture; what its quantization_config names is written as published checkpoints have it: linear
// weights in FP8 E4M3 with 128x128 scales, or routed experts in packed INT4 (safetensors.h); all else in BF16. Values keep activations near unit size through any depth, so that answers are finite
// and varied. With num_nextn_predict_layers one MTP module is written, its embedding and head the main model's, as in DeepSeek's own checkpoints.
// config.json is written last, so that an interrupted run leaves no directory that passes for a model. Memory stays at
// a few pools of some megabytes for any size. Errors: InvalidArgument (config, vocabulary too small for the byte-level
// tokenizer), FailedPrecondition (out_dir not empty), ResourceExhausted (disk too small, said before writing), NotFound
// (tokenizer_dir).
absl::Status WriteSynthCheckpoint(const std::string& config_json, const SynthOptions& options);

}  // namespace hearth
