// How a region's file is made, validated and mapped. Contract: region.h. Room: common/shm. May touch: common/base.
// Boost.Interprocess maps; its exceptions end here.
#include "common/shm/region.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <boost/interprocess/exceptions.hpp>
#include <boost/interprocess/file_mapping.hpp>
#include <boost/interprocess/mapped_region.hpp>
#include <fstream>

#include "absl/strings/str_format.h"
#include "common/base/align.h"
#include "common/base/check.h"
#include "common/base/publish_point.h"
#include "common/base/time.h"

namespace hearth {
namespace {

namespace bip = boost::interprocess;

constexpr size_t kFixedHashOffset = offsetof(RegionHeader, fixed_hash);

std::string Errno(int error) { return strerror(error); }

std::string DirOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Why a file can't be made in `dir`: the first directory on the way that refuses, since errno alone never says which.
absl::Status DirectoryProblem(const std::string& dir) {
  for (size_t end = dir.find('/', 1); end != std::string::npos; end = dir.find('/', end + 1)) {
    const std::string part = dir.substr(0, end);
    if (faccessat(AT_FDCWD, part.c_str(), X_OK, AT_EACCESS) == 0) continue;
    if (errno == ENOENT) return absl::NotFoundError(absl::StrCat("directory ", dir, ": ", part, " does not exist"));
    return absl::PermissionDeniedError(absl::StrCat("directory ", dir, ": ", part, " can't be entered by user ", geteuid(), " (", Errno(errno),
                                                    "); give this user the x right on it"));
  }
  struct stat st;
  if (stat(dir.c_str(), &st) != 0) {
    if (errno == ENOENT) return absl::NotFoundError(absl::StrCat("directory ", dir, " does not exist"));
    return absl::PermissionDeniedError(absl::StrCat("directory ", dir, ": ", Errno(errno)));
  }
  if (!S_ISDIR(st.st_mode)) return absl::FailedPreconditionError(absl::StrCat(dir, " is not a directory"));
  if (faccessat(AT_FDCWD, dir.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    return absl::PermissionDeniedError(absl::StrCat("directory ", dir, " is not writable by user ", geteuid(), " (", Errno(errno),
                                                    "); give this user the w and x rights, or choose another directory"));
  }
  return absl::OkStatus();
}

uint64_t MemAvailableBytes() {
  std::ifstream in("/proc/meminfo");
  std::string key, unit;
  uint64_t kib = 0;
  while (in >> key >> kib && std::getline(in, unit)) {
    if (key == "MemAvailable:") return kib * 1024;
  }
  return 0;
}

absl::Status MapError(const std::string& path, const std::exception& e) {
  const auto* known = dynamic_cast<const bip::interprocess_exception*>(&e);
  const std::string message = absl::StrCat("mapping ", path, ": ", e.what());
  if (known != nullptr && known->get_error_code() == bip::out_of_space_error) return absl::ResourceExhaustedError(message);
  if (known != nullptr && (known->get_native_error() == EMFILE || known->get_native_error() == ENFILE)) return absl::ResourceExhaustedError(message);
  if (known != nullptr && known->get_native_error() == ENOMEM) {
    return absl::ResourceExhaustedError(absl::StrCat(message, "; look at `ulimit -v` and vm.max_map_count"));
  }
  return absl::InternalError(message);
}

std::string Printable(uint64_t magic) { return absl::StrFormat("0x%016x", magic); }

std::string_view KindName(RegionKind kind) {
  switch (kind) {
    case RegionKind::kManifest: return "manifest";
    case RegionKind::kSegment: return "segment";
    case RegionKind::kKvPool: return "KV pool";
    case RegionKind::kStoreTable: return "store table";
    case RegionKind::kExpertRing: return "expert ring";
    case RegionKind::kGroup: return "prefill group";
    case RegionKind::kDiskPart: return "disk part";
    case RegionKind::kTurnBoard: return "turn board";
  }
  return "unknown kind";
}

// `file_bytes` is what the file system says; the header is bytes that another process wrote.
absl::Status ValidateHeader(const RegionHeader& h, uint64_t file_bytes, const std::string& path, RegionKind kind, uint64_t kind_version) {
  if (h.magic == 0) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": has no header: its maker died while creating it; it may be removed"));
  }
  if (h.magic != kRegionMagic) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": not a Hearth region: magic ", Printable(h.magic), ", expected ", Printable(kRegionMagic)));
  }
  if (h.format_version != kRegionFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": region format version ", h.format_version, ", this program supports version ",
                                                      kRegionFormatVersion, "; run the matching version, or load the model anew"));
  }
  if (h.fixed_hash != Xxh3_64(&h, kFixedHashOffset)) {
    return absl::DataLossError(absl::StrCat(path, ": the header's sum does not match: it is damaged"));
  }
  if (h.kind != kind) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": holds a ", Sv(KindName(h.kind)), " (kind ", static_cast<uint32_t>(h.kind),
                                                      "), expected a ", Sv(KindName(kind)), " (kind ", static_cast<uint32_t>(kind), ")"));
  }
  if (h.kind_version != kind_version) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": ", Sv(KindName(kind)), " layout version ", h.kind_version,
                                                      ", this program supports version ", kind_version,
                                                      "; run the matching version, or load the model anew"));
  }
  if (h.region_bytes != file_bytes) {
    return absl::DataLossError(absl::StrCat(path, ": the header says ", h.region_bytes, " bytes, the file has ", file_bytes, " bytes"));
  }
  const uint32_t state = h.state.load(std::memory_order_acquire);
  if (state < static_cast<uint32_t>(RegionState::kLoading) || state > static_cast<uint32_t>(RegionState::kRetired)) {
    return absl::DataLossError(absl::StrCat(path, ": unknown state ", state, ": damaged, or its maker died while creating it"));
  }
  return absl::OkStatus();
}

// /dev/shm is open to all users: what somebody else put there under our name is not ours.
bool IsTrusted(const struct stat& st) { return st.st_uid == geteuid() || st.st_uid == 0 || geteuid() == 0; }

// Closes on every way out.
struct Fd {
  int fd = -1;
  ~Fd() {
    if (fd >= 0) close(fd);
  }
};

absl::Status OpenFile(const std::string& path, MapMode mode, Fd* file) {
  // Not to wait for the other end of a pipe that somebody put there.
  file->fd = open(path.c_str(), (mode == MapMode::kReadOnly ? O_RDONLY : O_RDWR) | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file->fd >= 0) return absl::OkStatus();
  const int error = errno;
  if (error == ENOENT) return absl::NotFoundError(absl::StrCat(path, " does not exist"));
  const std::string message = absl::StrCat("opening ", path, ": ", Errno(error));
  if (error == EACCES || error == EPERM || error == EROFS) {
    return absl::PermissionDeniedError(absl::StrCat(message, "; store and workers must run as one user, this one is ", geteuid()));
  }
  if (error == ELOOP) return absl::PermissionDeniedError(absl::StrCat(path, " is a symbolic link: not followed"));
  if (error == EMFILE || error == ENFILE || error == ENOMEM) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

// Boost opens by name; this name is the file already checked, whatever has happened to the directory since.
std::string FdPath(int fd) { return absl::StrCat("/proc/self/fd/", fd); }

// Once free memory is in fragments, the kernel moves other pages about for each huge page, ten times as slowly: then the rest is had in small pages.
constexpr int64_t kHugeStepMaxNs = 350'000'000;
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; Debian 12's C library does not name it
#endif

// An address where `bytes` of a file may be mapped so that its huge pages fit; null if there is none. Another thread may take it meanwhile.
void* AlignedRoom(uint64_t bytes) {
  void* room = mmap(nullptr, bytes + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  munmap(room, bytes + kHugePageBytes);
  return reinterpret_cast<void*>(AlignUp(reinterpret_cast<uintptr_t>(room), kHugePageBytes));
}

// The whole file, where its huge pages fit. Throws as Boost does.
bip::mapped_region Map(int fd, bip::mode_t mode, uint64_t bytes) {
  const bip::file_mapping file(FdPath(fd).c_str(), mode);
  if (void* at = bytes < kHugePageBytes ? nullptr : AlignedRoom(bytes); at != nullptr) {
    try {
      return bip::mapped_region(file, mode, 0, bytes, at);
    } catch (const bip::interprocess_exception& e) {
      if (e.get_error_code() != bip::busy_error) throw;  // busy: another thread was quicker
    }
  }
  return bip::mapped_region(file, mode, 0, bytes);
}

// fallocate; file systems without it (some network ones) get the slow way of the C library. 0 or an errno.
int Allocate(int fd, uint64_t offset, uint64_t bytes) {
  int rc;
  do {
    rc = fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (rc == EINTR);
  if (rc == EOPNOTSUPP || rc == ENOSYS) rc = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  return rc;
}

// Fills whole huge pages of the range with such pages, whatever the file system was mounted with: a page in each is allocated, and MADV_COLLAPSE makes the
// rest. Measured on Linux 6.18: allocating 4 times and first writing 13 times as fast, reading 3 to 7 % faster. Where the kernel can't (before 6.1,
// shmem_enabled = deny, memory in fragments) nothing is lost: the caller allocates what is missing as it comes. Returns the bytes that are in huge pages now.
uint64_t AllocateHuge(int fd, uint64_t offset, uint64_t bytes) {
  const uint64_t begin = AlignUp(offset, kHugePageBytes);
  const uint64_t end = (offset + bytes) / kHugePageBytes * kHugePageBytes;
  if (end <= begin) return 0;
  const uint64_t size = end - begin;
  void* at = AlignedRoom(size);
  void* map = mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(begin));
  if (map == MAP_FAILED) return 0;
  bool huge = map == at && at != nullptr;
  for (uint64_t page = begin; huge && page < end; page += kHugePageBytes) huge = fallocate(fd, 0, static_cast<off_t>(page), 4096) == 0;
  huge = huge && madvise(map, size, MADV_COLLAPSE) == 0;
  munmap(map, size);
  return huge ? size : 0;
}

// Every byte of the file; in huge pages where `huge` counts them.
absl::Status AllocateAll(int fd, uint64_t bytes, const std::string& path, const AllocationHook& on_allocated, uint64_t* huge) {
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    return absl::InternalError(absl::StrCat("sizing ", path, " to ", bytes, " bytes: ", Errno(errno)));
  }
  const std::string dir = DirOf(path);
  const auto refused = [&](int error) {
    const absl::StatusOr<uint64_t> available = ShmAvailableBytes(dir);
    struct stat st {};
    fstat(fd, &st);
    const uint64_t done = static_cast<uint64_t>(st.st_blocks) * 512;  // this file's own
    const std::string message = absl::StrCat("allocating ", path, ": needed ", bytes, " bytes, available ",
                                             available.ok() ? absl::StrCat(*available + done, " bytes") : "unknown", " in ", dir, " (", Errno(error),
                                             "); free memory there, or raise the size of that file system (mount -o "
                                             "remount,size=...)");
    if (error == ENOSPC || error == ENOMEM || error == EFBIG || error == EDQUOT) return absl::ResourceExhaustedError(message);
    return absl::InternalError(message);
  };
  // What can't fit is refused before the first step, as one call for all of it would be: the steps before the last would
  // take the memory that the rest of the machine lives on.
  if (bytes > kAllocationStepBytes) {
    const absl::StatusOr<uint64_t> available = ShmAvailableBytes(dir);
    if (available.ok() && *available < bytes) return refused(ENOSPC);
  }
  bool huge_is_slow = false;
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t step = std::min(kAllocationStepBytes, bytes - done);
    if (huge != nullptr && !huge_is_slow) {
      const int64_t begin_ns = MonotonicNowNs();
      *huge += AllocateHuge(fd, done, step);
      huge_is_slow = MonotonicNowNs() - begin_ns > kHugeStepMaxNs;
    }
    if (const int error = Allocate(fd, done, step); error != 0) return refused(error);
    done += step;
    if (on_allocated) RETURN_IF_ERROR(on_allocated(done));
  }
  return absl::OkStatus();
}

}  // namespace

struct ShmRegion::Impl {
  std::string path;
  MapMode mode;
  bip::mapped_region map;
  uint64_t huge_bytes = 0;
};

std::string RegionPlace::Path(std::string_view what) const { return absl::StrCat(dir, "/hearth.", node, ".", Sv(what)); }
std::string RegionPlace::Path(std::string_view what, const Hash128& generation) const { return absl::StrCat(Path(what), ".", generation.ToHex()); }
std::string RegionPlace::DiskPath(std::string_view what, const Hash128& generation) const {
  return RegionPlace{.dir = disk_dir, .node = node}.Path(what, generation);
}

ShmRegion::ShmRegion(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ShmRegion::ShmRegion(ShmRegion&&) noexcept = default;
ShmRegion& ShmRegion::operator=(ShmRegion&&) noexcept = default;
ShmRegion::~ShmRegion() = default;

absl::StatusOr<ShmRegion> ShmRegion::Create(const std::string& path, RegionKind kind, uint64_t kind_version, const Hash128& generation,
                                            uint64_t body_bytes, const AllocationHook& on_allocated) {
  const std::string dir = DirOf(path);
  uint64_t region_bytes = kRegionHeaderBytes + body_bytes;
  if (region_bytes < body_bytes || region_bytes > INT64_MAX) {
    return absl::InvalidArgumentError(absl::StrCat("creating ", path, ": ", body_bytes, " bytes are beyond any file"));
  }
  Fd file;
  file.fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (file.fd < 0) {
    const int error = errno;
    if (error == EEXIST) return absl::AlreadyExistsError(absl::StrCat(path, " is already there"));
    RETURN_IF_ERROR(DirectoryProblem(dir));
    const std::string message = absl::StrCat("creating ", path, ": ", Errno(error));
    if (error == ENOSPC || error == EMFILE || error == ENFILE || error == EDQUOT) return absl::ResourceExhaustedError(message);
    if (error == EACCES || error == EPERM || error == EROFS) return absl::PermissionDeniedError(message);
    return absl::InternalError(message);
  }
  const auto fail = [&](absl::Status status) {
    unlink(path.c_str());
    return status;
  };
  struct statfs fs {};
  fstatfs(file.fd, &fs);
  if (fs.f_type == HUGETLBFS_MAGIC) {  // whole huge pages, or neither truncate nor mmap agree
    const uint64_t page = static_cast<uint64_t>(fs.f_bsize);
    region_bytes = AlignUp(region_bytes, page);
  }
  const bool is_tmpfs = fs.f_type == TMPFS_MAGIC;
  uint64_t huge_bytes = 0;
  if (absl::Status allocated = AllocateAll(file.fd, region_bytes, path, on_allocated, is_tmpfs ? &huge_bytes : nullptr); !allocated.ok()) {
    return fail(std::move(allocated));
  }
  if (fs.f_type == HUGETLBFS_MAGIC) huge_bytes = region_bytes;
  PublishPoint("region.allocated");
  try {
    auto impl = std::make_unique<Impl>();
    impl->path = path;
    impl->mode = MapMode::kReadWrite;
    impl->map = Map(file.fd, bip::read_write, region_bytes);
    impl->huge_bytes = huge_bytes;
    ShmRegion region(std::move(impl));
    // Best effort: a tmpfs mounted with huge=advise hands out huge pages only to mappings that ask.
    madvise(region.base(), region_bytes, MADV_HUGEPAGE);

    RegionHeader& h = region.header();
    absl::StatusOr<ProcessId> self = ProcessOf(getpid());
    if (!self.ok()) return fail(self.status());
    region.SetOwner(*self);
    // The file is all zeros until here. The magic goes in with the sum that covers it, the state last: whatever a crash
    // leaves is seen as unfinished.
    h.format_version = kRegionFormatVersion;
    h.kind = kind;
    h.region_bytes = region_bytes;
    h.generation = generation;
    h.kind_version = kind_version;
    h.reserved = 0;
    h.magic = kRegionMagic;
    PublishPoint("region.magic");
    h.fixed_hash = Xxh3_64(&h, kFixedHashOffset);
    PublishPoint("region.fixed_hash");
    region.SetState(RegionState::kLoading);
    PublishPoint("region.loading");
    return region;
  } catch (const std::exception& e) {
    return fail(MapError(path, e));
  }
}

absl::StatusOr<ShmRegion> ShmRegion::Open(const std::string& path, RegionKind kind, uint64_t kind_version, MapMode mode) {
  Fd file;
  RETURN_IF_ERROR(OpenFile(path, mode, &file));
  struct stat st;
  if (fstat(file.fd, &st) != 0) return absl::InternalError(absl::StrCat("stat ", path, ": ", Errno(errno)));
  if (!S_ISREG(st.st_mode)) return absl::FailedPreconditionError(absl::StrCat(path, " is not a plain file"));
  if (!IsTrusted(st)) {
    return absl::PermissionDeniedError(absl::StrCat(path, " belongs to user ", st.st_uid, ", this process is user ", geteuid(), ": not trusted"));
  }
  const uint64_t file_bytes = static_cast<uint64_t>(st.st_size);
  if (file_bytes < kRegionHeaderBytes) {
    return absl::DataLossError(absl::StrCat(path, ": ", file_bytes, " bytes are less than a header of ", kRegionHeaderBytes,
                                            ": its maker died while creating it; it may be removed"));
  }
  try {
    auto impl = std::make_unique<Impl>();
    impl->path = path;
    impl->mode = mode;
    const bip::mode_t map_mode = mode == MapMode::kReadOnly ? bip::read_only : bip::read_write;
    impl->map = Map(file.fd, map_mode, file_bytes);
    ShmRegion region(std::move(impl));
    RETURN_IF_ERROR(ValidateHeader(region.header(), file_bytes, path, kind, kind_version));
    madvise(region.base(), file_bytes, MADV_HUGEPAGE);
    return region;
  } catch (const std::exception& e) {
    return MapError(path, e);
  }
}

uint64_t ShmRegion::huge_bytes() const { return impl_->huge_bytes; }
RegionHeader& ShmRegion::header() const { return *reinterpret_cast<RegionHeader*>(base()); }
uint8_t* ShmRegion::base() const { return static_cast<uint8_t*>(impl_->map.get_address()); }
uint64_t ShmRegion::bytes() const { return impl_->map.get_size(); }
const std::string& ShmRegion::path() const { return impl_->path; }

void ShmRegion::SetOwner(const ProcessId& owner) {
  HEARTH_CHECK(impl_->mode == MapMode::kReadWrite);
  RegionHeader& h = header();
  // A reader between the stores sees pid 0, nobody, and never one owner's pid with another's start time.
  h.owner_pid.store(0, std::memory_order_release);
  h.owner_start.store(owner.start_ticks, std::memory_order_release);
  PublishPoint("region.owner_start");
  h.owner_pid.store(owner.pid, std::memory_order_release);
}

ProcessId ShmRegion::owner() const {
  const RegionHeader& h = header();
  for (int i = 0; i < 100; ++i) {
    const int32_t pid = h.owner_pid.load(std::memory_order_acquire);
    const uint64_t start = h.owner_start.load(std::memory_order_acquire);
    if (h.owner_pid.load(std::memory_order_acquire) == pid) return pid == 0 ? ProcessId{} : ProcessId{pid, start};
  }
  return ProcessId{};
}

absl::StatusOr<RegionLock> RegionLock::Acquire(const std::string& path) {
  Fd file;
  RETURN_IF_ERROR(OpenFile(path, MapMode::kReadOnly, &file));
  if (flock(file.fd, LOCK_EX | LOCK_NB) == 0) return RegionLock(std::exchange(file.fd, -1));
  if (errno != EWOULDBLOCK) return absl::InternalError(absl::StrCat("locking ", path, ": ", Errno(errno)));
  return absl::UnavailableError(absl::StrCat("another weight store, perhaps in another container, serves ", path));
}

RegionLock::~RegionLock() {
  if (fd_ >= 0) close(fd_);
}

ProcessId OwnerOfRegionFile(const std::string& path) {
  const Fd file{open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)};
  if (file.fd < 0) return {};
  const auto read = [&](RegionHeader& h) {
    return pread(file.fd, static_cast<void*>(&h), sizeof(h), 0) == static_cast<ssize_t>(sizeof(h)) && h.magic == kRegionMagic;
  };
  // As ShmRegion::owner: a copy that a new owner's stores fell into is read again.
  for (int i = 0; i < 100; ++i) {
    RegionHeader first, second;
    if (!read(first) || !read(second)) return {};
    const ProcessId owner{first.owner_pid.load(), first.owner_start.load()};
    if (owner == ProcessId{second.owner_pid.load(), second.owner_start.load()}) return owner.pid == 0 ? ProcessId{} : owner;
  }
  return {};
}

absl::StatusOr<uint64_t> ShmAvailableBytes(const std::string& dir) {
  RETURN_IF_ERROR(DirectoryProblem(dir));
  struct statvfs fs;
  if (statvfs(dir.c_str(), &fs) != 0) return absl::InternalError(absl::StrCat("statvfs ", dir, ": ", Errno(errno)));
  if (fs.f_flag & ST_RDONLY) {
    return absl::PermissionDeniedError(absl::StrCat("directory ", dir, " is on a read-only file system"));
  }
  if (fs.f_blocks == 0) return MemAvailableBytes();  // a tmpfs mounted with size=0 has no limit of its own
  return static_cast<uint64_t>(fs.f_bavail) * fs.f_frsize;
}

bool TellsOfTheFile(const absl::Status& error) { return absl::IsFailedPrecondition(error) || absl::IsDataLoss(error) || absl::IsNotFound(error); }

namespace {

void AddRegionFiles(const std::string& in, const std::string& node, std::vector<RegionFile>& files, std::vector<std::string>* left_alone) {
  DIR* dir = opendir(in.c_str());
  if (dir == nullptr) return;
  const std::string prefix = absl::StrCat("hearth.", node, ".");
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    if (name.compare(0, prefix.size(), prefix) != 0) continue;
    // What follows is <what> or <what>.<32 hex digits>: with any other dot it belongs to a node whose name begins like
    // ours.
    RegionFile file{absl::StrCat(in, "/", name), name.substr(prefix.size()), std::nullopt};
    if (const size_t dot = file.what.find('.'); dot != std::string::npos) {
      file.generation = Hash128FromHex(std::string_view(file.what).substr(dot + 1));
      if (!file.generation) continue;
      file.what.resize(dot);
    }
    const auto plain = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_'; };
    if (file.what.empty() || !std::all_of(file.what.begin(), file.what.end(), plain)) continue;
    struct stat st;
    if (lstat(file.path.c_str(), &st) != 0) continue;  // gone meanwhile
    if (!S_ISREG(st.st_mode) || !IsTrusted(st)) {
      if (left_alone != nullptr) {
        left_alone->push_back(S_ISREG(st.st_mode)
                                  ? absl::StrCat(file.path, " belongs to user ", st.st_uid, ", this process is user ", geteuid(), ": left alone")
                                  : absl::StrCat(file.path, " is not a plain file: left alone"));
      }
      continue;
    }
    files.push_back(std::move(file));
  }
  closedir(dir);
}

}  // namespace

std::vector<RegionFile> ListRegionFiles(const RegionPlace& place, std::vector<std::string>* left_alone) {
  std::vector<RegionFile> files;
  AddRegionFiles(place.dir, place.node, files, left_alone);
  if (!place.disk_dir.empty() && place.disk_dir != place.dir) AddRegionFiles(place.disk_dir, place.node, files, left_alone);
  std::sort(files.begin(), files.end(), [](const RegionFile& a, const RegionFile& b) { return a.path < b.path; });
  return files;
}

std::vector<std::string> ListRegions(const RegionPlace& place) {
  std::vector<std::string> paths;
  for (RegionFile& file : ListRegionFiles(place)) paths.push_back(std::move(file.path));
  return paths;
}

}  // namespace hearth
