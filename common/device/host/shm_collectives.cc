#include "common/device/host/shm_collectives.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <climits>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/process.h"
#include "common/base/publish_point.h"
#include "common/base/time.h"
#include "common/device/host/host_stream.h"
#include "common/trace/trace.h"

namespace hearth {
namespace {

constexpr uint64_t kPieceBytes = 256 * 1024;
constexpr uint64_t kPieces = 2;          // one is filled while the other is read
constexpr int64_t kLookNs = 50'000'000;  // what no bell tells (a stop, a death) is looked at this often

struct alignas(64) RankWords {
  std::atomic<uint64_t> start_ticks;
  std::atomic<int32_t> pid;       // 0: not joined; stored last
  std::atomic<uint64_t> started;  // the pass last begun, from 1
  std::atomic<uint64_t> left;     // the pass last ended with an error << 8 | its code
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> calls;  // passes that others have begun; apart from the bell, which rings all the time in a pass
};

struct alignas(64) Mailbox {
  std::atomic<uint64_t> sent;  // pass << 32 | pieces
  std::array<std::atomic<uint64_t>, kPieces> piece_bytes;
  alignas(64) std::atomic<uint64_t> taken;
  alignas(64) uint8_t pieces[kPieces][kPieceBytes];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

// Pieces of `pass`; a word of an older one says none.
uint64_t PiecesOf(uint64_t word, uint64_t pass) { return word >> 32 == pass ? word & 0xffffffff : 0; }

class ShmCollectives : public Collectives {
 public:
  explicit ShmCollectives(const ShmCollectivesOptions& options)
      : rank_(options.rank),
        size_(options.size),
        patience_ns_(options.patience_ns),
        words_(static_cast<RankWords*>(options.memory)),
        mailboxes_(reinterpret_cast<Mailbox*>(words_ + size_)),
        watches_(static_cast<size_t>(size_)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::vector<Traffic>& traffic() const override { return traffic_; }

  absl::Status Join() {
    // Not SelfProcess, which a forked process has from its parent.
    ASSIGN_OR_RETURN(const ProcessId self, ProcessOf(getpid()));
    if (words_[rank_].pid.load(std::memory_order_acquire) != 0) {
      return absl::AlreadyExistsError(absl::StrCat("rank ", rank_, " of the group is taken; a group is made anew for each set of ranks"));
    }
    words_[rank_].start_ticks.store(self.start_ticks, std::memory_order_relaxed);
    words_[rank_].pid.store(self.pid, std::memory_order_release);
    return absl::OkStatus();
  }

  absl::Status Begin(const StopToken& stop, const std::function<bool()>& wanted) override {
    StartPass();
    stop_ = &stop;
    wanted_ = wanted;
    traffic_.clear();
    sent_.fill(0);
    taken_.fill(0);
    const int64_t deadline_ns = MonotonicNowNs() + patience_ns_;
    while (true) {
      const uint32_t seen = words_[rank_].bell.load(std::memory_order_acquire);
      uint32_t missing = 0;
      for (int peer = 0; peer < size_; ++peer) {
        if (words_[peer].started.load(std::memory_order_acquire) < pass_) missing |= 1u << peer;
      }
      if (missing == 0) return absl::OkStatus();
      RETURN_IF_ERROR(Wait(seen, missing, "the beginning of the pass", deadline_ns));
    }
  }

  void End(const absl::Status& status) override {
    if (!status.ok()) {
      if (!in_pass_) StartPass();
      words_[rank_].left.store(pass_ << 8 | static_cast<uint64_t>(status.code()), std::memory_order_release);
      RingAll();
    }
    in_pass_ = false;
  }

  absl::Status Check() override {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      RETURN_IF_ERROR(CheckPeer(peer, "work of its own"));
      // Who ended the pass well had all that this rank was to send, and now it is in the middle of its work.
      if (words_[peer].started.load(std::memory_order_acquire) > pass_) {
        return absl::AbortedError(absl::StrCat("rank ", peer, " of the group left the pass for a later one"));
      }
    }
    return absl::OkStatus();
  }

  bool Called() const override {
    const uint64_t own = words_[rank_].started.load(std::memory_order_acquire);
    return std::any_of(words_, words_ + size_, [&](const RankWords& words) { return words.started.load(std::memory_order_acquire) > own; });
  }

  uint32_t AwaitCall(uint32_t seen, int64_t timeout_ns) const override {
    std::atomic<uint32_t>& calls = words_[rank_].calls;
    const timespec time{.tv_sec = timeout_ns / 1'000'000'000, .tv_nsec = timeout_ns % 1'000'000'000};
    if (calls.load(std::memory_order_acquire) == seen) syscall(SYS_futex, &calls, FUTEX_WAIT, seen, &time, nullptr, 0);
    return calls.load(std::memory_order_acquire);
  }

  void AllGather(Stream& stream, const AllGatherArgs& a) override {
    Transfers transfers;
    uint64_t own_begin = 0;
    for (int r = 0; r < rank_; ++r) own_begin += a.bytes[r];
    uint8_t* at = static_cast<uint8_t*>(a.data);
    uint8_t* own = at + own_begin;
    for (int peer = 0; peer < size_; at += a.bytes[peer], ++peer) {
      if (peer == rank_) continue;
      transfers.out[static_cast<size_t>(peer)] = {.data = own, .bytes = a.bytes[rank_]};
      transfers.in[static_cast<size_t>(peer)] = {.data = at, .bytes = a.bytes[peer]};
    }
    Run(stream, a.name, transfers, a.bytes[rank_] * static_cast<uint64_t>(size_ - 1));
  }

  void AllToAll(Stream& stream, const AllToAllArgs& a) override {
    Transfers transfers;
    uint64_t crossing = 0;
    const uint8_t* from = static_cast<const uint8_t*>(a.from);
    uint8_t* to = static_cast<uint8_t*>(a.to);
    for (int peer = 0; peer < size_; from += a.send_bytes[peer], to += a.receive_bytes[peer], ++peer) {
      if (peer == rank_) {
        if (a.receive_bytes[peer] > 0 && stream.status().ok()) std::memcpy(to, from, a.receive_bytes[peer]);
        continue;
      }
      transfers.out[static_cast<size_t>(peer)] = {.data = const_cast<uint8_t*>(from), .bytes = a.send_bytes[peer]};
      transfers.in[static_cast<size_t>(peer)] = {.data = to, .bytes = a.receive_bytes[peer]};
      crossing += a.send_bytes[peer];
    }
    Run(stream, a.name, transfers, crossing);
  }

  void Barrier(Stream& stream, const BarrierArgs& a) override {
    uint8_t here[2] = {};
    Transfers transfers;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      transfers.out[static_cast<size_t>(peer)] = {.data = &here[0], .bytes = 1};
      transfers.in[static_cast<size_t>(peer)] = {.data = &here[1], .bytes = 1};
    }
    Run(stream, a.name, transfers, a.shared_bytes);
  }

 private:
  struct Transfer {
    uint8_t* data = nullptr;
    uint64_t bytes = 0;
    uint64_t done = 0;
    uint64_t next() const { return std::min(kPieceBytes, bytes - done); }
  };
  struct Transfers {  // by peer
    std::array<Transfer, kRanksMax> out, in;
  };

  void StartPass() {
    ++pass_;
    in_pass_ = true;
    words_[rank_].started.store(pass_, std::memory_order_release);
    PublishPoint("exchange.started");
    RingAll();
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      words_[peer].calls.fetch_add(1, std::memory_order_release);
      syscall(SYS_futex, &words_[peer].calls, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  void Run(Stream& stream, const char* name, Transfers& transfers, uint64_t crossing) {
    HostStream& host = static_cast<HostStream&>(stream);
    if (!host.alive()) return;
    const TraceSpan span(host.trace_track(), "exchange", "bytes", static_cast<int64_t>(crossing));
    Count(traffic_, name, crossing);
    if (const absl::Status status = Move(transfers, name); !status.ok()) host.Fail(status);
  }

  // Sends and receives as pieces and places come, so that no order among the ranks can block them.
  absl::Status Move(Transfers& transfers, const char* name) {
    int64_t deadline_ns = MonotonicNowNs() + patience_ns_;
    while (true) {
      const uint32_t seen = words_[rank_].bell.load(std::memory_order_acquire);
      bool moved = false;
      uint32_t missing = 0;
      for (int peer = 0; peer < size_; ++peer) {
        Transfer& out = transfers.out[static_cast<size_t>(peer)];
        Transfer& in = transfers.in[static_cast<size_t>(peer)];
        while (out.done < out.bytes && SendPiece(peer, out)) moved = true;
        while (in.done < in.bytes) {
          ASSIGN_OR_RETURN(const bool taken, TakePiece(peer, in, name));
          if (!taken) break;
          moved = true;
        }
        if (out.done < out.bytes || in.done < in.bytes) missing |= 1u << peer;
      }
      if (missing == 0) return absl::OkStatus();
      if (moved) {
        deadline_ns = MonotonicNowNs() + patience_ns_;
      } else {
        RETURN_IF_ERROR(Wait(seen, missing, name, deadline_ns));
      }
    }
  }

  bool SendPiece(int peer, Transfer& out) {
    Mailbox& box = At(rank_, peer);
    uint64_t& sent = sent_[static_cast<size_t>(peer)];
    if (sent - PiecesOf(box.taken.load(std::memory_order_acquire), pass_) >= kPieces) return false;
    const uint64_t bytes = out.next();
    std::memcpy(box.pieces[sent % kPieces], out.data + out.done, bytes);
    box.piece_bytes[sent % kPieces].store(bytes, std::memory_order_relaxed);
    ++sent;
    box.sent.store(pass_ << 32 | sent, std::memory_order_release);
    PublishPoint("exchange.sent");
    out.done += bytes;
    Ring(peer);
    return true;
  }

  absl::StatusOr<bool> TakePiece(int peer, Transfer& in, const char* name) {
    Mailbox& box = At(peer, rank_);
    uint64_t& taken = taken_[static_cast<size_t>(peer)];
    if (PiecesOf(box.sent.load(std::memory_order_acquire), pass_) == taken) return false;
    const uint64_t bytes = box.piece_bytes[taken % kPieces].load(std::memory_order_relaxed);
    if (bytes != in.next()) {
      return absl::InternalError(absl::StrCat("'", name, "': rank ", peer, " sent a piece of ", bytes, " bytes where rank ", rank_, " expects ",
                                              in.next(), ": the ranks were given different batches or options"));
    }
    std::memcpy(in.data + in.done, box.pieces[taken % kPieces], bytes);
    ++taken;
    box.taken.store(pass_ << 32 | taken, std::memory_order_release);
    PublishPoint("exchange.taken");
    in.done += bytes;
    Ring(peer);
    return true;
  }

  // Until the bell rings or it is time to look again. `missing`: the peers that must still come, a bit each. An error ends the pass.
  absl::Status Wait(uint32_t seen, uint32_t missing, const char* what, int64_t deadline_ns) {
    if (stop_->stopped() || (wanted_ && !wanted_())) return absl::CancelledError(absl::StrCat("rank ", rank_, " was stopped in '", what, "'"));
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) RETURN_IF_ERROR(CheckPeer(peer, what));
    }
    for (int peer = 0; peer < size_; ++peer) {
      if ((missing >> peer & 1) != 0) RETURN_IF_ERROR(CheckNotAhead(peer, seen, what));
    }
    if (MonotonicNowNs() >= deadline_ns) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", std::countr_zero(missing), " lives but did not come to '", what, "' in ", patience_ns_ / 1'000'000'000, " s"));
    }
    const timespec time{.tv_sec = 0, .tv_nsec = kLookNs};
    syscall(SYS_futex, &words_[rank_].bell, FUTEX_WAIT, seen, &time, nullptr, 0);
    return absl::OkStatus();
  }

  absl::Status CheckPeer(int peer, const char* what) {
    const RankWords& words = words_[peer];
    const int32_t pid = words.pid.load(std::memory_order_acquire);
    std::optional<ProcessWatch>& watch = watches_[static_cast<size_t>(peer)];
    if (pid != 0 && !watch.has_value()) watch.emplace(ProcessId{.pid = pid, .start_ticks = words.start_ticks.load(std::memory_order_relaxed)});
    if (watch.has_value() && watch->Exited()) {
      return absl::UnavailableError(absl::StrCat("rank ", peer, " of the group is gone (process ", pid, "), seen in '", what, "'"));
    }
    const uint64_t left = words.left.load(std::memory_order_acquire);
    if (left >> 8 != pass_) return absl::OkStatus();
    const auto code = static_cast<absl::StatusCode>(left & 0xff);
    const std::string text = absl::StrCat("rank ", peer, " of the group left the pass (", absl::StatusCodeToString(code), "), seen in '", what, "'");
    return code == absl::StatusCode::kCancelled ? absl::CancelledError(text) : absl::AbortedError(text);
  }

  // A peer in a later pass has ended this one. If it did so well, all that it had to say is in the mailbox, and the bell has rung since `seen`; if not, it
  // left, and its word is of the later pass already.
  absl::Status CheckNotAhead(int peer, uint32_t seen, const char* what) {
    if (words_[peer].started.load(std::memory_order_acquire) <= pass_) return absl::OkStatus();
    if (words_[rank_].bell.load(std::memory_order_acquire) != seen) return absl::OkStatus();
    return absl::AbortedError(absl::StrCat("rank ", peer, " of the group left the pass for a later one, seen in '", what, "'"));
  }

  void Ring(int peer) {
    words_[peer].bell.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &words_[peer].bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  void RingAll() {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) Ring(peer);
    }
  }

  Mailbox& At(int from, int to) { return mailboxes_[from * size_ + to]; }

  const int rank_, size_;
  const int64_t patience_ns_;
  RankWords* const words_;    // [size]
  Mailbox* const mailboxes_;  // [from, to]
  std::vector<std::optional<ProcessWatch>> watches_;
  std::vector<Traffic> traffic_;
  const StopToken* stop_ = nullptr;
  std::function<bool()> wanted_;
  uint64_t pass_ = 0;
  bool in_pass_ = false;
  std::array<uint64_t, kRanksMax> sent_{}, taken_{};  // pieces of the pass, by peer
};

}  // namespace

uint64_t ShmCollectivesBytes(int size) {
  const uint64_t n = static_cast<uint64_t>(size);
  return n * sizeof(RankWords) + n * n * sizeof(Mailbox);
}

absl::StatusOr<std::unique_ptr<Collectives>> JoinShmCollectives(const ShmCollectivesOptions& options) {
  if (options.size < 1 || options.size > kRanksMax || options.rank < 0 || options.rank >= options.size || options.memory == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " of a group of ", options.size, ": groups have 1 to ", kRanksMax, " ranks, from 0"));
  }
  auto group = std::make_unique<ShmCollectives>(options);
  RETURN_IF_ERROR(group->Join());
  return group;
}

}  // namespace hearth
