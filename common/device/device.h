// The device seam: memory, ordered work, and an engine's threads, waits and clock. One interface, several backends: host (here),
// sim (common/sim), cuda (to come), and a recorder in the tests. Engines use no bare thread, condition variable, sleep or clock.
// Room: common/device. May touch: common/{kernels,numa,shm,trace,base}. Threads: all of Device may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "common/base/dtype.h"
#include "common/base/status.h"
#include "common/trace/trace.h"

namespace hearth {

class Ops;

struct DeviceCaps {
  std::string kind;         // "host", "sim", "cuda"
  std::string numerics;     // "host/avx512bf16/exact/4": together with the shard count it names what equality of bits holds within (DESIGN section 7)
  std::string description;  // for people: "2 threads, avx512bf16 (supported: scalar avx2 avx512 avx512bf16)"
  uint64_t memory_budget_bytes = 0;
  int num_threads = 1;
  int64_t prefill_chunk_rows =
      512;                   // rows of a prompt that it likes to work on at once: many where a launch or another look at the KV before them is dear
  int activation_terms = 1;  // BF16 terms in which ops hand matrix inputs to each other and keep KV: [rows, terms, n] (ops.h)
  DType kv_dtype = DType::kBF16;  // or kF8E4M3: the KV pool that ops read and write
};

// What buffers hold of the device's memory, by its own account.
struct DeviceMemory {
  uint64_t budget_bytes = 0;  // UINT64_MAX: no limit but the machine's
  uint64_t used_bytes = 0;
  uint64_t peak_bytes = 0;
};

// Device memory, freed on destruction. Zero-filled. Move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(void* data, size_t bytes, std::function<void()> release) : data_(data), bytes_(bytes), release_(std::move(release)) {}
  Buffer(Buffer&& o) noexcept { *this = std::move(o); }
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(release_, o.release_);
    return *this;
  }
  ~Buffer() {
    if (release_) release_();
  }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  std::function<void()> release_;
};

// Ordered work: an op enqueued later starts after those before it. The host backend runs an op before the enqueueing call returns.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual std::string_view name() const = 0;
  // Returns once everything enqueued so far is done; an error is the device's (the stream is then dead).
  virtual absl::Status Synchronize() = 0;
  // The error that the stream has died of, as far as it is known without waiting.
  virtual absl::Status status() const = 0;
  // Where spans of this stream's work are recorded; none where an op has no time of its own on this machine's clock.
  virtual TraceTrack trace_track() const { return {}; }
};

class Event {
 public:
  virtual ~Event() = default;
  virtual void Record(Stream& stream) = 0;
  virtual void Wait(Stream& stream) = 0;  // later work of `stream` waits for the recorded point
  virtual bool Query() const = 0;         // has the recorded point passed? true before any Record
};

// Asks everything that waits or loops to end. Set once, by any thread.
class StopToken {
 public:
  void Stop() { stopped_.store(true, std::memory_order_release); }
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> stopped_{false};
};

// An event count: a waiter reads `Current`, checks its condition, and waits for a change. Notify never blocks and is never lost.
class HostSignal {
 public:
  virtual ~HostSignal() = default;
  virtual uint64_t Current() const = 0;
  virtual void Notify() = 0;
};

enum class WaitResult { kSignalled, kStopped, kPeerGone, kDeadline };

struct WaitLimits {
  int64_t deadline_ns = INT64_MAX;  // on the clock of Device::Now; INT64_MAX = none
  const StopToken* stop = nullptr;  // stopping also needs a Notify to be seen at once; it is looked at every 100 ms anyway
  std::function<bool()> peer_gone;  // looked at every 100 ms; may be empty
};

// A thread of an engine; joined on destruction.
class Actor {
 public:
  virtual ~Actor() = default;
};

// A device rounds a buffer up to a multiple of this at most.
inline constexpr uint64_t kBufferRounding = 256;

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceCaps& caps() const = 0;
  virtual Ops& ops() = 0;

  // ResourceExhausted (needed, budget left) past the memory budget.
  virtual absl::StatusOr<Buffer> Allocate(size_t bytes) = 0;
  virtual DeviceMemory memory() const = 0;
  virtual std::unique_ptr<Stream> MakeStream(std::string name) = 0;
  virtual std::unique_ptr<Event> MakeEvent() = 0;

  virtual std::unique_ptr<Actor> Spawn(std::string name, std::function<void()> body) = 0;
  virtual std::unique_ptr<HostSignal> MakeSignal() = 0;
  // Waits until signal.Current() != seen, or one of the limits holds (stop is looked at first).
  virtual WaitResult HostWait(HostSignal& signal, uint64_t seen, const WaitLimits& limits) = 0;
  virtual int64_t Now() const = 0;  // ns; one clock for all processes of a node
};

}  // namespace hearth
