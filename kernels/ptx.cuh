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
__device__ __forceinline__ void red_add_relaxed_gpu(u32* at, u32 value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
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

// --- mbarriers, bulk copies and matrices in shared memory -----------------------------------
// Shared memory is addressed by 32 bits throughout.

__device__ __forceinline__ u32 cvta_to_shared(const void* at) {
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(at));
  return static_cast<u32>(address);
}

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(barrier), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers known to the unit that copies.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(barrier), "r"(bytes)
               : "memory");
}
// Unbounded: it waits for this CTA's own threads and copies only. The loop is in the asm statement
// because ptxas spills accumulators that live across one in C++.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ bool mbarrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// cuda.h's CUtensorMap, encoded by the host.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_load(u32 to, const TensorMap& map, u32 barrier,
                                                          u32 column, u32 row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];"
      :
      : "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_store(const TensorMap& map, u32 from,
                                                           u32 column, u32 row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               :
               : "l"(&map), "r"(from), "r"(column), "r"(row)
               : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}
// Until all but the last kGroups groups have read their shared memory.
template <u32 kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kGroups) : "memory");
}
__device__ __forceinline__ void cp_async_bulk_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}
// Shared memory that this thread has written, or got by a barrier, becomes visible to bulk copies.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
// Between this thread's view of global memory and that of bulk copies, either way.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" : : : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, transposed; lane i gives row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4_trans(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
// The first two of them; lanes 0 to 15 give the rows.
__device__ __forceinline__ void stmatrix_x2_trans(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               :
               : "r"(at), "r"(a), "r"(b)
               : "memory");
}
__device__ __forceinline__ Vec16 ld_shared_v4(u32 at) {
  Vec16 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ u32 ld_volatile_shared(u32 at) {
  u32 value;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}
__device__ __forceinline__ void st_volatile_shared(u32 at, u32 value) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" : : "r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 atom_or_acquire_cta_shared(u32 at, u32 value) {
  u32 before;
  asm volatile("atom.acquire.cta.shared::cta.or.b32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(at), "r"(value)
               : "memory");
  return before;
}
__device__ __forceinline__ u32 atom_exch_release_cta_shared(u32 at, u32 value) {
  u32 before;
  asm volatile("atom.release.cta.shared::cta.exch.b32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(at), "r"(value)
               : "memory");
  return before;
}
// All threads of a group of warps; barrier 0 is __syncthreads.
__device__ __forceinline__ void bar_sync(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}
// The same for warps that come from different places in the code, which the aligned form forbids
// (PTX ISA, "bar, barrier"; synccheck finds it).
__device__ __forceinline__ void barrier_sync(u32 barrier, u32 threads) {
  asm volatile("barrier.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}
template <u32 kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <u32 kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// --- arithmetic ------------------------------------------------------------------------------

// Two BF16 of the sums' two halves, rounded to nearest even; the low half is the first element.
__device__ __forceinline__ u32 cvt_rn_bf16x2(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Two E4M3, rounded to nearest even; what is larger than 448 becomes 448.
__device__ __forceinline__ u16 cvt_rn_satfinite_e4m3x2(float low, float high) {
  u16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
// Two E4M3 as FP32, which is exact.
__device__ __forceinline__ void cvt_f32_e4m3x2(float& low, float& high, u16 packed) {
  asm("{\n\t.reg .b32 pair;\n\t.reg .b16 first, second;\n\t"
      "cvt.rn.f16x2.e4m3x2 pair, %2;\n\tmov.b32 {first, second}, pair;\n\t"
      "cvt.f32.f16 %0, first;\n\tcvt.f32.f16 %1, second;\n\t}"
      : "=f"(low), "=f"(high)
      : "h"(packed));
}

__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- clocks and pauses -----------------------------------------------------------------------

// One clock for all ranks of a GPU, ns since 1970: float64 has steps of 256 there.
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
// threadIdx.x, read anew: where registers are short, keeping it costs more than asking again.
__device__ __forceinline__ u32 tid_x() {
  u32 value;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(value));
  return value;
}
// The same value, of which the compiler does not know that it has it already.
__device__ __forceinline__ u32 anew(u32 value) {
  asm volatile("" : "+r"(value));
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
