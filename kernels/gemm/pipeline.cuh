// SPDX-License-Identifier: Apache-2.0
// What the roles of a BF16 GEMM's CTA share on sm_90: who they are, and the ring of k-blocks in
// shared memory that one thread fills by bulk copies.
#pragma once

#include "gemm/plan.h"
#include "ptx.cuh"

namespace mokbench {

// A warpgroup of producers and storers, and two of consumers.
constexpr u32 kGemmThreads = 384;
constexpr u32 kLoaderWarp = 0;
constexpr u32 kSchedulerWarp = 1;
constexpr u32 kStorerWarp = 2;  // of the first consumer warpgroup; the next one is the second's
constexpr u32 kConsumers = 2;
constexpr u32 kGroupThreads = 128;
constexpr u32 kBlockK = 64;  // a row of 128 bytes, the swizzle's width
constexpr u32 kGroupCols = kHalfCols / kConsumers;
// Registers of a thread: 128 * (56 + 2 * 224) of the SM's 65536.
constexpr u32 kProducerRegisters = 56;
constexpr u32 kConsumerRegisters = 224;

// In which a warpgroup stages what its storer sends.
constexpr u32 kChunkBuffers = kStagingBuffers / kConsumers;

// A CTA takes its next tile when this many k-blocks of the one before are not yet asked for: late,
// because tiles that share operands are taken one after the other, and only if they also begin so
// does the L2 still have what they share.
constexpr u32 kTakeAhead = 6;

// Addresses in dynamic shared memory.
template <GemmConfig c>
struct GemmShared {
  static constexpr GemmLayout kLayout = gemm_layout(c);
  static_assert(c.tile_rows == 32 || c.tile_rows == 64 || c.tile_rows == 128 ||
                (c.tile_rows == 144 && !c.split_k));
  static_assert(kLayout.bytes <= 232448, "more shared memory than an SM of sm_90 gives a CTA");

  u32 base;

  __device__ __forceinline__ u32 weights(u32 slot) const {
    return base + slot * kLayout.stage_bytes;
  }
  __device__ __forceinline__ u32 rows(u32 slot, bool narrow) const {
    return weights(slot) + (narrow ? 1 : 2) * kHalfBytes;
  }
  __device__ __forceinline__ u32 full(u32 slot) const { return base + kLayout.barriers + 8 * slot; }
  __device__ __forceinline__ u32 empty(u32 slot) const { return full(c.stages + slot); }
  __device__ __forceinline__ u32 work_full(u32 slot) const { return full(2 * c.stages + slot); }
  __device__ __forceinline__ u32 work_empty(u32 slot) const { return work_full(kWorkSlots + slot); }

  // A warpgroup's buffer of a chunk, that it is filled, and that it is sent.
  __device__ __forceinline__ u32 staging(u32 group, u32 buffer) const {
    return base + kLayout.staging + (group * kChunkBuffers + buffer) * chunk_bytes(c);
  }
  __device__ __forceinline__ u32 staged(u32 group, u32 buffer) const {
    return work_empty(kWorkSlots + group * kChunkBuffers + buffer);
  }
  __device__ __forceinline__ u32 sent(u32 group, u32 buffer) const {
    return staged(kConsumers + group, buffer);
  }

  // One thread; the others wait at a barrier behind it.
  __device__ __forceinline__ void init_barriers() const {
    constexpr u32 kConsumerWarps = kConsumers * kGroupThreads / 32;
    constexpr u32 kLoaders = 1;
    constexpr u32 kStorers = kConsumers * 32;
#pragma unroll 1
    for (u32 slot = 0; slot < c.stages; ++slot) {
      ptx::mbarrier_init(full(slot), 1);
      ptx::mbarrier_init(empty(slot), kConsumerWarps);
    }
    for (u32 slot = 0; slot < kWorkSlots; ++slot) {
      ptx::mbarrier_init(work_full(slot), 1);
      ptx::mbarrier_init(work_empty(slot), kConsumerWarps + kLoaders + kStorers);
    }
    for (u32 i = 0; i < kStagingBuffers; ++i) {
      ptx::mbarrier_init(staged(0, i), kGroupThreads / 32);
      ptx::mbarrier_init(sent(0, i), 1);
    }
    ptx::fence_mbarrier_init();
  }
};

// A place in a ring of mbarriers: slot, and the parity of its current lap.
template <u32 kSlots>
struct RingPlace {
  u32 slot = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace mokbench
