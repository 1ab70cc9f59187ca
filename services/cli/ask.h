// Asking the node over its public gRPC interface and streaming the answer to the terminal: what `run` and `chat` share.
// Room: services/cli. May touch: proto, common/rpc.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/node_config.h"
#include "common/base/status.h"
#include "hearth/v1/inference.grpc.pb.h"

namespace hearth {

struct AskOptions {
  std::optional<int32_t> max_tokens;  // where absent, the node's defaults hold
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<int64_t> seed;
  std::vector<std::string> stop;
  bool usage = false;  // a line about tokens and times behind the answer, on standard error
};
std::shared_ptr<AskOptions> AddAskOptions(CLI::App& command);

// Streams the answer to standard output and returns it whole. Ctrl-C cancels the request at the node and ends the answer (Cancelled).
absl::StatusOr<std::string> AskChat(const NodeConfig& config, const std::vector<v1::ChatMessage>& messages, const AskOptions& options);
absl::StatusOr<std::string> AskRaw(const NodeConfig& config, const std::string& prompt, const AskOptions& options);

}  // namespace hearth
