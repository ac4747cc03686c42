// SPDX-License-Identifier: Apache-2.0
// What the roles of a MoK pass share: arguments, shared memory, one thread's view of the pass. The
// epoch lives in device memory, so a captured graph replays. host/mok_rank.cpp is the twin,
// docs/mok.md the pipeline.
#pragma once

#include "gemm/tile.cuh"
#include "mok/plan.h"
#include "push/pass.cuh"

namespace mokbench {

constexpr u32 kMokThreads = kGemmThreads + kGroupThreads;  // the last warpgroup pulls
// 128 * (2 * 48 + 2 * 208) are all of the SM's 65536.
constexpr u32 kMokProducerRegisters = 56;
constexpr u32 kMokConsumerRegisters = 200;
constexpr u32 kMokWarps = kMokThreads / 32;
constexpr u32 kMokBarriers = 2;  // of the grid, in a pass

// Mirrored by MokArgs of mokbench/systems/cuda_mok_workspace.py.
struct MokArgs {
  char* segments[kMaxRanks];
  u32 rank;
  u32 num_tokens;
  u64 wait_bound_ns;
  const char* x;              // [T, hidden]; null: as the pass before left them in the segment
  const i32* topk_idx;        // [T, K], -1 is masked
  const float* topk_weights;  // [T, K]
  char* y;                    // [T, hidden]
  // Scratch of this rank, zeroed before the first pass.
  u32* epoch;      // passes that are over
  u32* staged;     // CTAs that have staged their share, monotonic
  u32* barrier;    // arrivals at grid barriers, monotonic
  u32* next_item;  // of this pass; zero before
  u32* finished;   // consumer warpgroups of this pass without an item; zero before
  MokRings* rings;
  u32* num_groups;
  u32* chunk_rows;    // [grid][local experts]
  u32* table;         // [capacity] packed routes, sorted by expert
  u32* tile_ends;     // [groups]
  MokGroup* groups;   // [groups]
  char* x_ring;       // [ring_tiles * tile_rows, hidden]
  char* hidden_ring;  // [hidden_ring_tiles * tile_rows, intermediate]
  u64* stamps;        // [grid][kNumStamps] of MokStamp; null without
};

// Mirrored by mok_maps of mokbench/systems/cuda_mok_workspace.py.
template <MokConfig c>
struct MokMaps {
  struct Operands {
    ptx::TensorMap weights[2];                          // boxes of kHalfCols, 2 * kHalfCols rows
    ptx::TensorMap rows[c.tiles.tile_rows / kRowUnit];  // boxes of 1, 2, ... units
  };
  ptx::TensorMap hidden_out;  // boxes of chunk_rows rows and a warpgroup's columns
  Operands gemms[2];
};

// Words by which the roles of a CTA tell each other what only saves them a wait.
enum MokHint : u32 {
  kResolved,  // the CTA's last item that waits for no other CTA any more
  kReady,     // the last item that the scheduler saw to wait for nothing
  kFaulted,   // a wait of this CTA's loader was given up
  kIsSure,    // two words of each consumer warpgroup: its next item waits for no other CTA
  kNumHints = kIsSure + 2 * kConsumers,
};

// Groups whose tile ends fit there; those of more stay in global memory.
constexpr u32 kTileEndsHere = 480;

// Behind the pipeline's barriers in shared memory.
struct MokShared {
  MokWork work;
  u32 hints[kNumHints];
  u32 abandoned;  // a wait for a returned row was
  u32 is_last;    // this CTA is the last to have staged its share
  u32 epoch;
  u32 num_groups;
  MokRings rings;
  u32 tile_ends[kTileEndsHere];
};

// One thread's view of the rank.
template <MokConfig c>
struct MokView {
  static constexpr Config kLayer = c.layer;
  static constexpr MokLayout kLayout = mok_layout(c.layer);
  static constexpr u32 kLocalExperts = local_experts(c.layer);
  static constexpr u64 kRowBytes = row_bytes(c.layer);
  // Each consumer warpgroup raises a counter for its part of a column block.
  static constexpr u32 kGemm1Parts = kConsumers * mok_blocks(2 * c.layer.intermediate);
  static constexpr u32 kGemm2Parts = kConsumers * mok_blocks(c.layer.hidden);
  static_assert(c.layer.element_bytes == 2 && c.layer.block_m == c.tiles.tile_rows);
  static_assert(c.layer.hidden % kBlockK == 0 && c.layer.intermediate % kBlockK == 0);
  static_assert(c.layer.hidden >= 2 * kBlockK && c.layer.intermediate >= 2 * kBlockK);
  static_assert(c.layer.top_k <= kMaxTopK && c.layer.num_ranks <= kMaxRanks);
  static_assert(u64{c.layer.max_tokens} * c.layer.top_k <= 1u << kRouteBits);
  static_assert(c.layer.ring_tiles < 1u << 15 && c.layer.hidden_ring_tiles < 1u << 16);
  static_assert(!c.tiles.split_k && !c.tiles.row_weights);

  const MokArgs& a;

  // By one thread of the CTA for each of them.
  __device__ __forceinline__ u64* stamp_at(MokStamp which) const {
    return a.stamps + ptx::anew(ptx::anew(blockIdx.x) * kNumStamps + which);
  }
  __device__ __forceinline__ void stamp(MokStamp which, bool only_first = false) const {
    if constexpr (c.stamps) {
      u64* at = stamp_at(which);
      if (!only_first || *at == 0) *at = ptx::globaltimer_ns();
    }
  }
  // Low halves: a wait takes no more than seconds.
  __device__ __forceinline__ u32 stamp_now() const {
    if constexpr (c.stamps) return static_cast<u32>(ptx::globaltimer_ns());
    return 0;
  }
  __device__ __forceinline__ void stamp_waited(u32 since) const {
    if constexpr (c.stamps) *stamp_at(kWaited) += stamp_now() - since;
  }

  // The n-th rank to turn to: the next one first, to spread over the links.
  __device__ __forceinline__ u32 nth_peer(u32 n) const {
    return (a.rank + 1 + n) % c.layer.num_ranks;
  }
  __device__ __forceinline__ char* at(u32 of_rank, Field field, u64 offset) const {
    return a.segments[of_rank] + field.offset + offset;
  }
  __device__ __forceinline__ u32* counter(Field field, u32 index) const {
    return reinterpret_cast<u32*>(at(ptx::anew(a.rank), field, index * kCounterBytes));
  }
  // Whether a wait of this rank, in this pass or before, was given up.
  __device__ __forceinline__ bool faulted() const {
    const Header* header = reinterpret_cast<const Header*>(a.segments[ptx::anew(a.rank)]);
    return ptx::ld_acquire_sys(&header->fault.state) != static_cast<u32>(FaultState::kNone);
  }
  __device__ __forceinline__ MokOrder order() const {
    return mok_order(c.tiles.tile_rows, c.tiles.group_tiles, c.layer.hidden, c.layer.intermediate,
                     gridDim.x);
  }
  __device__ __forceinline__ MokWalk walk(const MokOrder& order, const MokShared* own) const {
    const u32* tile_ends = own->num_groups <= kTileEndsHere ? own->tile_ends : a.tile_ends;
    return {order, tile_ends, own->num_groups};
  }
  // Whether an item waits for no other CTA. On true, all that it needs is visible here.
  __device__ __forceinline__ bool is_ready(const MokWork& work) const {
    const u32 hidden_slot = work.tag.hidden_slot();
    const auto has = [&](Field field, u32 slot, u32 least) {
      return reached(ptx::ld_acquire_gpu(counter(field, slot)), least);
    };
    if (work.tag.gemm() != 0) {
      return has(kLayout.hidden_ready, hidden_slot, (work.hidden_lap + 1) * kGemm1Parts);
    }
    return has(kLayout.ring_ready, work.tag.x_slot(), (work.x_lap + 1) * c.tiles.tile_rows) &&
           has(kLayout.hidden_free, hidden_slot, work.hidden_lap * kGemm2Parts);
  }
};

// And of the pass.
template <MokConfig c>
struct MokPass : MokView<c> {
  using View = MokView<c>;
  using View::a;
  u32 epoch;

  __device__ __forceinline__ MokPass(const MokArgs& args, u32 epoch) : View{args}, epoch(epoch) {}

  // The protocol's steps for one thread, made where they are taken: see PushPass.
  template <class Take>
  __device__ __forceinline__ auto steps(Role role, Take take) const {
    DeviceMemory memory;
    Agent<DeviceMemory> agent{memory, a.segments, c.layer.num_ranks, ptx::anew(a.rank),
                              role,   epoch,      a.wait_bound_ns};
    return take(MokSteps<DeviceMemory>{agent, View::kLayout, 0, c.tiles.tile_rows,
                                       View::kGemm1Parts, View::kGemm2Parts});
  }
  // What `source` gathered at `of_rank` in this pass.
  __device__ __forceinline__ u32* tokens_at(u32 of_rank, u32 source) const {
    const u64 slot = u64{epoch % 2} * c.layer.num_ranks + source;
    return reinterpret_cast<u32*>(
        View::at(of_rank, View::kLayout.gathered_tokens, slot * sizeof(u32)));
  }
  __device__ __forceinline__ u32* ids_at(u32 of_rank, u32 source) const {
    const u64 slot = u64{epoch % 2} * c.layer.num_ranks + source;
    constexpr u64 kIds = u64{c.layer.max_tokens} * c.layer.top_k;
    return reinterpret_cast<u32*>(
        View::at(of_rank, View::kLayout.gathered_idx, slot * kIds * sizeof(i32)));
  }

  // Every CTA of a cooperative launch has arrived; `nth` counts the pass's barriers from 1. The
  // grid must be the same in every pass.
  __device__ __forceinline__ bool grid_barrier(u32 nth) const {
    bool good = true;
    __syncthreads();
    if (threadIdx.x == 0) {
      const u32 expected = ((epoch - 1) * kMokBarriers + nth) * gridDim.x;
      good = steps(Role::kCaller, [&](auto&& step) {
        step.agent.memory.template fetch_add_release<Scope::kLocal>(a.barrier, 1);
        return wait_until<Scope::kLocal>(step.agent, a.barrier, expected,
                                         WaitSite{Site::kSchedule, nth, a.rank});
      });
    }
    return __syncthreads_and(good);
  }
};

}  // namespace mokbench
