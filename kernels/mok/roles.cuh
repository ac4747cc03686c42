// SPDX-License-Identifier: Apache-2.0
// The roles of a MoK pass's CTAs: a thread that takes items, one that loads their operands, warps
// that pull rows, and where the consumers' output goes. docs/mok.md says why they do not deadlock.
#pragma once

#include "mok/pass.cuh"

namespace mokbench {

template <GemmConfig c>
__device__ __forceinline__ MokShared* mok_shared(char* memory) {
  constexpr GemmLayout kLayout = gemm_layout(c);
  static_assert(kLayout.work + sizeof(MokShared) <= kLayout.bytes);
  return reinterpret_cast<MokShared*>(memory + kLayout.work);
}

template <GemmConfig c>
struct MokHints {
  static constexpr u32 kAt = GemmShared<c>::kLayout.work + sizeof(MokWork);

  GemmShared<c> shared;

  __device__ __forceinline__ u32 at(u32 hint) const { return shared.base + kAt + 4 * hint; }

  // Between single threads that no barrier orders.
  __device__ __forceinline__ u32 get(MokHint hint) const {
    return ptx::atom_or_acquire_cta_shared(at(hint), 0);
  }
  __device__ __forceinline__ void set(MokHint hint, u32 value) const {
    ptx::atom_exch_release_cta_shared(at(hint), value);
  }
};

// The thread that takes items in the order of MokWalk and hands them on, one ahead, as the grouped
// GEMM's does. While it waits for the next turn it looks whether the item's rows are there, since
// the loader would lose a microsecond by looking. After a fault it takes no more.
template <MokConfig c>
__device__ __forceinline__ void take_items(const MokPass<c>& pass, GemmShared<c.tiles> shared,
                                           MokShared* own) {
  static_assert(kWorkSlots == 1, "the slot is free at first");
  const MokOrder order = pass.order();
  const MokWalk walk = pass.walk(order, own);
  const MokRings rings = own->rings;
  const MokHints<c.tiles> hints{shared};
  const u32 items = walk.items();
  u32 index = atomicAdd(pass.a.next_item, 1);
  u32 parity = 0;
  for (u32 turn = 1;; ++turn) {
    MokWork work{};
    if (index < items && hints.get(kFaulted) == 0) {
      work = mok_work(walk, pass.a.groups, rings, c.layer, index);
    }
    work.turn = turn;
    own->work = work;
    ptx::mbarrier_arrive(shared.work_full(0));
    if (work.units == 0) return;
    bool ready = false;
    while (!ready && !ptx::mbarrier_test(shared.work_empty(0), parity)) {
      ready = pass.is_ready(work);
      if (ready) {
        hints.set(kReady, turn);
      } else {
        ptx::nanosleep(100);
      }
    }
    ptx::mbarrier_wait(shared.work_empty(0), parity);
    parity ^= 1;
    index = atomicAdd(pass.a.next_item, 1);
  }
}

// The thread that keeps the ring of k-blocks full.
template <MokConfig c>
struct MokLoader {
  static constexpr GemmConfig kTiles = c.tiles;

  const MokPass<c>& pass;
  GemmShared<c.tiles> shared;
  MokShared* own;
  const MokMaps<c>& maps;
  RingPlace<c.tiles.stages> place;
  RingPlace<kWorkSlots> work_place;

  __device__ __forceinline__ void run() {
    const MokHints<c.tiles> hints{shared};
    bool good = true;
    while (true) {
      ptx::mbarrier_wait(shared.work_full(work_place.slot), work_place.parity);
      const MokWork work = own->work;
      if (work.units == 0) return;
      // After a fault the consumers still get their k-blocks, whatever is in them: nothing of this
      // pass is returned.
      const u32 since = pass.stamp_now();
      if (good && !reached(hints.get(kReady), work.turn) && !wait_for_rows(work)) {
        good = false;
        hints.set(kFaulted, 1);
      }
      pass.stamp_waited(since);
      pass.stamp(work.tag.gemm() == 0 ? kGemm1Begun : kGemm2Begun, true);
      hints.set(kResolved, work.turn);
      ptx::fence_proxy_async_global();
      load(work, shared.work_empty(work_place.slot));
      work_place.advance();
    }
  }

  // Until the item waits for no other CTA.
  __device__ __forceinline__ bool wait_for_rows(const MokWork& work) const {
    const Cursor hidden{work.tag.hidden_slot(), work.hidden_lap};
    if (work.tag.gemm() == 0) {
      return pass.steps(Role::kGemm1, [&](auto&& step) {
        return step.wait_ring_ready(Cursor{work.tag.x_slot(), work.x_lap}) &&
               step.wait_hidden_free(hidden);
      });
    }
    return pass.steps(Role::kGemm2, [&](auto&& step) { return step.wait_hidden_ready(hidden); });
  }

  // All k-blocks of an item. Rows of the tile's slot behind its last are whatever lies there, and
  // so is what they become: nobody reads it.
  __device__ __forceinline__ void load(const MokWork& work, u32 work_empty) {
    const bool second = work.tag.gemm() != 0;
    const u32 weight_row =
        work.expert * (second ? c.layer.hidden : 2 * c.layer.intermediate) + work.column;
    const u32 row = (second ? work.tag.hidden_slot() : work.tag.x_slot()) * kTiles.tile_rows;
    const u32 k_blocks = (second ? c.layer.intermediate : c.layer.hidden) / kBlockK;
    const auto& operands = maps.gemms[second ? 1 : 0];
    const ptx::TensorMap& weights = operands.weights[1 - work.narrow];
    const ptx::TensorMap& rows = operands.rows[work.units - 1];
    const u32 bytes = (2 - work.narrow) * kHalfBytes + work.units * kRowUnit * kLineBytes;
    const u32 take_at = max(k_blocks, kTakeAhead) - kTakeAhead;
    for (u32 block = 0; block < k_blocks; ++block) {
      if (block == take_at) ptx::mbarrier_arrive(work_empty);
      ptx::mbarrier_wait(shared.empty(place.slot), place.parity ^ 1);
      const u32 full = shared.full(place.slot);
      ptx::mbarrier_arrive_expect_tx(full, bytes);
      ptx::cp_async_bulk_tensor_load(shared.weights(place.slot), weights, full, block * kBlockK,
                                     weight_row);
      ptx::cp_async_bulk_tensor_load(shared.rows(place.slot, work.narrow), rows, full,
                                     block * kBlockK, row);
      place.advance();
    }
  }
};

// Few enough loads in flight for the registers of these warps.
template <MokConfig c>
using PullBatch = RowBatch<c.layer.hidden / kVecElements, 4>;

// A warp that pulls rows in the order in which GEMM 1 will want them, kPullRows at a time, in turn
// with all others of the rank.
template <MokConfig c>
__device__ __forceinline__ void pull_rows(const MokPass<c>& pass, MokShared* own, u32 warp) {
  constexpr u32 kParts = c.tiles.tile_rows / kPullRows;
  const MokArgs& a = pass.a;
  const MokOrder order = pass.order();
  const u32 lane = ptx::tid_x() % 32;
  const MokWalk walk = pass.walk(order, own);
  u32 group = 0;
  for (u32 part = warp * gridDim.x + blockIdx.x;; part += c.pull_warps * gridDim.x) {
    const u32 tile = part / kParts;
    if (tile >= walk.all_tiles()) return;
    while (tile >= walk.tile_ends[group]) ++group;
    const MokRows rows = rows_of_tile(order, a.groups[group], tile - walk.tiles_before(group));
    const u32 first = part % kParts * kPullRows;
    const u32 num_rows = rows.count > first ? min_of(rows.count - first, kPullRows) : 0;
    const Cursor at = cursor_behind(own->rings.x, tile, c.layer.ring_tiles);
    bool good = true;
    if (lane == 0) {
      good = pass.steps(Role::kPull, [&](auto&& step) { return step.wait_ring_free(at); });
    }
    if (!__shfl_sync(~0u, good, 0)) return;
    // The bulk copies that read the slot are over: the consumers that freed it had what they read.
    ptx::fence_proxy_async_global();
    const u32 packed = lane < num_rows ? a.table[rows.first + first + lane] : 0;
    char* to = a.x_ring + u64{at.slot * c.tiles.tile_rows + first} * pass.kRowBytes;
    for (u32 row = 0; row < num_rows; ++row) {
      const u32 route = __shfl_sync(~0u, packed, row);
      const u32 token = route_of_route(route) / c.layer.top_k;
      const char* from = pass.at(source_of_route(route), pass.kLayout.x, token * pass.kRowBytes);
#pragma unroll 1
      for (u32 nth = 0; nth < PullBatch<c>::kPerRow; ++nth) {
        PullBatch<c> batch(nth);
        batch.load(from, kFromPeers);
        batch.store(to + row * pass.kRowBytes, kToHere);
      }
    }
    ptx::fence_proxy_async_global();
    __syncwarp();
    if (lane == 0) {
      pass.steps(Role::kPull, [&](auto&& step) { step.raise_ring_ready(at, kPullRows); });
      if (warp == 0) pass.stamp(kPulled);
    }
  }
}

// GEMM 1's output goes to the ring of hidden rows, GEMM 2's to the combine slots of the rows' own
// ranks.
template <MokConfig c>
struct MokOutput {
  using Work = MokWork;
  static constexpr bool kSwiglu = true;
  static constexpr bool kPlain = true;
  static constexpr u32 kWorkWords = kMokWordsOfConsumers;

  const MokView<c> view;
  const MokMaps<c>& maps;
  const MokHints<c.tiles> hints;

  static __device__ __forceinline__ bool is_swiglu(const Work& work) {
    return work.tag.gemm() == 0;
  }
  static __device__ __forceinline__ bool is_part(const Work&) { return false; }
  static __device__ __forceinline__ bool is_stored(const Work&) { return true; }
  static __device__ __forceinline__ u32 k_blocks(const Work& work) {
    return (is_swiglu(work) ? c.layer.hidden : c.layer.intermediate) / kBlockK;
  }
  static __device__ __forceinline__ u32 n(const Work& work) {
    return is_swiglu(work) ? 2 * c.layer.intermediate : c.layer.hidden;
  }

  // A CTA must not wait for others while it keeps back what others may wait for. The leader decides
  // for its warpgroup. Items take turns with two words, so that none is written while the one
  // before may still be read.
  __device__ __forceinline__ void look_ahead(const Work& next, u32 group) const {
    if (ptx::tid_x() % kGroupThreads == 0) {
      ptx::st_volatile_shared(sure_at(next, group), reached(hints.get(kResolved), next.turn));
    }
    ptx::bar_sync(1 + group, kGroupThreads);
  }
  __device__ __forceinline__ bool is_sure(const Work& next, u32 group) const {
    return ptx::ld_volatile_shared(sure_at(next, group)) != 0;
  }

  // Of a GEMM 2's tile: lane i's are the routes of rows i, i + 32, ...
  struct Rows {
    u32 routes[c.tiles.tile_rows / 32];
  };
  __device__ __forceinline__ Rows rows_of(const Work& work) const {
    Rows rows;
#pragma unroll
    for (u32 i = 0; i < c.tiles.tile_rows / 32; ++i) {
      const u32 nth = ptx::tid_x() % 32 + 32 * i;
      const bool is_there = !is_swiglu(work) && nth < work.num_rows;
      rows.routes[i] = is_there ? view.a.table[work.row + nth] : kNobody;
    }
    return rows;
  }

  __device__ __forceinline__ void send(const Work& work, const Rows& rows, u32 at, u32 first_row,
                                       u32 num_rows, u32 column) const {
    if (is_swiglu(work)) {
      send_hidden(work.row + first_row, at, num_rows, column / 2);
    } else {
      send_to_ranks(rows, at, first_row, num_rows, column);
    }
  }

  // Behind a tile's last chunk: its hidden rows are there, its operands' slots are read.
  __device__ __forceinline__ void finish(const Work& work, u32 group) const {
    if (ptx::tid_x() % 32 == 0) {
      if (group == 0) view.stamp(is_swiglu(work) ? kGemm1Ended : kGemm2Ended);
      if (is_swiglu(work)) {
        ptx::cp_async_bulk_wait_all();
        ptx::fence_proxy_async_global();
        ptx::fence_acq_rel_gpu();
        ptx::red_add_relaxed_gpu(view.counter(view.kLayout.hidden_ready, work.tag.hidden_slot()),
                                 1);
        ptx::red_add_relaxed_gpu(view.counter(view.kLayout.ring_free, work.tag.x_slot()), 1);
      } else {
        // Relaxed: what waits for this are writes, and the reads were over when the k-blocks were
        // full. A release would wait for the rows' way to their ranks.
        ptx::red_add_relaxed_gpu(view.counter(view.kLayout.hidden_free, work.tag.hidden_slot()), 1);
      }
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ u32 sure_at(const Work& next, u32 group) const {
    return hints.at(kIsSure) + 8 * group + 4 * (next.turn & 1);
  }
  __device__ __forceinline__ void send_hidden(u32 row, u32 at, u32 num_rows, u32 column) const {
    if (num_rows == chunk_rows(c.tiles)) {
      send_whole(maps.hidden_out, at, column, row);
      return;
    }
    const StagedChunk<true> staged{at};
    staged.for_pieces(num_rows, [&](u32 nth, u32 piece, ptx::Vec16 bytes) {
      const u64 to = u64{row + nth} * (c.layer.intermediate * 2) + column * 2 + piece * 16;
      *reinterpret_cast<ptx::Vec16*>(view.a.hidden_ring + to) = bytes;
    });
    ptx::fence_proxy_async_global();
  }

  // Eight lanes a row: its 128 bytes are one transaction.
  __device__ __forceinline__ void send_to_ranks(const Rows& rows, u32 at, u32 first_row,
                                                u32 num_rows, u32 column) const {
    using Staged = StagedChunk<false>;
    constexpr u32 kRowsAtOnce = 32 / Staged::kPieces;
    const u32 piece = ptx::tid_x() % Staged::kPieces;
    const u32 own_row = ptx::tid_x() % 32 / Staged::kPieces;
#pragma unroll 1
    for (u32 i = 0; i < c.tiles.tile_rows / 32; ++i) {
      u32 routes = rows.routes[0];
#pragma unroll
      for (u32 j = 1; j < c.tiles.tile_rows / 32; ++j) {
        if (i == j) routes = rows.routes[j];
      }
      const u32 end = min(num_rows + first_row, 32 * (i + 1));
#pragma unroll 4
      for (u32 begin = max(first_row, 32 * i); begin < end; begin += kRowsAtOnce) {
        const u32 nth = begin + own_row;
        const u32 route = __shfl_sync(~0u, routes, nth % 32);
        if (nth >= end || route == kNobody) continue;
        char* to = view.at(source_of_route(route), view.kLayout.combine,
                           route_of_route(route) * view.kRowBytes + column * 2 + piece * 16);
        ptx::st_relaxed_sys_v4(to,
                               ptx::ld_shared_v4(at + Staged::piece_at(nth - first_row, piece)));
      }
    }
  }
};

}  // namespace mokbench
