// Reading a checkpoint at the disk's pace. Contract: image_reader.h. Room: common/image.
#include "common/image/image_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "common/base/align.h"
#include "common/base/time.h"

namespace hearth {
namespace {

// Big enough that a disk's latency does not show: 8 MiB at 7 GB/s are 1.2 ms.
constexpr uint64_t kPieceBytes = kReadPieceBytes;
// A hole that is read over rather than left out: cheaper than another request.
constexpr uint64_t kGapMax = 256 << 10;

// Sources [first, last) of one file, read as one request; or one source longer than a piece, read as several.
struct ReadRun {
  size_t first = 0;
  size_t last = 0;
};

std::vector<ReadRun> MakeRuns(const ImagePlan& plan) {
  std::vector<ReadRun> runs;
  uint64_t begin = 0, end = 0;
  for (size_t i = 0; i < plan.sources.size(); ++i) {
    const CheckpointTensor& t = *plan.sources[i].tensor;
    const bool joins =
        !runs.empty() && plan.sources[i - 1].tensor->file == t.file && t.offset - end <= kGapMax && t.offset + t.bytes - begin <= kPieceBytes;
    if (joins) {
      runs.back().last = i + 1;
    } else {
      runs.push_back({i, i + 1});
      begin = t.offset;
    }
    end = t.offset + t.bytes;
  }
  return runs;
}

// A file open twice: direct, until the file system refuses, and through the page cache.
class CheckpointReader {
 public:
  explicit CheckpointReader(std::string path) : path_(std::move(path)) {}
  ~CheckpointReader() {
    if (direct_ >= 0) close(direct_);
    if (buffered_ >= 0) close(buffered_);
  }
  absl::Status Open() {
    buffered_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (buffered_ < 0) return Error("opening", errno);
    posix_fadvise(buffered_, 0, 0, POSIX_FADV_SEQUENTIAL);
    direct_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    use_direct_.store(direct_ >= 0);
    return absl::OkStatus();
  }
  // `buffer` is aligned, and holds `bytes` and an alignment unit at each end. Returns where the bytes begin in it.
  absl::StatusOr<const uint8_t*> Read(uint64_t offset, uint64_t bytes, uint8_t* buffer) {
    const uint64_t from = offset / kDirectAlign * kDirectAlign;
    const uint64_t needed = offset + bytes - from;
    const uint64_t wanted = AlignUp(needed, kDirectAlign);
    uint64_t got = 0;
    while (got < needed) {
      const bool direct = use_direct_.load(std::memory_order_relaxed) && got % kDirectAlign == 0;
      const ssize_t n = pread(direct ? direct_ : buffered_, buffer + got, wanted - got, static_cast<off_t>(from + got));
      if (n < 0) {
        if (errno == EINTR) continue;
        if (direct && (errno == EINVAL || errno == EOPNOTSUPP)) {
          use_direct_.store(false);
          continue;
        }
        return Error("reading", errno);
      }
      if (n == 0) {
        return absl::DataLossError(
            absl::StrCat(path_, ": ends at byte ", from + got, ", needed up to ", offset + bytes, ": has it been truncated since it was opened?"));
      }
      got += static_cast<uint64_t>(n);
    }
    return buffer + (offset - from);
  }

 private:
  absl::Status Error(const char* what, int error) const {
    const std::string message = absl::StrCat(what, " ", path_, ": ", strerror(error));
    if (error == ENOENT) return absl::NotFoundError(message);
    if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(message);
    if (error == EIO) return absl::DataLossError(absl::StrCat(message, ": look at the disk's health"));
    if (error == EMFILE || error == ENFILE) return absl::ResourceExhaustedError(absl::StrCat(message, ": raise `ulimit -n`"));
    return absl::InternalError(message);
  }

  const std::string path_;
  int direct_ = -1;
  int buffered_ = -1;
  std::atomic<bool> use_direct_{false};
};

struct FreeDeleter {
  void operator()(void* p) const { free(p); }
};

}  // namespace

int ReaderThreads(int wanted) {
  if (wanted > 0) return wanted;
  cpu_set_t set;
  const int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(cores, 8, 16);
}

absl::Status RunWithProgress(const ReadOptions& options, uint64_t total_bytes, const std::atomic<uint64_t>& done_bytes, std::atomic<bool>& stop,
                             const std::function<absl::Status(int thread)>& work) {
  std::mutex mutex;
  std::condition_variable wake;
  int running = options.num_threads;
  absl::Status first_error;
  std::vector<std::thread> threads;
  for (int i = 0; i < options.num_threads; ++i) {
    threads.emplace_back([&, i] {
      absl::Status status = work(i);
      const std::lock_guard<std::mutex> lock(mutex);
      if (!status.ok()) {
        if (first_error.ok()) first_error = std::move(status);
        stop.store(true);
      }
      if (--running == 0) wake.notify_one();
    });
  }

  // The rate is that of the last three seconds: a load slows down when it leaves the page cache, and the ETA must
  // follow.
  struct Sample {
    int64_t ns;
    uint64_t bytes;
  };
  std::deque<Sample> samples{{MonotonicNowNs(), 0}};
  const auto report = [&] {
    if (!options.progress) return;
    const Sample now{MonotonicNowNs(), done_bytes.load()};
    samples.push_back(now);
    while (samples.size() > 2 && now.ns - samples.front().ns > 3'000'000'000) samples.pop_front();
    LoadProgress p;
    p.done_bytes = now.bytes;
    p.total_bytes = total_bytes;
    const double seconds = static_cast<double>(now.ns - samples.front().ns) * 1e-9;
    if (seconds > 0) p.bytes_per_second = static_cast<double>(now.bytes - samples.front().bytes) / seconds;
    if (p.bytes_per_second > 0) p.eta_seconds = static_cast<double>(total_bytes - std::min(total_bytes, now.bytes)) / p.bytes_per_second;
    options.progress(p);
  };
  bool cancelled = false;
  {
    std::unique_lock<std::mutex> lock(mutex);
    for (int tick = 0; running > 0; ++tick) {
      wake.wait_for(lock, std::chrono::milliseconds(50), [&] { return running == 0; });
      lock.unlock();
      if (!cancelled && options.cancelled && options.cancelled()) {
        cancelled = true;
        stop.store(true);
      }
      if (tick % 4 == 3 && !cancelled) report();
      lock.lock();
    }
  }
  for (std::thread& thread : threads) thread.join();
  RETURN_IF_ERROR(first_error);
  if (!cancelled) report();
  // Short work may be over before anybody looked.
  if (cancelled || (options.cancelled && options.cancelled())) return absl::CancelledError("loading was cancelled");
  return absl::OkStatus();
}

absl::Status ReadSources(const ImagePlan& plan, SourceVisitor& visitor, const ReadOptions& options) {
  std::vector<std::unique_ptr<CheckpointReader>> files;
  for (const CheckpointFile& file : plan.checkpoint.files()) {
    files.push_back(std::make_unique<CheckpointReader>(file.path));
    RETURN_IF_ERROR(files.back()->Open());
  }
  const std::vector<ReadRun> runs = MakeRuns(plan);
  std::atomic<size_t> next_run{0};
  std::atomic<uint64_t> done_bytes{0};
  std::atomic<bool> stop{false};

  const auto read_run = [&](const ReadRun& run, uint8_t* buffer) -> absl::Status {
    const CheckpointTensor& first = *plan.sources[run.first].tensor;
    const CheckpointTensor& last = *plan.sources[run.last - 1].tensor;
    CheckpointReader& file = *files[static_cast<size_t>(first.file)];
    if (run.last - run.first > 1 || first.bytes <= kPieceBytes) {
      ASSIGN_OR_RETURN(const uint8_t* data, file.Read(first.offset, last.offset + last.bytes - first.offset, buffer));
      for (size_t i = run.first; i < run.last; ++i) {
        const CheckpointTensor& tensor = *plan.sources[i].tensor;
        RETURN_IF_ERROR(visitor.Piece(i, 0, data + (tensor.offset - first.offset), tensor.bytes));
        RETURN_IF_ERROR(visitor.Done(i));
        done_bytes.fetch_add(tensor.bytes, std::memory_order_relaxed);
      }
      return absl::OkStatus();
    }
    const uint64_t unit = kPieceUnit * static_cast<uint64_t>(BlockOf(first.dtype).bytes);
    const uint64_t step = kPieceBytes / unit * unit;
    for (uint64_t at = 0; at < first.bytes; at += step) {
      if (stop.load(std::memory_order_relaxed)) return absl::OkStatus();
      const uint64_t bytes = std::min(step, first.bytes - at);
      ASSIGN_OR_RETURN(const uint8_t* data, file.Read(first.offset + at, bytes, buffer));
      RETURN_IF_ERROR(visitor.Piece(run.first, at, data, bytes));
      done_bytes.fetch_add(bytes, std::memory_order_relaxed);
    }
    return visitor.Done(run.first);
  };

  return RunWithProgress(options, plan.read_bytes, done_bytes, stop, [&](int) -> absl::Status {
    const std::unique_ptr<uint8_t, FreeDeleter> buffer(static_cast<uint8_t*>(aligned_alloc(kDirectAlign, kReadBufferBytes)));
    if (buffer == nullptr) return absl::ResourceExhaustedError("no memory for a read buffer of 8 MiB");
    while (!stop.load(std::memory_order_relaxed)) {
      const size_t index = next_run.fetch_add(1);
      if (index >= runs.size()) break;
      RETURN_IF_ERROR(read_run(runs[index], buffer.get()));
    }
    return absl::OkStatus();
  });
}

}  // namespace hearth
