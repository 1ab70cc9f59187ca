// The handler may only use what is async-signal-safe: plain memory, atomics, and mmap, which glibc makes a bare system call.
#include "common/shm/mapped_file_guard.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "common/base/check.h"

namespace hearth {
namespace {

// What one fault replaces: an expert's record is lost with any page of it, and a fault a page would make a slow disk's error a long one.
constexpr uint64_t kBlockBytes = 1 << 20;

// Held for a system call's time, by who never reads a guarded mapping meanwhile: the handler can't meet a lock of its own thread.
class SpinLock {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_;
};

}  // namespace

struct MappedFileGuard::Range {
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
  int fd = -1;
  SpinLock lock;
  uint64_t lost = 0;           // blocks that were replaced, ever
  uint64_t num_zeros = 0;      // that are replaced now
  std::vector<uint8_t> zeros;  // by block: whether it is replaced now; its size never changes
  bool Holds(const uint8_t* at) const { return at >= data && at < data + bytes; }
  uint64_t BlockBytes(uint64_t block) const { return std::min(kBlockBytes, bytes - block * kBlockBytes); }
};

namespace {

// A signal handler has no context but the process: these are all that it can find its ranges by. An entry is read with `readers` held up, so that a guard
// that goes waits for handlers that may be looking at its range.
struct Entry {
  std::atomic<void*> range{nullptr};
  std::atomic<int> readers{0};
};
std::array<Entry, MappedFileGuard::kMost> g_entries;
struct sigaction g_previous;

}  // namespace

void MappedFileGuard::OnBusError(int signal, void* info, void*) {
  const int error = errno;
  const uint8_t* at = static_cast<const uint8_t*>(static_cast<siginfo_t*>(info)->si_addr);
  for (Entry& entry : g_entries) {
    entry.readers.fetch_add(1);
    bool served = false;
    if (auto* range = static_cast<Range*>(entry.range.load()); range != nullptr && range->Holds(at)) {
      const uint64_t block = static_cast<uint64_t>(at - range->data) / kBlockBytes;
      const std::lock_guard lock(range->lock);
      // Zeros of another thread's fault are there already, or this one puts them there.
      served = range->zeros[block] != 0 || mmap(range->data + block * kBlockBytes, range->BlockBytes(block), PROT_READ,
                                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
      if (served && range->zeros[block] == 0) {
        range->zeros[block] = 1;
        ++range->num_zeros;
        ++range->lost;
      }
    }
    entry.readers.fetch_sub(1);
    if (served) {
      errno = error;
      return;
    }
  }
  // Not ours: the instruction is tried again, under the handler that there was.
  sigaction(signal, &g_previous, nullptr);
  errno = error;
}

MappedFileGuard::MappedFileGuard(std::unique_ptr<Range> range, std::string path) : range_(std::move(range)), path_(std::move(path)) {}

absl::StatusOr<std::unique_ptr<MappedFileGuard>> MappedFileGuard::Make(const std::string& path, const uint8_t* data, uint64_t bytes) {
  HEARTH_CHECK(bytes > 0 && reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)) == 0);
  auto range = std::make_unique<Range>();
  range->data = const_cast<uint8_t*>(data);
  range->bytes = bytes;
  range->zeros.resize((bytes + kBlockBytes - 1) / kBlockBytes);
  range->fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (range->fd < 0) {
    const std::string message = absl::StrCat("opening ", path, ": ", strerror(errno));
    if (errno == ENOENT) return absl::NotFoundError(message);
    if (errno == EMFILE || errno == ENFILE) return absl::ResourceExhaustedError(absl::StrCat(message, ": raise `ulimit -n`"));
    return absl::PermissionDeniedError(message);
  }
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    action.sa_sigaction = [](int signal, siginfo_t* info, void* context) { OnBusError(signal, info, context); };
    HEARTH_CHECK(sigaction(SIGBUS, &action, &g_previous) == 0);
  });
  std::unique_ptr<MappedFileGuard> guard(new MappedFileGuard(std::move(range), path));
  for (Entry& entry : g_entries) {
    void* free = nullptr;
    if (entry.range.compare_exchange_strong(free, guard->range_.get())) return guard;
  }
  return absl::ResourceExhaustedError(absl::StrCat("no more than ", kMost, " mapped files can be guarded: ", path));
}

MappedFileGuard::~MappedFileGuard() {
  for (Entry& entry : g_entries) {
    void* own = range_.get();
    if (!entry.range.compare_exchange_strong(own, nullptr)) continue;
    while (entry.readers.load() != 0) {
    }
  }
  close(range_->fd);
}

uint64_t MappedFileGuard::Begin() {
  const std::lock_guard lock(range_->lock);
  for (uint64_t block = 0; range_->num_zeros > 0 && block < range_->zeros.size(); ++block) {
    if (range_->zeros[block] == 0) continue;
    // Where it can't be mapped, the zeros stay, and everything fails until it can.
    void* mapped = mmap(range_->data + block * kBlockBytes, range_->BlockBytes(block), PROT_READ, MAP_SHARED | MAP_FIXED, range_->fd,
                        static_cast<off_t>(block * kBlockBytes));
    if (mapped == MAP_FAILED) break;
    range_->zeros[block] = 0;
    --range_->num_zeros;
  }
  return range_->lost;
}

absl::Status MappedFileGuard::LostSince(uint64_t mark) const {
  // Looked at even where nothing was lost: a page that the file's end has come to lie in is read without an error, as zeros from there on.
  struct stat file;
  const bool is_cut = fstat(range_->fd, &file) == 0 && static_cast<uint64_t>(file.st_size) < range_->bytes;
  {
    const std::lock_guard lock(range_->lock);
    if (!is_cut && range_->lost == mark && range_->num_zeros == 0) return absl::OkStatus();
  }
  return absl::DataLossError(
      is_cut ? absl::StrCat(path_, ": ends after byte ", file.st_size, " of ", range_->bytes,
                            ": it has been truncated; restart the weight store, which then loads the model anew")
             : absl::StrCat(path_,
                            ": the disk gave an error for a part of it: look at the disk's health (dmesg); `hearth verify` says what is damaged, ",
                            "and another weightstore.disk_dir puts the experts elsewhere"));
}

}  // namespace hearth
