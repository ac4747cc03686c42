// SPDX-License-Identifier: Apache-2.0
// protocol.h's memory policy on a CPU: std::atomic_ref, valid between threads and, being lock-free
// on u32 and u64, between processes that share the mapping.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstring>

#include "protocol.h"

namespace mokbench {

inline u64 clock_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<u64>(now.tv_sec) * 1000000000ull + static_cast<u64>(now.tv_nsec);
}
// One clock for all processes of a host.
inline u64 monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }
// Copies are timed by it: on an oversubscribed host a preempted copy is no slower for that.
inline u64 thread_cpu_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

inline void sleep_ns(u64 duration_ns) {
  const timespec duration{static_cast<time_t>(duration_ns / 1000000000ull),
                          static_cast<long>(duration_ns % 1000000000ull)};
  nanosleep(&duration, nullptr);
}

// Rows, pieces of rows and top-k ids cross between ranks through this one function.
inline void copy_row(void* to, const void* from, u64 bytes) { std::memcpy(to, from, bytes); }

class HostMemory {
 public:
  // ~2 us of spinning: longer than a hop between cores, shorter than a context switch is worth.
  static constexpr u32 kNumSpins = 50;
  static constexpr u64 kYieldNs = 50000;

  HostMemory(double max_delay_us, u64 seed)
      : max_delay_ns_(static_cast<u64>(max_delay_us * 1e3)), random_(seed * 2 + 1) {}

#ifdef MOKBENCH_MUTANT_RELAXED_PUBLISH
  // A test of the ThreadSanitizer test: with these orders it must report races.
  static constexpr std::memory_order kRelease = std::memory_order_relaxed;
#else
  static constexpr std::memory_order kRelease = std::memory_order_release;
#endif

  template <Scope>
  u32 load_acquire(u32* at) {
    return std::atomic_ref<u32>(*at).load(std::memory_order_acquire);
  }
  template <Scope>
  void store_release(u32* at, u32 value) {
    std::atomic_ref<u32>(*at).store(value, kRelease);
  }
  template <Scope>
  void fetch_add_release(u32* at, u32 value) {
    std::atomic_ref<u32>(*at).fetch_add(value, kRelease);
  }
  template <Scope, class T>
  T load_relaxed(T* at) {
    return std::atomic_ref<T>(*at).load(std::memory_order_relaxed);
  }
  template <Scope, class T>
  void store_relaxed(T* at, T value) {
    std::atomic_ref<T>(*at).store(value, std::memory_order_relaxed);
  }
  bool compare_exchange(u32* at, u32 expected, u32 desired) {
    return std::atomic_ref<u32>(*at).compare_exchange_strong(expected, desired);
  }
  u64 now_ns() { return monotonic_ns(); }

  void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // Yields first, then sleeps: a thread that only yields still takes its fair share of a core, and
  // on an oversubscribed host that is the share of the ranks that have work to do. A sleep
  // lengthens the wait by an eighth at most.
  void relax(u64 waited_ns) {
    if (waited_ns < kYieldNs) {
      sched_yield();
    } else {
      sleep_ns(waited_ns / 8 < 200000 ? waited_ns / 8 : 200000);
    }
  }

  // Half of the steps are delayed: by a yield or by a sleep of up to the given time.
  void step() {
    if (max_delay_ns_ == 0) return;
    random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
    const u64 draw = random_ >> 33;
    if (draw % 4 == 0) sched_yield();
    if (draw % 4 == 1) sleep_ns((draw >> 2) % max_delay_ns_);
  }

 private:
  u64 max_delay_ns_;
  u64 random_;
};

static_assert(std::atomic_ref<u32>::is_always_lock_free &&
              std::atomic_ref<u64>::is_always_lock_free);

}  // namespace mokbench
