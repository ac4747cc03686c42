// SPDX-License-Identifier: Apache-2.0
// Role threads that live across passes and sleep between them.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "protocol.h"

namespace mokbench {

class Team {
 public:
  // Each role is one thread, runs once per start() and must not throw.
  explicit Team(std::vector<std::function<void()>> roles) : roles_(std::move(roles)) {
    for (auto& role : roles_) threads_.emplace_back([this, &role] { serve(role); });
  }
  ~Team() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  void start() {
    {
      const std::lock_guard lock(mutex_);
      ++turn_;
      num_running_ = static_cast<u32>(threads_.size());
    }
    wake_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return num_running_ == 0; });
  }

 private:
  void serve(const std::function<void()>& role) {
    u64 seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || turn_ != seen; });
        if (stopping_) return;
        seen = turn_;
      }
      role();
      const std::lock_guard lock(mutex_);
      if (--num_running_ == 0) done_.notify_all();
    }
  }

  std::vector<std::function<void()>> roles_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  u64 turn_ = 0;
  u32 num_running_ = 0;
  bool stopping_ = false;
};

}  // namespace mokbench
