#include "common/disk/disk_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "common/base/align.h"
#include "common/base/check.h"
#include "common/base/time.h"

namespace hearth {
namespace {

constexpr int64_t kLookNs = 50'000'000;  // between two looks at what else may end a wait

}  // namespace

DiskReader::DiskReader(std::unique_ptr<ReadQueue> queue, std::string note)
    : queue_(std::move(queue)), note_(std::move(note)), under_way_(static_cast<size_t>(queue_->depth())) {
  for (uint64_t tag = under_way_.size(); tag > 0; --tag) free_tags_.push_back(tag - 1);
}

DiskReader::~DiskReader() {
  waiting_.clear();
  while (free_tags_.size() < under_way_.size()) Reap(kLookNs);
  for (const File& file : files_) {
    if (file.direct >= 0) close(file.direct);
    if (file.buffered >= 0) close(file.buffered);
  }
}

absl::StatusOr<std::unique_ptr<DiskReader>> DiskReader::Open(const std::vector<std::string>& paths, std::unique_ptr<ReadQueue> queue) {
  std::string note;
  if (queue == nullptr) queue = MakeReadQueue(&note);
  std::unique_ptr<DiskReader> reader(new DiskReader(std::move(queue), std::move(note)));
  for (const std::string& path : paths) {
    File& file = reader->files_.emplace_back(File{.path = path});
    if (path.empty()) continue;
    file.buffered = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (file.buffered < 0) {
      const std::string message = absl::StrCat("opening ", path, ": ", strerror(errno));
      if (errno == ENOENT) return absl::NotFoundError(message);
      if (errno == EMFILE || errno == ENFILE) return absl::ResourceExhaustedError(absl::StrCat(message, ": raise `ulimit -n`"));
      return absl::PermissionDeniedError(message);
    }
    file.direct = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_DIRECT);
    file.use_direct = file.direct >= 0;
    if (!file.use_direct) reader->refused_direct_ = true;
  }
  return reader;
}

uint64_t DiskReader::Begin(int64_t file, uint64_t offset, uint64_t bytes, uint8_t* to) {
  HEARTH_CHECK(file >= 0 && file < static_cast<int64_t>(files_.size()) && files_[static_cast<size_t>(file)].buffered >= 0);
  HEARTH_CHECK(offset % kDiskAlign == 0 && reinterpret_cast<uintptr_t>(to) % kDiskAlign == 0);
  const uint64_t number = next_++;
  Pending& read = reads_[number];
  read.bytes = bytes;
  for (uint64_t at = 0; at < bytes; at += kPieceBytes) {
    waiting_.push_back({.number = number, .file = file, .offset = offset + at, .needed = std::min(kPieceBytes, bytes - at), .to = to + at});
    ++read.pieces;
  }
  BeginWaiting();
  return number;
}

bool DiskReader::AwaitEnded(uint64_t number, int64_t timeout_ns) {
  const auto read = reads_.find(number);
  HEARTH_CHECK(read != reads_.end());
  const int64_t end_ns = MonotonicNowNs() + timeout_ns;
  Reap(0);
  while (read->second.pieces > 0) {
    const int64_t left_ns = end_ns - MonotonicNowNs();
    if (left_ns <= 0) return false;
    Reap(std::min(left_ns, kLookNs));
  }
  return true;
}

absl::Status DiskReader::Outcome(uint64_t number) {
  const auto read = reads_.find(number);
  HEARTH_CHECK(read != reads_.end() && read->second.pieces == 0);
  const absl::Status status = read->second.status;
  reads_.erase(read);
  return status;
}

absl::Status DiskReader::Read(int64_t file, uint64_t offset, uint64_t bytes, uint8_t* to, const std::function<bool()>& stopped) {
  const uint64_t number = Begin(file, offset, bytes, to);
  while (!AwaitEnded(number, kLookNs)) {
    if (stopped()) return absl::CancelledError(absl::StrCat("reading ", files_[static_cast<size_t>(file)].path, " was cancelled"));
  }
  return Outcome(number);
}

void DiskReader::BeginWaiting() {
  while (!waiting_.empty() && !free_tags_.empty()) {
    Piece piece = waiting_.front();
    waiting_.pop_front();
    const File& file = files_[static_cast<size_t>(piece.file)];
    // The rest of a read that ended at an odd byte can't be read directly.
    piece.direct = file.use_direct && piece.offset % kDiskAlign == 0;
    if (free_tags_.size() == under_way_.size()) busy_since_ns_ = MonotonicNowNs();
    const uint64_t tag = free_tags_.back();
    free_tags_.pop_back();
    under_way_[tag] = piece;
    under_way_bytes_ += static_cast<int64_t>(piece.needed);
    queue_->Begin({.fd = piece.direct ? file.direct : file.buffered,
                   .offset = piece.offset,
                   .bytes = piece.direct ? AlignUp(piece.needed, kDiskAlign) : piece.needed,
                   .to = piece.to,
                   .tag = tag});
  }
}

void DiskReader::Reap(int64_t timeout_ns) {
  ended_.clear();
  queue_->AwaitEnded(timeout_ns, ended_);
  for (const EndedRead& ended : ended_) {
    const Piece piece = under_way_[ended.tag];
    free_tags_.push_back(ended.tag);
    under_way_bytes_ -= static_cast<int64_t>(piece.needed);
    End(piece, ended.result);
  }
  if (!ended_.empty() && free_tags_.size() == under_way_.size()) busy_ns_ += MonotonicNowNs() - busy_since_ns_;
  BeginWaiting();
}

void DiskReader::End(const Piece& piece, int64_t result) {
  File& file = files_[static_cast<size_t>(piece.file)];
  Pending& read = reads_.at(piece.number);
  if (result == -EINTR || result == -EAGAIN) {
    waiting_.push_front(piece);
    return;
  }
  if (piece.direct && (result == -EINVAL || result == -EOPNOTSUPP)) {
    file.use_direct = false;
    refused_direct_ = true;
    waiting_.push_front(piece);
    return;
  }
  if (result > 0 && static_cast<uint64_t>(result) < piece.needed) {
    Piece rest = piece;
    rest.offset += static_cast<uint64_t>(result);
    rest.to += result;
    rest.needed -= static_cast<uint64_t>(result);
    waiting_.push_front(rest);
    return;
  }
  if (result <= 0) read.status.Update(Error(piece, static_cast<int>(-result)));
  if (--read.pieces > 0) return;
  if (read.status.ok()) {
    ++records_;
    bytes_ += read.bytes;
  } else {
    ++errors_;
  }
}

absl::Status DiskReader::Error(const Piece& piece, int error) const {
  const std::string& path = files_[static_cast<size_t>(piece.file)].path;
  if (error == 0) {
    return absl::DataLossError(absl::StrCat(path, ": ends before byte ", piece.offset + piece.needed,
                                            ": it has been truncated; restart the weight store, which then loads the model anew"));
  }
  return absl::DataLossError(absl::StrCat("reading ", path, " at byte ", piece.offset, ": ", strerror(error),
                                          ": look at the disk's health (dmesg); `hearth verify` says what is damaged, and another ",
                                          "weightstore.disk_dir puts the experts elsewhere"));
}

DiskReader::View DiskReader::Look() const {
  return {.kind = std::string(queue_->kind()),
          .note = refused_direct_ ? note_ + (note_.empty() ? "" : "; ") + "through the page cache: the file system refuses direct reads" : note_,
          .records = records_.load(),
          .bytes = bytes_.load(),
          .busy_seconds = static_cast<double>(busy_ns_.load()) * 1e-9,
          .under_way_bytes = under_way_bytes_.load(),
          .errors = errors_.load()};
}

}  // namespace hearth
