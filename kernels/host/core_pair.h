// SPDX-License-Identifier: Apache-2.0
// A core each for two threads that signal one another, where their process may use two.
#pragma once

#include <sched.h>

namespace mokbench {

// Left to the scheduler the second thread often starts on the first one's core, and the two then
// hand it to one another for every flag: microseconds where a flag takes a tenth of one.
class CorePair {
 public:
  // In the first thread, which stays on the core it runs on until this is destroyed.
  CorePair() {
#ifdef __linux__
    CPU_ZERO(&second_);
    if (sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    const int here = sched_getcpu();
    for (int core = 0; here >= 0 && core < CPU_SETSIZE && !apart_; ++core) {
      if (core == here || !CPU_ISSET(core, &before_)) continue;
      CPU_SET(core, &second_);
      apart_ = true;
    }
    if (apart_) pin(here);
#endif
  }
  ~CorePair() {
#ifdef __linux__
    if (apart_) sched_setaffinity(0, sizeof(before_), &before_);
#endif
  }
  CorePair(const CorePair&) = delete;
  CorePair& operator=(const CorePair&) = delete;

  // In the second thread, which ends before this does.
  void join() const {
#ifdef __linux__
    if (apart_) sched_setaffinity(0, sizeof(second_), &second_);
#endif
  }

 private:
#ifdef __linux__
  static void pin(int core) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof(one), &one);
  }
  cpu_set_t before_;
  cpu_set_t second_;
  bool apart_ = false;
#endif
};

}  // namespace mokbench
