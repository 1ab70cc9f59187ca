// Small files read whole with a limit, and file handles that close themselves: the formats' only doors to the disk.
//
// Room: common/formats. May touch: common/base. Threads: any.
// A path that can't be opened is reported with the component that stands in the way, because "permission denied" on a
// long path hides which folder has to be changed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "common/base/status.h"

namespace hearth {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { Reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }
  void Reset();
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

struct OpenedFile {
  UniqueFd fd;
  uint64_t bytes = 0;
};

// Opens a regular file for reading; a folder, socket, pipe or device is refused before it can block.
// Errors: NotFound, PermissionDenied (naming the component), InvalidArgument.
absl::StatusOr<OpenedFile> OpenRegularFile(const std::string& path);
// Fills `buffer` from `offset`; a file that ends before is DataLoss.
absl::Status ReadExactly(int fd, const std::string& path, uint64_t offset, void* buffer, uint64_t bytes);
// Whole text of a file of at most `bytes_max`; a longer one is refused before anything is allocated for it.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, uint64_t bytes_max);
absl::Status WriteSmallFile(const std::string& path, std::string_view text);

// For error texts: a name from a file, quoted, escaped, and cut when it is absurdly long.
std::string Quoted(std::string_view name);
// "a, b, c and 12 more", each quoted.
class NameList {
 public:
  void Add(std::string_view name);
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  std::string ToString() const;

 private:
  static constexpr size_t kShown = 8;
  size_t count_ = 0;
  std::string text_;
};

}  // namespace hearth
