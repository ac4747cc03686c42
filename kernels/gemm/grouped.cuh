// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM: out[r] = x[r] * w[e]^T for every row r of every expert e, BF16 in and out, FP32
// sums; SwiGLU and row weights on request. Persistent, one CTA an SM, any number of CTAs.
#pragma once

#include "gemm/output.cuh"

namespace mokbench {

// 1 and 2 are the consumers', a warpgroup each.
constexpr u32 kStartBarrier = 3;
constexpr u32 kCountBarrier = 4;

// Mirrored by GemmArgs of mokbench/grouped_gemm.py.
struct GemmArgs {
  const i32* row_ends;       // [experts]: the row behind the expert's last
  const float* row_weights;  // [rows] or null
  char* out;                 // [rows, columns of a row]
  u32* next;                 // [2]: tiles taken, CTAs done; zero before
  float* parts;              // with split_k: TileQueue::kPartsACta * CTAs times kPartBytes
  u32* parts_there;          // and twice as many words; zero before
  u32 num_experts;
  u32 n;  // weight rows of an expert, a multiple of 64
  u32 k;  // a multiple of 64
};

// Mirrored by gemm_maps of mokbench/grouped_gemm.py. A k-block is loaded by as few boxes as can be:
// each costs the copy engine time of its own.
template <GemmConfig c>
struct GemmMaps {
  ptx::TensorMap out;                           // boxes as GemmOutput wants them
  ptx::TensorMap weights[2];                    // boxes of kHalfCols and 2 * kHalfCols rows
  ptx::TensorMap rows[c.tile_rows / kRowUnit];  // boxes of 1, 2, ... units
};

// tile_ends[e]: tiles of experts 0 to e. By the consumers.
template <GemmConfig c>
__device__ __forceinline__ void count_tiles(const GemmArgs& a, u32* tile_ends) {
  u32* warp_sums = tile_ends + kMaxGemmExperts;
  constexpr u32 kThreads = kConsumers * kGroupThreads;
  const u32 thread = threadIdx.x - kGroupThreads;
  const u32 warp = thread / 32;
  const u32 lane = thread % 32;
  u32 before = 0;
  for (u32 first = 0; first < a.num_experts; first += kThreads) {
    const u32 expert = first + thread;
    u32 sum = 0;
    if (expert < a.num_experts) {
      const i32 begin = expert > 0 ? a.row_ends[expert - 1] : 0;
      sum = expert_tiles(c, a.row_ends[expert] - begin, a.n);
    }
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
      const u32 other = __shfl_up_sync(0xffffffff, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    ptx::bar_sync(kCountBarrier, kThreads);
    for (u32 i = 0; i < warp; ++i) sum += warp_sums[i];
    if (expert < a.num_experts) tile_ends[expert] = before + sum;
    for (u32 i = 0; i < kThreads / 32; ++i) before += warp_sums[i];
    ptx::bar_sync(kCountBarrier, kThreads);
  }
}

// The thread that takes tiles and tells the others. It takes one when all have begun the one
// before: early enough that no one waits for its divisions, and not earlier, so that those who are
// done first take the rest. Where there is a tile for each CTA, the first ones are dealt out.
template <GemmConfig c>
__device__ __forceinline__ void schedule_tiles(GemmShared<c> shared, GemmWork* work_slot,
                                               const GemmArgs& a, const u32* tile_ends) {
  static_assert(kWorkSlots == 1, "the slot is free at first");
  static constexpr GemmConfig kConfig = c;
  TileWalk walk(kConfig, tile_ends, a.row_ends, a.num_experts, a.n, a.k / kBlockK);
  const u32 dealt = walk.queue.items >= gridDim.x ? gridDim.x : 0;
  u32 index = dealt > 0 ? blockIdx.x : atomicAdd(a.next, 1);
  bool is_planned = false;
  u32 parity = 0;
  while (true) {
    // The plan of the last tiles takes a while, and the dealt ones stay whole.
    if (index >= dealt && !is_planned) {
      walk.queue.cut_last(kConfig, gridDim.x, a.k / kBlockK);
      is_planned = true;
    }
    GemmWork work{};
    while (index < walk.queue.items && (work = walk.at(index)).units == 0) {
      index = dealt + atomicAdd(a.next, 1);
    }
    *work_slot = work;
    ptx::mbarrier_arrive(shared.work_full(0));
    if (work.units == 0) break;
    ptx::mbarrier_wait(shared.work_empty(0), parity);
    parity ^= 1;
    index = dealt + atomicAdd(a.next, 1);
  }
  // Every CTA has taken its last index by now, so the last one may start the count again.
  if (atomicAdd(a.next + 1, 1) == gridDim.x - 1) a.next[0] = a.next[1] = 0;
}

// The thread that keeps the ring full.
template <GemmConfig c>
struct GemmLoader {
  static constexpr u32 kMaxUnits = c.tile_rows / kRowUnit;

  GemmShared<c> shared;
  const GemmWork* work_slots;
  const GemmMaps<c>& maps;
  u32 n;
  RingPlace<c.stages> place;
  RingPlace<kWorkSlots> work_place;

  __device__ __forceinline__ void run() {
    while (true) {
      ptx::mbarrier_wait(shared.work_full(work_place.slot), work_place.parity);
      const GemmWork work = work_slots[work_place.slot];
      if (work.units == 0) return;
      load(work, shared.work_empty(work_place.slot));
      work_place.advance();
    }
  }

  // All k-blocks of a tile. Rows and columns beyond the tensors' ends arrive as zeros, those of the
  // next expert as they are: neither is stored.
  __device__ __forceinline__ void load(const GemmWork& work, u32 work_empty) {
    const u32 weight_row = work.expert * n + work.column;
    const u32 take_at = max(work.num_blocks, kTakeAhead) - kTakeAhead;
    for (u32 block = 0; block < work.num_blocks; ++block) {
      if (block == take_at) ptx::mbarrier_arrive(work_empty);
      const u32 from = (work.first_block + block) * kBlockK;
      ptx::mbarrier_wait(shared.empty(place.slot), place.parity ^ 1);
      const u32 full = shared.full(place.slot);
      const u32 weight_bytes = (2 - work.narrow) * kHalfBytes;
      ptx::mbarrier_arrive_expect_tx(full, weight_bytes + work.units * kRowUnit * kLineBytes);
      ptx::cp_async_bulk_tensor_load(shared.weights(place.slot), maps.weights[1 - work.narrow],
                                     full, from, weight_row);
      const u32 rows_at = shared.rows(place.slot, work.narrow);
      const u32 first = min_of(work.units, kMaxUnits);
      ptx::cp_async_bulk_tensor_load(rows_at, maps.rows[first - 1], full, from, work.row);
      if (work.units > first) {
        ptx::cp_async_bulk_tensor_load(rows_at + c.tile_rows * kLineBytes,
                                       maps.rows[work.units - first - 1], full, from,
                                       work.row + c.tile_rows);
      }
      place.advance();
    }
  }
};

template <GemmConfig c>
__global__ void __launch_bounds__(kGemmThreads, 1)
    grouped_gemm(const __grid_constant__ GemmMaps<c> maps, const __grid_constant__ GemmArgs a) {
  using Shared = GemmShared<c>;
  extern __shared__ __align__(1024) char memory[];
  const Shared shared{ptx::cvta_to_shared(memory)};
  GemmWork* work_slots = reinterpret_cast<GemmWork*>(memory + Shared::kLayout.work);
  u32* tile_ends = reinterpret_cast<u32*>(memory + Shared::kLayout.tile_ends);
  // From a lane's register, so that the compiler knows a warp to be of one role.
  const u32 group = __shfl_sync(~0u, threadIdx.x / kGroupThreads, 0);
  const u32 warp = threadIdx.x / 32;
  const GemmOutput<c> output{maps.out,      a.out,   a.row_weights, a.n,
                             a.k / kBlockK, a.parts, a.parts_there};
  // Each role waits for the others in its own code, so that the code is there by then.
  if (group == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) shared.init_barriers();
    __syncwarp();
    if (warp == kLoaderWarp) {
      ptx::barrier_sync(kStartBarrier, kGemmThreads);
      if (threadIdx.x % 32 == 0) GemmLoader<c>{shared, work_slots, maps, a.n, {}, {}}.run();
    } else if (warp == kSchedulerWarp) {
      ptx::barrier_sync(kStartBarrier, kGemmThreads);
      if (threadIdx.x % 32 == 0) schedule_tiles<c>(shared, work_slots, a, tile_ends);
    } else {
      ptx::barrier_sync(kStartBarrier, kGemmThreads);
      GemmStorer<c, GemmOutput<c>>(shared, work_slots, output, warp - kStorerWarp).run();
    }
  } else {
    constexpr u32 kMaps = sizeof(maps) / sizeof(ptx::TensorMap);
    const u32 map = threadIdx.x - kGroupThreads;
    if (map < kMaps) ptx::prefetch_tensormap(reinterpret_cast<const ptx::TensorMap*>(&maps)[map]);
    count_tiles<c>(a, tile_ends);
    ptx::barrier_sync(kStartBarrier, kGemmThreads);
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    GemmConsumer<c, GemmOutput<c>>(shared, work_slots, output, group - 1).run();
  }
}

}  // namespace mokbench
