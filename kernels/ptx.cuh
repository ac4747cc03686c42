// SPDX-License-Identifier: Apache-2.0
// Every asm statement of the kernels, one function per instruction, named for it with its memory
// order and scope; and protocol.h's memory policy on the GPU. Semantics: PTX ISA, "Memory
// Consistency Model".
#pragma once

#include "protocol.h"

namespace mokbench {
namespace ptx {

// --- loads and stores of counters ------------------------------------------------------------

__device__ __forceinline__ u32 ld_acquire_sys(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ u32 ld_acquire_gpu(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ u32 ld_relaxed_sys(const u32* at) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ u64 ld_relaxed_sys(const u64* at) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void st_release_sys(u32* at, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void st_release_gpu(u32* at, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void st_relaxed_gpu(u32* at, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(u32* at, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(u64* at, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ void red_add_release_sys(u32* at, u32 value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void red_add_release_gpu(u32* at, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 atom_cas_acq_rel_sys(u32* at, u32 expected, u32 desired) {
  u32 found;
  asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(found)
               : "l"(at), "r"(expected), "r"(desired)
               : "memory");
  return found;
}

__device__ __forceinline__ u32 atom_add_acq_rel_gpu(u32* at, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(at), "r"(value)
               : "memory");
  return before;
}

__device__ __forceinline__ void fence_acq_rel_gpu() {
  asm volatile("fence.acq_rel.gpu;" : : : "memory");
}

// --- 16-byte rows ----------------------------------------------------------------------------

struct alignas(16) Vec16 {
  u32 x, y, z, w;
};

// A peer may have written these bytes since this SM last read them: L1 must not answer.
__device__ __forceinline__ Vec16 ld_relaxed_sys_v4(const void* at) {
  Vec16 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ void st_relaxed_sys_v4(void* at, Vec16 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// For rows that no one writes while the kernel runs and that are read once.
__device__ __forceinline__ Vec16 ld_nc_no_allocate_v4(const void* at) {
  Vec16 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

// Two BF16 of the sums' two halves, rounded to nearest even; the low half is the first element.
__device__ __forceinline__ u32 cvt_rn_bf16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// --- clocks and pauses -----------------------------------------------------------------------

// One clock for all ranks of a GPU; it was seen to step by 32 ns on one H200 and by 256 on another.
__device__ __forceinline__ u64 globaltimer_ns() {
  u64 value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value) : : "memory");
  return value;
}
__device__ __forceinline__ u64 clock64_cycles() {
  u64 value;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(value) : : "memory");
  return value;
}
__device__ __forceinline__ u32 smid() {
  u32 value;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(value));
  return value;
}
__device__ __forceinline__ void nanosleep(u32 ns) { asm volatile("nanosleep.u32 %0;" : : "r"(ns)); }

}  // namespace ptx

// protocol.h's Memory on the GPU; one per thread that waits or publishes.
struct DeviceMemory {
  // Polls before the clock and the fault words are read: a few hops' worth.
  static constexpr u32 kNumSpins = 64;

  template <Scope scope>
  __device__ __forceinline__ u32 load_acquire(u32* at) {
    if constexpr (scope == Scope::kSystem) return ptx::ld_acquire_sys(at);
    return ptx::ld_acquire_gpu(at);
  }
  template <Scope scope>
  __device__ __forceinline__ void store_release(u32* at, u32 value) {
    if constexpr (scope == Scope::kSystem) {
      ptx::st_release_sys(at, value);
    } else {
      ptx::st_release_gpu(at, value);
    }
  }
  template <Scope scope>
  __device__ __forceinline__ void fetch_add_release(u32* at, u32 value) {
    if constexpr (scope == Scope::kSystem) {
      ptx::red_add_release_sys(at, value);
    } else {
      ptx::red_add_release_gpu(at, value);
    }
  }
  template <Scope, class T>
  __device__ __forceinline__ T load_relaxed(T* at) {
    return ptx::ld_relaxed_sys(at);
  }
  template <Scope, class T>
  __device__ __forceinline__ void store_relaxed(T* at, T value) {
    ptx::st_relaxed_sys(at, value);
  }
  __device__ __forceinline__ bool compare_exchange(u32* at, u32 expected, u32 desired) {
    return ptx::atom_cas_acq_rel_sys(at, expected, desired) == expected;
  }
  __device__ __forceinline__ u64 now_ns() { return ptx::globaltimer_ns(); }
  __device__ __forceinline__ void pause() {}
  __device__ __forceinline__ void relax(u64) { ptx::nanosleep(100); }
  __device__ __forceinline__ void step() {}
};

}  // namespace mokbench
