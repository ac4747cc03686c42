// SPDX-License-Identifier: Apache-2.0
// A core each for two threads of a rank that signal one another.
#pragma once

#include <sched.h>

#include <vector>

#include "protocol.h"

namespace mokbench {

// Left to the scheduler the second thread often starts on the first one's core, and the two then
// hand it to one another for every flag: microseconds where a flag takes a tenth of one. The ranks
// share the cores by number, so that no two take the same while there are enough.
class CorePair {
 public:
  // In the first thread, which stays on its core until this is destroyed.
  CorePair(u32 rank, u32 num_ranks) {
#ifdef __linux__
    if (sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    std::vector<int> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &before_)) cores.push_back(core);
    }
    if (cores.size() < 2) return;
    const u32 apart = cores.size() >= 2 * num_ranks ? num_ranks : 1;
    second_core_ = cores[(rank + apart) % cores.size()];
    pin(cores[rank % cores.size()]);
#endif
  }
  ~CorePair() {
#ifdef __linux__
    if (second_core_ >= 0) sched_setaffinity(0, sizeof(before_), &before_);
#endif
  }
  CorePair(const CorePair&) = delete;
  CorePair& operator=(const CorePair&) = delete;

  // In the second thread, which ends before this does.
  void join() const {
#ifdef __linux__
    if (second_core_ >= 0) pin(second_core_);
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
  int second_core_ = -1;
#endif
};

}  // namespace mokbench
