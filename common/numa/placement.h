// Asking the kernel to put memory on a node, and seeing where it went. Through libnuma.
// Room: common/numa. May touch: common/base. Threads: any; policies are the calling thread's own.
// A container may forbid all of it: then memory lies where the kernel puts it, the caller gets a note, and nothing
// fails.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/base/status.h"

namespace hearth {

// While it lives, pages that this thread allocates (a tmpfs fallocate included) come from `node` when it has room, else
// from any other.
class PreferNode {
 public:
  explicit PreferNode(int node);
  ~PreferNode();
  PreferNode(const PreferNode&) = delete;
  PreferNode& operator=(const PreferNode&) = delete;
  const std::string& note() const { return note_; }  // why it has no effect; empty when it has

 private:
  bool set_ = false;
  std::string note_;
};

// This thread runs on these CPUs from now on; none: wherever the kernel puts it. A refusal costs speed only.
void PinThisThread(const std::vector<int>& cpus);

// Pages of a mapping by node, from at most `samples` of them, evenly spread; each is read, so that it is there.
// Unimplemented or PermissionDenied where the kernel does not tell.
absl::StatusOr<std::map<int, uint64_t>> SamplePagesPerNode(const void* address, uint64_t bytes, uint64_t samples);

}  // namespace hearth
