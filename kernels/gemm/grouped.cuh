// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM: out[r] = x[r] * w[e]^T for every row r of every expert e, BF16 in and out, FP32
// sums; SwiGLU and row weights on request. Persistent, one CTA an SM, any number of CTAs.
#pragma once

#include "gemm/tile.cuh"

namespace mokbench {

constexpr u32 kSchedulerThread = 32;  // a warp of its own

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

// tile_ends[e]: tiles of experts 0 to e. All threads.
template <GemmConfig c>
__device__ __forceinline__ void count_tiles(const GemmArgs& a, u32* tile_ends) {
  u32* warp_sums = tile_ends + kMaxGemmExperts;
  const u32 warp = threadIdx.x / 32;
  const u32 lane = threadIdx.x % 32;
  const u32 col_blocks = ceil_div(a.n, kTileCols);
  u32 before = 0;
  for (u32 first = 0; first < a.num_experts; first += kGemmThreads) {
    const u32 expert = first + threadIdx.x;
    u32 sum = 0;
    if (expert < a.num_experts) {
      const i32 begin = expert > 0 ? a.row_ends[expert - 1] : 0;
      sum = row_tiles(c, a.row_ends[expert] - begin) * col_blocks;
    }
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
      const u32 other = __shfl_up_sync(0xffffffff, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    for (u32 i = 0; i < warp; ++i) sum += warp_sums[i];
    if (expert < a.num_experts) tile_ends[expert] = before + sum;
    for (u32 i = 0; i < kGemmThreads / 32; ++i) before += warp_sums[i];
    __syncthreads();
  }
}

// The thread that takes tiles and tells the others. It takes one when all have begun the one
// before: early enough that no one waits for its divisions, and not earlier, so that those who are
// done first take the rest. `index` is the first that this CTA took; a CTA that does not run takes
// none.
template <GemmConfig c>
__device__ __forceinline__ void schedule_tiles(GemmShared<c> shared, GemmWork* work_slots,
                                               const GemmArgs& a, const u32* tile_ends, u32 index) {
  static_assert(kWorkSlots == 1, "the slot is free at first");
  static constexpr GemmConfig kConfig = c;
  TileWalk walk(kConfig, tile_ends, a.row_ends, a.num_experts, a.n, a.k / kBlockK, gridDim.x);
  RingPlace<kWorkSlots> place;
  while (true) {
    GemmWork work{};
    while (index < walk.queue.items && (work = walk.at(index)).units == 0) {
      index = atomicAdd(a.next, 1);
    }
    work_slots[place.slot] = work;
    ptx::mbarrier_arrive(shared.work_full(place.slot));
    place.advance();
    if (work.units == 0) break;
    ptx::mbarrier_wait(shared.work_empty(place.slot), place.parity ^ 1);
    index = atomicAdd(a.next, 1);
  }
  // Every CTA has taken its last index by now, so the last one may start the count again.
  if (atomicAdd(a.next + 1, 1) == gridDim.x - 1) a.next[0] = a.next[1] = 0;
}

// The thread that keeps the ring full.
template <GemmConfig c>
struct GemmLoader {
  GemmShared<c> shared;
  const GemmWork* work_slots;
  const ptx::TensorMap& w;       // boxes of kTileCols rows
  const ptx::TensorMap& x;       // boxes of tile_rows rows
  const ptx::TensorMap& x_part;  // boxes of part_rows rows
  const ptx::TensorMap& x_unit;  // boxes of kRowUnit rows
  u32 n;
  RingPlace<c.stages> place;
  RingPlace<kWorkSlots> work_place;

  __device__ __forceinline__ void run() {
    while (true) {
      ptx::mbarrier_wait(shared.work_full(work_place.slot), work_place.parity);
      const GemmWork work = work_slots[work_place.slot];
      ptx::mbarrier_arrive(shared.work_empty(work_place.slot));
      work_place.advance();
      if (work.units == 0) return;
      load(work);
    }
  }

  // All k-blocks of a tile. Rows and columns beyond the tensors' ends arrive as zeros, those of the
  // next expert as they are: neither is stored.
  __device__ __forceinline__ void load(const GemmWork& work) {
    const u32 weight_row = work.expert * n + work.column;
    for (u32 block = 0; block < work.num_blocks; ++block) {
      const u32 from = (work.first_block + block) * kBlockK;
      ptx::mbarrier_wait(shared.empty(place.slot), place.parity ^ 1);
      const u32 full = shared.full(place.slot);
      ptx::mbarrier_arrive_expect_tx(full, kWeightBytes + work.units * kRowUnit * kLineBytes);
      ptx::cp_async_bulk_tensor_load(shared.weights(place.slot), w, full, from, weight_row);
      load_rows(work, full, from);
      place.advance();
    }
  }

  // By the largest boxes that fit.
  __device__ __forceinline__ void load_rows(const GemmWork& work, u32 full, u32 from) {
    const u32 to = shared.rows(place.slot);
    const u32 num_rows = work.units * kRowUnit;
    if (num_rows == c.tile_rows) {
      ptx::cp_async_bulk_tensor_load(to, x, full, from, work.row);
      return;
    }
    u32 row = 0;
    for (; row + part_rows(c) <= num_rows; row += part_rows(c)) {
      ptx::cp_async_bulk_tensor_load(to + row * kLineBytes, x_part, full, from, work.row + row);
    }
    for (; row < num_rows; row += kRowUnit) {
      ptx::cp_async_bulk_tensor_load(to + row * kLineBytes, x_unit, full, from, work.row + row);
    }
  }
};

template <GemmConfig c>
__global__ void __launch_bounds__(kGemmThreads, 1)
    grouped_gemm(const __grid_constant__ ptx::TensorMap w, const __grid_constant__ ptx::TensorMap x,
                 const __grid_constant__ ptx::TensorMap x_part,
                 const __grid_constant__ ptx::TensorMap x_unit,
                 const __grid_constant__ ptx::TensorMap out, const __grid_constant__ GemmArgs a) {
  using Shared = GemmShared<c>;
  extern __shared__ __align__(1024) char memory[];
  const Shared shared{ptx::cvta_to_shared(memory)};
  GemmWork* work_slots = reinterpret_cast<GemmWork*>(memory + Shared::kLayout.work);
  u32* tile_ends = reinterpret_cast<u32*>(memory + Shared::kLayout.tile_ends);
  if (threadIdx.x == 0) {
    shared.init_barriers();
    for (const ptx::TensorMap* map : {&w, &x, &x_part, &x_unit, &out})
      ptx::prefetch_tensormap(*map);
  }
  u32 first = 0;
  if (threadIdx.x == kSchedulerThread) first = atomicAdd(a.next, 1);
  count_tiles<c>(a, tile_ends);
  __syncthreads();
  const u32 group = threadIdx.x / kGroupThreads;
  if (group == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      GemmLoader<c>{shared, work_slots, w, x, x_part, x_unit, a.n, {}, {}}.run();
    } else if (threadIdx.x == kSchedulerThread) {
      schedule_tiles<c>(shared, work_slots, a, tile_ends, first);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const u32 columns = c.swiglu ? a.n / 2 : a.n;
    const GemmOutput output{out, a.out, a.row_weights, columns, a.parts, a.parts_there};
    GemmConsumer<c>(shared, work_slots, output, group - 1, a.k / kBlockK).run();
  }
}

}  // namespace mokbench
