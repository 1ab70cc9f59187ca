// A worker process from flags to exit: what prefill and decode have in common. Their main() names the kind and makes the loop.
// Room: common/worker. May touch: all of common. Threads: the caller's is the process's main thread.
// Attach, map, bind, serve; on SIGTERM offer the streams to the next worker and exit 0; on a Switch finish the old streams, then exit 0.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "common/base/node_config.h"
#include "common/rpc/store_client.h"
#include "common/worker/stream_loop.h"

namespace hearth {

struct WorkerKindInfo {
  const char* kind;         // "prefill", "decode"
  const char* description;  // first lines of --help
  // The options that this kind takes from the node's configuration.
  std::function<StreamLoopOptions(const NodeConfig&)> options;
  std::function<absl::StatusOr<std::shared_ptr<StreamLoop>>(Device&, const Model&, const KvPool&, StoreClient&, const NodeConfig&, StreamLoopOptions,
                                                            int64_t index)>
      make_loop;
  std::function<int64_t(const NodeConfig&)> threads;
  std::function<int64_t(const NodeConfig&)> device_memory_bytes;  // 0: no limit
  // The smallest of such limits that would do for a model bound to a device without one. Null where that is not known beforehand.
  std::function<absl::StatusOr<uint64_t>(const Device&, const Model&, const NodeConfig&)> device_memory_min;
};

int RunWorkerProcess(int argc, char** argv, const WorkerKindInfo& kind);

}  // namespace hearth
