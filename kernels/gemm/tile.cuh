// SPDX-License-Identifier: Apache-2.0
// The tile pipeline of the BF16 GEMMs on sm_90: a ring of k-blocks in shared memory that one thread
// fills by bulk copies, and two warpgroups that multiply out of it.
//
// The weights are wgmma's M side, the rows of the input its N side: 64 output columns a warpgroup,
// and any multiple of 16 rows, so that an expert's last rows cost what they are.
#pragma once

#include "gemm/plan.h"
#include "ptx.cuh"
#include "ptx_wgmma.cuh"

namespace mokbench {

constexpr u32 kGemmThreads = 384;  // a producer and two consumer warpgroups
constexpr u32 kConsumers = 2;
constexpr u32 kGroupThreads = 128;
constexpr u32 kBlockK = 64;  // a row of 128 bytes, the swizzle's width
constexpr u32 kGroupCols = kTileCols / kConsumers;
// Registers of a thread: 128 * (40 + 2 * 232) of the SM's 65536.
constexpr u32 kProducerRegisters = 40;
constexpr u32 kConsumerRegisters = 232;

// What one store takes: rows of a warpgroup's columns, in one of two buffers.
constexpr u32 kMaxChunkRows = 64;
constexpr u32 kChunkBytes = kMaxChunkRows * kGroupCols * 2;
constexpr u32 kChunkBuffers = 2;

// Of a tile with more rows these are multiplied apart from the others where its sums must be read
// while others are made. (Everywhere, since ptxas cannot share registers between wgmmas of
// different sizes; fewer rows at once would read the weights too often.)
constexpr u32 low_rows(const GemmConfig& c) { return min_of(c.tile_rows, 128); }
constexpr u32 chunk_rows(const GemmConfig& c) { return min_of(kMaxChunkRows, low_rows(c)); }

// Addresses in dynamic shared memory.
template <GemmConfig c>
struct GemmShared {
  static constexpr GemmLayout kLayout = gemm_layout(c);
  static_assert(c.tile_rows == 32 || c.tile_rows == 64 || c.tile_rows == 128 || c.tile_rows == 256);
  static_assert(kConsumers * kChunkBuffers * kChunkBytes == kStagingBytes);
  static_assert(kLayout.bytes <= 232448, "more shared memory than an SM of sm_90 gives a CTA");

  u32 base;

  __device__ __forceinline__ u32 weights(u32 slot) const {
    return base + slot * kLayout.stage_bytes;
  }
  __device__ __forceinline__ u32 rows(u32 slot) const { return weights(slot) + kWeightBytes; }
  __device__ __forceinline__ u32 full(u32 slot) const { return base + kLayout.barriers + 8 * slot; }
  __device__ __forceinline__ u32 empty(u32 slot) const { return full(c.stages + slot); }
  __device__ __forceinline__ u32 work_full(u32 slot) const { return full(2 * c.stages + slot); }
  __device__ __forceinline__ u32 work_empty(u32 slot) const { return work_full(kWorkSlots + slot); }

  // One thread; the others wait at a __syncthreads behind it.
  __device__ __forceinline__ void init_barriers() const {
    constexpr u32 kConsumerWarps = kConsumers * kGroupThreads / 32;
    constexpr u32 kLoaders = 1;
    for (u32 slot = 0; slot < c.stages; ++slot) {
      ptx::mbarrier_init(full(slot), 1);
      ptx::mbarrier_init(empty(slot), kConsumerWarps);
    }
    for (u32 slot = 0; slot < kWorkSlots; ++slot) {
      ptx::mbarrier_init(work_full(slot), 1);
      ptx::mbarrier_init(work_empty(slot), kConsumerWarps + kLoaders);
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

// silu(gate) * up of two rows with one reciprocal: the clamp keeps the product of both
// denominators finite, and changes silu below -40 only, where it is less than 1e-16. (One
// reciprocal for four rows saves an eighth of the slow instructions, and spills.)
__device__ __forceinline__ u32 swiglu_bf16x2(float gate0, float gate1, float up0, float up1) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  const float a = 1.f + ptx::ex2_approx(fminf(gate0 * kMinusLog2E, 60.f));
  const float b = 1.f + ptx::ex2_approx(fminf(gate1 * kMinusLog2E, 60.f));
  const float r = ptx::rcp_approx(a * b);
  return ptx::cvt_rn_bf16x2(gate0 * up0 * (b * r), gate1 * up1 * (a * r));
}

// Where a launch's output goes.
struct GemmOutput {
  const ptx::TensorMap& map;  // boxes of chunk_rows rows and a warpgroup's columns
  char* rows;
  const float* row_weights;
  u32 columns;       // a row, after SwiGLU
  float* parts;      // of tiles whose k-blocks are shared out: sums, kPartBytes each
  u32* parts_there;  // [parts][2 warpgroups], 0 when none
};

// One consumer warpgroup. A tile's sums are made in two halves of its rows. While the tensor cores
// finish the high half, the low one is rounded and stored; while they begin the next tile's low
// half, the high one is rounded, and leaves during that tile's next k-blocks.
template <GemmConfig c>
struct GemmConsumer {
  static constexpr u32 kMaxUnits = c.tile_rows / kRowUnit;
  static constexpr u32 kLowRows = low_rows(c);
  static constexpr u32 kHalfSums = kLowRows / 2;
  static constexpr u32 kPacked = c.swiglu ? kHalfSums / 4 : kHalfSums / 2;
  static constexpr u32 kChunkRows = chunk_rows(c);
  static constexpr u32 kHalfChunks = kLowRows / kChunkRows;
  static constexpr u32 kOutCols = c.swiglu ? kGroupCols / 2 : kGroupCols;

  const GemmShared<c> shared;
  const GemmWork* const work_slots;
  const GemmOutput& output;
  const u32 group;  // 0 or 1
  const u32 k_blocks;
  RingPlace<c.stages> place;
  RingPlace<kWorkSlots> work_place;
  GemmWork work;     // being multiplied
  GemmWork pending;  // done; its high half is in packed
  u32 previous;      // slot to be given back, c.stages if none
  u32 buffer = 0;    // of the next store
  u32 packed[kPacked];

  __device__ __forceinline__ GemmConsumer(GemmShared<c> shared, const GemmWork* work_slots,
                                          const GemmOutput& output, u32 group, u32 k_blocks)
      : shared(shared),
        work_slots(work_slots),
        output(output),
        group(group),
        k_blocks(k_blocks),
        work{},
        pending{},
        previous(c.stages) {}

  __device__ __forceinline__ void run() {
    next_work();
    while (work.units != 0) {
      if (is_part(work)) {
        run_part();
      } else {
        run_units<kMaxUnits>();
      }
    }
    store_high(0);
    if (threadIdx.x % kGroupThreads == 0) ptx::cp_async_bulk_wait_all();
  }

 private:
  __device__ __forceinline__ void next_work() {
    ptx::mbarrier_wait(shared.work_full(work_place.slot), work_place.parity);
    work = work_slots[work_place.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.work_empty(work_place.slot));
    work_place.advance();
  }

  static constexpr bool is_part(const GemmWork& work) { return c.split_k && work.k_parts > 1; }

  // Code for a tile of at most this size; short tiles of an odd size run as the next even one.
  static constexpr u32 run_size(u32 units) { return units > 8 ? units : ceil_div(units, 2) * 2; }

  template <u32 kUnits>
  __device__ __forceinline__ void run_units() {
    if (run_size(work.units) == kUnits) {
      run_tiles<kUnits>();
    } else if constexpr (kUnits > 2) {
      run_units<kUnits - (kUnits > 8 ? 1 : 2)>();
    }
  }

  // Tiles of one size, as long as they come. At least two k-blocks.
  template <u32 kUnits>
  __device__ __forceinline__ void run_tiles() {
    constexpr u32 kRows = kUnits * kRowUnit;
    constexpr u32 kLow = min_of(kRows, kLowRows);
    constexpr u32 kHigh = kRows - kLow;
    float sums[kRows / 2];
    begin_block();
    multiply<kLow, 0>(sums, false);
    if constexpr (kHigh > 0) multiply<kHigh, kLow>(sums, false);
    end_block();
    while (true) {
#pragma unroll 1
      for (u32 block = 1; block + 1 < k_blocks; ++block) {
        multiply_block<kLow, kHigh>(sums);
        store_high_chunk(block - 1);
        end_block();
      }
      multiply_block<kLow, kHigh>(sums);
      end_block();
      store_high(k_blocks - 2);
      pending = work;
      next_work();
      ptx::wgmma_wait_group<(kHigh > 0 ? 1 : 0)>();
      pack<0, kLow / 2>(sums);
      const bool goes_on = run_size(work.units) == kUnits && !is_part(work);
      // While a high half is still being multiplied this costs nothing.
      if (kHigh > 0 || !goes_on) store_chunk(0, 0);
      if (!goes_on) store_low_rest();
      ptx::wgmma_wait_group<0>();
      release_previous();
      previous = c.stages;
      if (!goes_on) break;
      begin_block();
      multiply<kLow, 0>(sums, false);
      if (kHigh == 0) store_chunk(0, 0);
      store_low_rest();
      if constexpr (kHigh > 0) {
        pack<kHalfSums, kHigh / 2>(sums);
        multiply<kHigh, kLow>(sums, false);
      }
      end_block();
    }
    if constexpr (kHigh > 0) pack<kHalfSums, kHigh / 2>(sums);
  }

  // Some k-blocks of a tile. Nothing is overlapped: there are a few at the end of a launch only.
  __device__ __forceinline__ void run_part() {
    constexpr u32 kHigh = c.tile_rows - kLowRows;
    float sums[c.tile_rows / 2];
    store_high(0);
    pending = {};
    begin_block();
    multiply<kLowRows, 0>(sums, false);
    if constexpr (kHigh > 0) multiply<kHigh, kLowRows>(sums, false);
    end_block();
#pragma unroll 1
    for (u32 block = 1; block < work.num_blocks; ++block) {
      multiply_block<kLowRows, kHigh>(sums);
      end_block();
    }
    ptx::wgmma_wait_group<0>();
    release_previous();
    previous = c.stages;
    ptx::pin_sums(sums, 0, c.tile_rows / 2);
    if (work.k_part > 0) {
      give_sums(sums);
      next_work();
      return;
    }
    take_sums(sums);
    pending = work;
    next_work();
    pack<0, kHalfSums>(sums);
    store_chunk(0, 0);
    store_low_rest();
    if constexpr (kHigh > 0) pack<kHalfSums, kHigh / 2>(sums);
  }

  template <u32 kSums>
  __device__ __forceinline__ float* part_at(u32 part) {
    return output.parts + u64{part * kConsumers + group} * (kSums * kGroupThreads) +
           ptx::tid_x() % kGroupThreads;
  }

  template <u32 kSums>
  __device__ __forceinline__ void give_sums(const float (&sums)[kSums]) {
    const u32 part = work.parts_at + work.k_part - 1;
    float* to = part_at<kSums>(part);
#pragma unroll
    for (u32 i = 0; i < kSums; ++i) to[i * kGroupThreads] = sums[i];
    ptx::fence_acq_rel_gpu();
    ptx::bar_sync(1 + group, kGroupThreads);
    if (ptx::tid_x() % kGroupThreads == 0) {
      ptx::st_release_gpu(output.parts_there + part * kConsumers + group, 1);
    }
  }

  // Adds them in order. Unbounded: whoever has them was taken before this part.
  template <u32 kSums>
  __device__ __forceinline__ void take_sums(float (&sums)[kSums]) {
#pragma unroll 1
    for (u32 part = work.parts_at; part < work.parts_at + work.k_parts - 1; ++part) {
      if (ptx::tid_x() % kGroupThreads == 0) {
        u32* there = output.parts_there + part * kConsumers + group;
        while (ptx::ld_acquire_gpu(there) == 0) ptx::nanosleep(100);
        ptx::st_relaxed_gpu(there, 0);  // for the next launch
      }
      ptx::bar_sync(1 + group, kGroupThreads);
      const float* from = part_at<kSums>(part);
#pragma unroll
      for (u32 i = 0; i < kSums; ++i) sums[i] += __ldcg(from + i * kGroupThreads);
    }
  }

  __device__ __forceinline__ void begin_block() {
    ptx::mbarrier_wait(shared.full(place.slot), place.parity);
  }
  __device__ __forceinline__ void end_block() {
    previous = place.slot;
    place.advance();
  }
  __device__ __forceinline__ void release_previous() {
    if (threadIdx.x % 32 == 0 && previous < c.stages) ptx::mbarrier_arrive(shared.empty(previous));
  }

  // The next k-block; gives back the one before, which is done when this one is queued.
  template <u32 kLow, u32 kHigh>
  __device__ __forceinline__ void multiply_block(float (&sums)[(kLow + kHigh) / 2]) {
    begin_block();
    multiply<kLow, 0>(sums, true);
    if constexpr (kHigh > 0) multiply<kHigh, kLow>(sums, true);
    ptx::wgmma_wait_group<(kHigh > 0 ? 2 : 1)>();
    release_previous();
  }

  // One group of wgmmas: kRows rows from kFirst on of the current k-block.
  template <u32 kRows, u32 kFirst, u32 kSums>
  __device__ __forceinline__ void multiply(float (&sums)[kSums], bool add) {
    const u64 a =
        ptx::matrix_descriptor(shared.weights(place.slot) + group * kGroupCols * kLineBytes);
    const u64 b = ptx::matrix_descriptor(shared.rows(place.slot) + kFirst * kLineBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < kBlockK / 16; ++k) {
      // 16 elements are 32 bytes, two of the descriptors' units.
      ptx::wgmma_m64k16<kRows, kFirst / 2>(sums, a + 2 * k, b + 2 * k, add || k > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Rounds kCount sums. Of eight rows a thread has two neighbouring ones at two columns, eight
  // apart: by SwiGLU's packing, gate and up of one column.
  template <u32 kFirst, u32 kCount, u32 kSums>
  __device__ __forceinline__ void pack(float (&sums)[kSums]) {
    ptx::pin_sums(sums, kFirst, kCount);
    if constexpr (c.row_weights) weigh<kFirst, kCount>(sums);
#pragma unroll
    for (u32 i = 0; i < kCount; i += 4) {
      const float* s = sums + kFirst + i;
      if constexpr (c.swiglu) {
        packed[i / 4] = swiglu_bf16x2(s[0], s[1], s[2], s[3]);
      } else {
        packed[i / 2] = ptx::cvt_rn_bf16x2(s[0], s[1]);
        packed[i / 2 + 1] = ptx::cvt_rn_bf16x2(s[2], s[3]);
      }
    }
  }

  // By SwiGLU the weight is the up column's: silu(gate) * (up * weight). A lane loads one row's
  // weight in 32 and the others get it from there: 32 rows are 16 sums.
  template <u32 kFirst, u32 kCount, u32 kSums>
  __device__ __forceinline__ void weigh(float (&sums)[kSums]) {
    const u32 lane = ptx::tid_x() % 32;
#pragma unroll
    for (u32 i = kFirst; i < kFirst + kCount; i += 16) {
      const u32 own_row = i * 2 + lane;
      const float own =
          own_row < pending.num_rows ? output.row_weights[pending.row + own_row] : 0.f;
#pragma unroll
      for (u32 j = 0; j < min_of(16, kFirst + kCount - i); j += 4) {
        const float first = __shfl_sync(0xffffffff, own, j * 2 + lane % 4 * 2);
        const float second = __shfl_sync(0xffffffff, own, j * 2 + lane % 4 * 2 + 1);
        if constexpr (!c.swiglu) {
          sums[i + j] *= first;
          sums[i + j + 1] *= second;
        }
        sums[i + j + 2] *= first;
        sums[i + j + 3] *= second;
      }
    }
  }

  __device__ __forceinline__ void store_low_rest() {
#pragma unroll
    for (u32 i = 1; i < kHalfChunks; ++i) store_chunk(i, i);
  }
  __device__ __forceinline__ void store_high_chunk(u32 nth) {
#pragma unroll
    for (u32 i = 0; i < kHalfChunks; ++i) {
      if (i == nth) store_chunk(kHalfChunks + i, i);
    }
  }
  __device__ __forceinline__ void store_high(u32 from) {
#pragma unroll
    for (u32 i = 0; i < kHalfChunks; ++i) {
      if (i >= from) store_chunk(kHalfChunks + i, i);
    }
  }

  // The pending tile's rows from kChunkRows * chunk on, by way of shared memory: whole chunks by a
  // bulk copy, the expert's last rows one by one, since another expert's follow.
  __device__ __forceinline__ void store_chunk(u32 chunk, u32 of_half) {
    const u32 column = (c.swiglu ? pending.column / 2 : pending.column) + group * kOutCols;
    if (chunk * kChunkRows >= pending.num_rows || column >= output.columns) return;
    const bool leads = threadIdx.x % kGroupThreads == 0;
    // Not by chunk: tiles with one chunk each must take turns with the buffers as well.
    const u32 staged = shared.base + GemmShared<c>::kLayout.staging +
                       (group * kChunkBuffers + buffer) * kChunkBytes;
    buffer ^= kChunkBuffers - 1;
    if (leads) ptx::cp_async_bulk_wait_group_read<kChunkBuffers - 1>();
    ptx::bar_sync(1 + group, kGroupThreads);
    stage_chunk(staged, of_half);
    ptx::fence_proxy_async();
    ptx::bar_sync(1 + group, kGroupThreads);
    const u32 row = pending.row + chunk * kChunkRows;
    const u32 num_rows = min_of(pending.num_rows - chunk * kChunkRows, kChunkRows);
    if (num_rows < kChunkRows) {
      copy_rows(staged, row, num_rows, column);
    } else if (leads) {
      ptx::cp_async_bulk_tensor_store(output.map, staged, column, row);
    }
    // Empty where rows were copied, so that waits count alike.
    if (leads) ptx::cp_async_bulk_commit_group();
  }

  // 16-byte pieces of a row, swizzled as the bulk copy expects it.
  static __device__ __forceinline__ u32 piece_at(u32 row, u32 piece) {
    if constexpr (c.swiglu) return row * 64 + ((piece ^ (row >> 1 & 3)) << 4);
    return row * 128 + ((piece ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void stage_chunk(u32 staged, u32 of_half) {
    const u32 warp = threadIdx.x / 32 % 4;
    const u32 lane = threadIdx.x % 32;
    // A warp's columns: 16, two pieces; after SwiGLU 8, one piece.
    constexpr u32 kRowsAtOnce = c.swiglu ? 32 : 16;
#pragma unroll
    for (u32 first = 0; first < kChunkRows; first += kRowsAtOnce) {
      const u32 row = first + (c.swiglu ? lane : lane / 16 * 8 + lane % 8);
      const u32 piece = c.swiglu ? warp : warp * 2 + lane / 8 % 2;
      const u32 at = (of_half * kChunkRows + first) / (c.swiglu ? 8 : 4);
      ptx::stmatrix_x4_trans(staged + piece_at(row, piece), packed[at], packed[at + 1],
                             packed[at + 2], packed[at + 3]);
    }
  }

  __device__ __forceinline__ void copy_rows(u32 staged, u32 row, u32 num_rows, u32 column) {
    constexpr u32 kPieces = kOutCols * 2 / 16;
    const u64 pitch = u64{output.columns} * 2;
    for (u32 i = threadIdx.x % kGroupThreads; i < num_rows * kPieces; i += kGroupThreads) {
      const ptx::Vec16 piece = ptx::ld_shared_v4(staged + piece_at(i / kPieces, i % kPieces));
      char* to = output.rows + (row + i / kPieces) * pitch + column * 2 + i % kPieces * 16;
      *reinterpret_cast<ptx::Vec16*>(to) = piece;
    }
  }
};

}  // namespace mokbench
