// Memory that an op needs only while it runs: grows to the largest use and stays, so the hot path allocates nothing once warm.
// Room: common/device/host. May touch: common/base. Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "common/base/check.h"

namespace hearth {

class Scratch {
 public:
  // Hands out pieces of one block, each on 64 bytes. Reserve first: what was handed out before is gone.
  void Reserve(size_t bytes) {
    if (bytes > capacity_) {
      capacity_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      block_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, capacity_)));
      HEARTH_CHECK(block_ != nullptr);
    }
    used_ = 0;
  }
  template <typename T>
  T* Take(int64_t count) {
    T* piece = reinterpret_cast<T*>(block_.get() + used_);
    used_ += Bytes<T>(count);
    HEARTH_CHECK(used_ <= capacity_);
    return piece;
  }
  // What Take of so many takes from the block.
  template <typename T>
  static size_t Bytes(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> block_;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

}  // namespace hearth
