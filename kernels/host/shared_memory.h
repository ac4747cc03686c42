// SPDX-License-Identifier: Apache-2.0
// A POSIX shared-memory object, mapped and with all its pages reserved.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "workspace.h"

namespace mokbench {

class SystemError : public std::runtime_error {
 public:
  SystemError(int error_number, const std::string& message)
      : std::runtime_error(message), error_number(error_number) {}
  const int error_number;
};

class SharedMemory {
 public:
  // create: fails if the name exists or its pages cannot be had. Else attaches to an existing one.
  SharedMemory(const std::string& name, u64 size, bool create);

  u64 size() const { return size_; }
  // Removes the name; the memory lives on until its last mapping goes.
  void unlink();
  // Lets go of the mapping; a rank that uses it keeps it.
  void close() { mapped_.reset(); }
  Mapping mapping() const;

 private:
  std::string name_;
  u64 size_;
  std::shared_ptr<void> mapped_;
};

// Shared or private memory without a name, for copy_rate and the ThreadSanitizer build.
std::shared_ptr<void> map_anonymous(u64 size, bool shared);

}  // namespace mokbench
