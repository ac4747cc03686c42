// SPDX-License-Identifier: Apache-2.0
#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace mokbench {

namespace {

[[noreturn]] void raise_errno(int error_number, const std::string& what) {
  throw SystemError(error_number, what + ": " + std::strerror(error_number));
}

std::string checked_name(const std::string& given) {
  const std::string name = given.substr(given.starts_with('/') ? 1 : 0);
  if (name.empty() || name.size() > 250 || name.find('/') != std::string::npos) {
    throw std::invalid_argument("shared memory name is '" + name +
                                "'; allowed are 1 to 250 characters with no '/'");
  }
  return std::string("/").append(name);
}

struct FileDescriptor {
  int value;
  ~FileDescriptor() { ::close(value); }
};

// Without this a full /dev/shm would kill the process with SIGBUS at some later store.
void reserve_pages(int fd, u64 size, const std::string& name) {
  if (ftruncate(fd, static_cast<off_t>(size)) != 0) {
    raise_errno(errno,
                "cannot size shared memory " + name + " to " + std::to_string(size) + " bytes");
  }
  struct statvfs room{};
  const bool has_room = fstatvfs(fd, &room) == 0;
  int error_number = 0;
  do {
    error_number = posix_fallocate(fd, 0, static_cast<off_t>(size));
  } while (error_number == EINTR);
  if (error_number == 0) return;
  std::string what =
      "cannot reserve shared memory " + name + ": it needs " + std::to_string(size) + " bytes";
  if (has_room) {
    what += " and " + std::to_string(u64{room.f_bavail} * room.f_frsize) +
            " are available (see df /dev/shm)";
  }
  raise_errno(error_number, what);
}

void check_size(int fd, u64 size, const std::string& name) {
  struct stat status{};
  if (fstat(fd, &status) != 0) raise_errno(errno, "cannot inspect shared memory " + name);
  if (static_cast<u64>(status.st_size) != size) {
    throw std::invalid_argument("shared memory " + name + " has " + std::to_string(status.st_size) +
                                " bytes, not the " + std::to_string(size) +
                                " that this rank needs");
  }
}

std::shared_ptr<void> map(int fd, u64 size, int flags) {
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (base == MAP_FAILED) raise_errno(errno, "cannot map " + std::to_string(size) + " bytes");
  return {base, [size](void* at) { munmap(at, size); }};
}

}  // namespace

SharedMemory::SharedMemory(const std::string& name, u64 size, bool create)
    : name_(checked_name(name)), size_(size) {
  if (size == 0 || size > 1ull << 46) {
    throw std::invalid_argument("size is " + std::to_string(size) +
                                "; allowed are 1 byte to 64 TiB");
  }
  const int flags = O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0);
  const FileDescriptor fd{shm_open(name_.c_str(), flags, 0600)};
  if (fd.value < 0) {
    raise_errno(errno, std::string(create ? "cannot create" : "cannot attach to") +
                           " shared memory " + name_);
  }
  try {
    if (create) {
      reserve_pages(fd.value, size, name_);
    } else {
      check_size(fd.value, size, name_);
    }
    mapped_ = map(fd.value, size, MAP_SHARED);
  } catch (...) {
    if (create) shm_unlink(name_.c_str());
    throw;
  }
}

void SharedMemory::unlink() {
  if (shm_unlink(name_.c_str()) != 0) raise_errno(errno, "cannot unlink shared memory " + name_);
}

Mapping SharedMemory::mapping() const {
  if (!mapped_) throw std::invalid_argument("shared memory " + name_ + " is closed");
  return {static_cast<char*>(mapped_.get()), size_, mapped_};
}

std::shared_ptr<void> map_anonymous(u64 size, bool shared) {
  return map(-1, size, MAP_ANONYMOUS | (shared ? MAP_SHARED : MAP_PRIVATE));
}

}  // namespace mokbench
