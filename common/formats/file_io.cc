#include "common/formats/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/base/time.h"

namespace hearth {
namespace {

// The first folder on the way to `path` that is missing or can't be entered; empty when the way is free.
std::string BlockingComponent(const std::string& path) {
  for (size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
    const std::string folder = path.substr(0, slash);
    if (::access(folder.c_str(), X_OK) != 0) return folder;
  }
  return "";
}

absl::Status OpenError(const std::string& path, int error) {
  const std::string blocking = BlockingComponent(path);
  const std::string where = blocking.empty() ? "" : absl::StrCat(" (stopped at ", blocking, ")");
  const std::string text = absl::StrCat("can't open ", path, ": ", std::strerror(error), where);
  switch (error) {
    case ENOENT:
    case ENOTDIR: return absl::NotFoundError(text);
    case EACCES:
    case EPERM: return absl::PermissionDeniedError(absl::StrCat(text, "; give this user the right to read it"));
    case EMFILE:
    case ENFILE:
    case ENOMEM: return absl::ResourceExhaustedError(text);
    default: return absl::UnavailableError(text);
  }
}

}  // namespace

void UniqueFd::Reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

absl::StatusOr<OpenedFile> OpenRegularFile(const std::string& path) {
  // O_NONBLOCK: opening a pipe that nobody writes to must not hang; it has no effect on regular files.
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return OpenError(path, errno);
  struct stat st;
  if (::fstat(fd.get(), &st) != 0) return OpenError(path, errno);
  if (!S_ISREG(st.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  return OpenedFile{std::move(fd), static_cast<uint64_t>(st.st_size)};
}

absl::Status ReadExactly(int fd, const std::string& path, uint64_t offset, void* buffer, uint64_t bytes) {
  char* out = static_cast<char*>(buffer);
  uint64_t done = 0;
  while (done < bytes) {
    const size_t want = static_cast<size_t>(std::min<uint64_t>(bytes - done, uint64_t{1} << 30));
    const ssize_t got = ::pread(fd, out + done, want, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::DataLossError(absl::StrCat("reading ", path, " at byte ", offset + done, ": ", std::strerror(errno)));
    if (got == 0) return absl::DataLossError(absl::StrCat(path, " ends at byte ", offset + done, ": it became shorter while it was read"));
    done += static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, uint64_t bytes_max) {
  ASSIGN_OR_RETURN(OpenedFile file, OpenRegularFile(path));
  if (file.bytes > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has ", HumanBytes(static_cast<double>(file.bytes)), ", more than the ",
                                                   HumanBytes(static_cast<double>(bytes_max)), " such a file may have"));
  }
  std::string text(file.bytes, '\0');
  RETURN_IF_ERROR(ReadExactly(file.fd.get(), path, 0, text.data(), text.size()));
  return text;
}

absl::Status WriteSmallFile(const std::string& path, std::string_view text) {
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (fd.get() < 0) return absl::UnavailableError(absl::StrCat("can't create ", path, ": ", std::strerror(errno)));
  while (!text.empty()) {
    const ssize_t wrote = ::write(fd.get(), text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return absl::UnavailableError(absl::StrCat("writing ", path, ": ", std::strerror(errno)));
    text.remove_prefix(static_cast<size_t>(wrote));
  }
  if (::close(fd.Release()) != 0) return absl::UnavailableError(absl::StrCat("closing ", path, ": ", std::strerror(errno)));
  return absl::OkStatus();
}

std::string Quoted(std::string_view name) {
  constexpr size_t kShownBytes = 160;
  const std::string escaped = absl::Utf8SafeCEscape(Sv(name.substr(0, kShownBytes)));
  return absl::StrCat("\"", escaped, name.size() > kShownBytes ? "..." : "", "\"");
}

void NameList::Add(std::string_view name) {
  if (count_ < kShown) absl::StrAppend(&text_, count_ == 0 ? "" : ", ", Quoted(name));
  ++count_;
}

std::string NameList::ToString() const { return count_ <= kShown ? text_ : absl::StrCat(text_, " and ", count_ - kShown, " more"); }

}  // namespace hearth
