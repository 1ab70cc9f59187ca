// Whole records of files, read directly (O_DIRECT: past the page cache, which a pass over hundreds of GB would only empty) and several at once.
// Room: common/disk. May touch: common/base. Threads: one at a time; Look from any.
// A record is read in pieces, so that one alone keeps a fast disk busy. Where a file system refuses direct reads (some network ones) they go through the page
// cache. A read that brings fewer bytes than asked for is gone on with; an error, or a file that ends early, is its record's outcome, with the file's name.
// If a disk is slow, waits end by time and the read goes on: its memory is the reader's until it has ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/disk/read_queue.h"

namespace hearth {

inline constexpr uint64_t kDiskAlign = 4096;  // of offsets and addresses of records; a read takes whole units

class DiskReader {
 public:
  static constexpr uint64_t kPieceBytes = 1 << 20;

  // Opens all of `paths`, whose indices are the files' numbers; an empty one is a number that nobody uses. `queue` null: MakeReadQueue.
  // Errors: NotFound, PermissionDenied, ResourceExhausted (descriptors), with the path.
  static absl::StatusOr<std::unique_ptr<DiskReader>> Open(const std::vector<std::string>& paths, std::unique_ptr<ReadQueue> queue = nullptr);
  ~DiskReader();  // waits for what is under way

  // Asks for bytes [offset, offset + bytes) of a file: `to` has room for whole units of kDiskAlign. Returns the read's number. Reads begin in the order in
  // which they are asked for.
  uint64_t Begin(int64_t file, uint64_t offset, uint64_t bytes, uint8_t* to);
  // Whether the read has ended, waited for up to `timeout_ns`. Begins what waits, whatever it is asked for.
  bool AwaitEnded(uint64_t number, int64_t timeout_ns);
  // Of a read that has ended, once.
  absl::Status Outcome(uint64_t number);
  // All of it. Cancelled once `stopped` says so, which is asked some twenty times a second: the read may go on, and `to` stays its own, until the reader is
  // destroyed.
  absl::Status Read(int64_t file, uint64_t offset, uint64_t bytes, uint8_t* to, const std::function<bool()>& stopped);

  struct View {
    std::string kind;  // "io_uring", "threads"
    std::string note;  // why it is not io_uring, or not direct
    uint64_t records = 0;
    uint64_t bytes = 0;
    double busy_seconds = 0;  // with something under way
    int64_t under_way_bytes = 0;
    uint64_t errors = 0;
  };
  View Look() const;

 private:
  struct File {
    std::string path;
    int direct = -1;
    bool use_direct = false;  // false: refused; the descriptor stays, since other pieces may be under way by it
    int buffered = -1;
  };
  struct Piece {
    uint64_t number = 0;  // of its read
    int64_t file = 0;
    uint64_t offset = 0;
    uint64_t needed = 0;
    uint8_t* to = nullptr;
    bool direct = false;  // as it was begun
  };
  struct Pending {
    int64_t pieces = 0;
    uint64_t bytes = 0;
    absl::Status status;
  };

  explicit DiskReader(std::unique_ptr<ReadQueue> queue, std::string note);
  void BeginWaiting();
  void Reap(int64_t timeout_ns);
  void End(const Piece& piece, int64_t result);
  absl::Status Error(const Piece& piece, int error) const;

  const std::unique_ptr<ReadQueue> queue_;
  const std::string note_;
  std::vector<File> files_;
  uint64_t next_ = 0;
  std::map<uint64_t, Pending> reads_;  // asked for, outcome not taken
  std::deque<Piece> waiting_;          // not begun
  std::vector<Piece> under_way_;       // by tag
  std::vector<uint64_t> free_tags_;
  std::vector<EndedRead> ended_;
  int64_t busy_since_ns_ = 0;
  // For Look.
  std::atomic<bool> refused_direct_{false};
  std::atomic<uint64_t> records_{0}, bytes_{0}, errors_{0};
  std::atomic<int64_t> busy_ns_{0}, under_way_bytes_{0};
};

}  // namespace hearth
