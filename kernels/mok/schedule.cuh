// SPDX-License-Identifier: Apache-2.0
// How a MoK pass begins: inputs staged, ranks told, and the table of rows built by count, prefix
// and stable placement. No atomic decides a place: same inputs, same table.
#pragma once

#include "mok/pass.cuh"

namespace mokbench {

constexpr u32 kStageBatch = 8;  // 16-byte loads a thread has in flight
constexpr u32 kIdsInFlight = 4;

// In the ring of k-blocks, which nobody uses yet.
template <MokConfig c>
struct MokSortShared {
  static constexpr u32 kExperts = local_experts(c.layer);
  u32 first_route[c.layer.num_ranks + 1];  // of the n-th source, sources as nth_peer has them
  u32 next_row[kMokWarps][kExperts];       // of each warp's routes: counts, then places
  u32 total[kExperts];
  u32 before[kExperts];
};

// This rank's rows into its segment, unless they lie there; ids and their number to every rank.
// Grid-wide shares.
template <MokConfig c>
__device__ __forceinline__ void stage_inputs(const MokPass<c>& pass) {
  const MokArgs& a = pass.a;
  const u32 thread = blockIdx.x * kMokThreads + threadIdx.x;
  const u32 stride = gridDim.x * kMokThreads;
  const u32 num_vecs = a.x == nullptr ? 0 : a.num_tokens * (c.layer.hidden / kVecElements);
  char* to = pass.at(a.rank, pass.kLayout.x, 0);
  for (u32 first = thread; first < num_vecs; first += kStageBatch * stride) {
    ptx::Vec16 vecs[kStageBatch];
#pragma unroll
    for (u32 i = 0; i < kStageBatch; ++i) {
      vecs[i] = kFromHere(a.x + u64{min(first + i * stride, num_vecs - 1)} * 16);
    }
#pragma unroll
    for (u32 i = 0; i < kStageBatch; ++i) {
      if (first + i * stride < num_vecs) kToPeers(to + u64{first + i * stride} * 16, vecs[i]);
    }
  }
  const u32 num_ids = a.num_tokens * c.layer.top_k;
  for (u32 i = thread; i < num_ids; i += stride) {
    const u32 id = static_cast<u32>(a.topk_idx[i]);
    for (u32 n = 0; n < c.layer.num_ranks; ++n) {
      ptx::st_relaxed_sys(pass.ids_at(pass.nth_peer(n), a.rank) + i, id);
    }
  }
  if (thread < c.layer.num_ranks) ptx::st_relaxed_sys(pass.tokens_at(thread, a.rank), a.num_tokens);
}

// The last CTA to have staged tells every rank; all wait for every rank, their own included.
template <MokConfig c>
__device__ __forceinline__ bool enter(const MokPass<c>& pass, u32& is_last) {
  const MokArgs& a = pass.a;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::atom_add_acq_rel_gpu(a.staged, 1) + 1 == pass.epoch * gridDim.x;
  }
  __syncthreads();
  bool good = true;
  if (threadIdx.x < c.layer.num_ranks) {
    good = pass.steps(Role::kCaller, [&](auto&& step) {
      if (is_last) step.publish_entry(pass.nth_peer(threadIdx.x));
      return step.wait_entry(threadIdx.x);
    });
  }
  return __syncthreads_and(good);
}

// The contiguous routes of this warp among all ranks': chunks go to CTAs, shares of them to warps.
struct WarpRoutes {
  u32 begin;
  u32 end;

  __device__ __forceinline__ explicit WarpRoutes(u32 num_routes) {
    const u32 chunk = ceil_div(num_routes, gridDim.x);
    const u32 first = min(blockIdx.x * chunk, num_routes);
    const u32 last = min(first + chunk, num_routes);
    const u32 share = ceil_div(last - first, kMokWarps);
    begin = min(first + threadIdx.x / 32 * share, last);
    end = min(begin + share, last);
  }
};

// All lanes call visit(expert here or kNobody, packed route) for the warp's routes, 32 at a time,
// in order.
template <MokConfig c, class Visit>
__device__ __forceinline__ void for_own_routes(const MokPass<c>& pass,
                                               const MokSortShared<c>& shared, WarpRoutes routes,
                                               Visit visit) {
  constexpr u32 kExperts = local_experts(c.layer);
  const u32 lane = threadIdx.x % 32;
  u32 n = 0;  // a lane's routes only rise
  for (u32 first = routes.begin; first < routes.end; first += 32 * kIdsInFlight) {
    u32 ids[kIdsInFlight];
    u32 packed[kIdsInFlight];
#pragma unroll
    for (u32 i = 0; i < kIdsInFlight; ++i) {
      const u32 route = first + 32 * i + lane;
      ids[i] = kNobody;
      packed[i] = 0;
      if (route < routes.end) {
        while (route >= shared.first_route[n + 1]) ++n;
        const u32 source = pass.nth_peer(n);
        const u32 of_source = route - shared.first_route[n];
        ids[i] = ptx::ld_relaxed_sys(pass.ids_at(pass.a.rank, source) + of_source);
        packed[i] = packed_route(source, of_source);
      }
    }
#pragma unroll
    for (u32 i = 0; i < kIdsInFlight; ++i) {
      // A masked id is far above any expert once unsigned.
      const u32 expert = ids[i] - pass.a.rank * kExperts;
      visit(expert < kExperts ? expert : kNobody, packed[i]);
    }
  }
}

// Where each lane's route goes among those of its expert that the warp has; counts them.
__device__ __forceinline__ u32 take_place(u32* next_row, u32 expert) {
  const u32 lane = threadIdx.x % 32;
  const u32 same = __match_any_sync(~0u, expert);
  const u32 first = expert == kNobody ? 0 : next_row[expert];
  __syncwarp();
  if (expert != kNobody && lane == static_cast<u32>(__ffs(same) - 1)) {
    next_row[expert] = first + __popc(same);
  }
  __syncwarp();
  return first + __popc(same & ((1u << lane) - 1));
}

template <MokConfig c>
__device__ __forceinline__ void count_routes(const MokPass<c>& pass, MokSortShared<c>& shared,
                                             WarpRoutes routes) {
  constexpr u32 kExperts = local_experts(c.layer);
  u32* next_row = shared.next_row[threadIdx.x / 32];
  for (u32 e = threadIdx.x % 32; e < kExperts; e += 32) next_row[e] = 0;
  __syncwarp();
  for_own_routes(pass, shared, routes, [&](u32 expert, u32) { take_place(next_row, expert); });
  __syncthreads();
  for (u32 expert = threadIdx.x; expert < kExperts; expert += kMokThreads) {
    u32 rows = 0;
    for (u32 warp = 0; warp < kMokWarps; ++warp) {
      const u32 of_warp = shared.next_row[warp][expert];
      shared.next_row[warp][expert] = rows;
      rows += of_warp;
    }
    pass.a.chunk_rows[blockIdx.x * kExperts + expert] = rows;
    shared.total[expert] = shared.before[expert] = 0;
  }
}

// Sums of 32 lanes before this one; `sum` becomes that of all.
__device__ __forceinline__ u32 sum_before(u32& sum) {
  const u32 lane = threadIdx.x % 32;
  const u32 own = sum;
#pragma unroll
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  const u32 before = sum - own;
  sum = __shfl_sync(~0u, sum, 31);
  return before;
}

// One warp: where each expert's rows begin; the first CTA's also writes down the groups.
template <MokConfig c>
__device__ __forceinline__ void place_experts(const MokPass<c>& pass, MokSortShared<c>& shared) {
  constexpr u32 kExperts = local_experts(c.layer);
  const MokOrder order = pass.order();
  u32 first_row = 0;
  u32 first_tile = 0;
  u32 first_group = 0;
  for (u32 first = 0; first < kExperts; first += 32) {
    const u32 expert = first + threadIdx.x % 32;
    const u32 rows = expert < kExperts ? shared.total[expert] : 0;
    const u32 tiles = mok_row_tiles(order, rows);
    u32 all_rows = rows;
    u32 all_tiles = tiles;
    u32 all_groups = mok_groups(order, rows);
    const u32 row = first_row + sum_before(all_rows);
    const u32 tile = first_tile + sum_before(all_tiles);
    u32 group = first_group + sum_before(all_groups);
    if (expert < kExperts) shared.before[expert] += row;
    if (blockIdx.x == 0) {
      for (u32 done = 0; done < tiles; done += order.group_tiles, ++group) {
        pass.a.groups[group] = {expert, row, rows, done};
        pass.a.tile_ends[group] = tile + min_of(done + order.group_tiles, tiles);
      }
    }
    first_row += all_rows;
    first_tile += all_tiles;
    first_group += all_groups;
  }
  if (blockIdx.x == 0 && threadIdx.x % 32 == 0) *pass.a.num_groups = first_group;
}

// From all chunks' counts: next_row becomes the first row for each warp and expert.
template <MokConfig c>
__device__ __forceinline__ void place_routes(const MokPass<c>& pass, MokSortShared<c>& shared) {
  constexpr u32 kExperts = local_experts(c.layer);
  constexpr u32 kSlices = kMokThreads > kExperts ? kMokThreads / kExperts : 1;
  for (u32 i = threadIdx.x; i < kSlices * kExperts; i += kMokThreads) {
    const u32 expert = i % kExperts;
    u32 total = 0;
    u32 before = 0;
#pragma unroll 4
    for (u32 cta = i / kExperts; cta < gridDim.x; cta += kSlices) {
      const u32 rows = pass.a.chunk_rows[cta * kExperts + expert];
      if (cta < blockIdx.x) before += rows;
      total += rows;
    }
    atomicAdd(&shared.total[expert], total);
    atomicAdd(&shared.before[expert], before);
  }
  __syncthreads();
  if (threadIdx.x < 32) place_experts(pass, shared);
  __syncthreads();
  for (u32 i = threadIdx.x; i < kMokWarps * kExperts; i += kMokThreads) {
    shared.next_row[i / kExperts][i % kExperts] += shared.before[i % kExperts];
  }
  __syncthreads();
}

// All threads, behind enter(); false when a wait was given up. Whoever follows finds the table.
template <MokConfig c>
__device__ __forceinline__ bool build_schedule(const MokPass<c>& pass, MokSortShared<c>& shared) {
  if (threadIdx.x <= c.layer.num_ranks) {
    u32 routes = 0;
    for (u32 n = 0; n < threadIdx.x; ++n) {
      routes += ptx::ld_relaxed_sys(pass.tokens_at(pass.a.rank, pass.nth_peer(n))) * c.layer.top_k;
    }
    shared.first_route[threadIdx.x] = routes;
  }
  __syncthreads();
  const WarpRoutes routes(shared.first_route[c.layer.num_ranks]);
  count_routes(pass, shared, routes);
  if (!pass.grid_barrier(1)) return false;
  place_routes(pass, shared);
  u32* next_row = shared.next_row[threadIdx.x / 32];
  for_own_routes(pass, shared, routes, [&](u32 expert, u32 packed) {
    const u32 row = take_place(next_row, expert);
    if (expert != kNobody) pass.a.table[row] = packed;
  });
  return pass.grid_barrier(2);
}

}  // namespace mokbench
