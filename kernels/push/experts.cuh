// SPDX-License-Identifier: Apache-2.0
// What surrounds the grouped GEMMs of a push pass: placement of the received rows among their
// experts', and SwiGLU between the two GEMMs.
#pragma once

#include "push/pass.cuh"

namespace mokbench {

constexpr u32 kSortBarriers = 1;
constexpr u32 kIdBatch = 8;  // ids a lane has in flight

template <Config c>
struct SortShared {
  static constexpr u32 kLocalExperts = local_experts(c);
  Received<c> received;
  u32 next_row[kPushWarps][kLocalExperts];  // of each warp's routes: counts, then places
  u32 total[kLocalExperts];
  u32 before[kLocalExperts];
};

// The contiguous rows of this warp among the received ones: chunks go to CTAs, shares of them to
// warps. So (warp's number, order in its share) is the order of all received rows.
struct WarpRows {
  u32 begin;
  u32 end;

  __device__ __forceinline__ explicit WarpRows(u32 num_rows) {
    const u32 chunk = (num_rows + gridDim.x - 1) / gridDim.x;
    const u32 first = min(blockIdx.x * chunk, num_rows);
    const u32 last = min(first + chunk, num_rows);
    const u32 share = (last - first + kPushWarps - 1) / kPushWarps;
    begin = min(first + threadIdx.x / 32 * share, last);
    end = min(begin + share, last);
  }
};

// All lanes call visit(expert here or kNobody, index in row_of or kNobody) for the routes of the
// warp's rows, 32 at a time, in order.
template <Config c, class Visit>
__device__ __forceinline__ void for_own_routes(const PushPass<c>& pass, const Received<c>& received,
                                               WarpRows rows, Visit visit) {
  constexpr u32 kLocalExperts = local_experts(c);
  const u32 num_routes = (rows.end - rows.begin) * c.top_k;
  for (u32 first = threadIdx.x % 32; first - threadIdx.x % 32 < num_routes;
       first += 32 * kIdBatch) {
    u32 ids[kIdBatch];
    u32 places[kIdBatch];
#pragma unroll
    for (u32 i = 0; i < kIdBatch; ++i) {
      const u32 route = first + 32 * i;
      ids[i] = places[i] = kNobody;
      if (route < num_routes) {
        const u32 row = rows.begin + route / c.top_k;
        const u32 source = received.source_of(row);
        const u32 slot = PushPass<c>::slot(source, row - received.first[source]);
        places[i] = slot * c.top_k + route % c.top_k;
        ids[i] = ptx::ld_relaxed_sys(pass.meta(pass.a.rank, slot) + route % c.top_k);
      }
    }
#pragma unroll
    for (u32 i = 0; i < kIdBatch; ++i) {
      if (first - threadIdx.x % 32 + 32 * i >= num_routes) break;
      const u32 expert = ids[i] - pass.a.rank * kLocalExperts;
      visit(expert < kLocalExperts ? expert : kNobody, places[i]);
    }
  }
}

// This CTA's rows of each expert, and of its warps: next_row becomes the rows of earlier warps.
template <Config c>
__device__ __forceinline__ void count_chunk(const PushPass<c>& pass, SortShared<c>& shared,
                                            WarpRows rows) {
  constexpr u32 kLocalExperts = local_experts(c);
  u32* all = &shared.next_row[0][0];
  for (u32 i = threadIdx.x; i < kPushWarps * kLocalExperts; i += kPushThreads) all[i] = 0;
  __syncthreads();
  u32* own = shared.next_row[threadIdx.x / 32];
  // Sums of integers: the order of the adds does not show.
  for_own_routes(pass, shared.received, rows, [&](u32 expert, u32) {
    if (expert != kNobody) atomicAdd(own + expert, 1u);
  });
  __syncthreads();
  for (u32 expert = threadIdx.x; expert < kLocalExperts; expert += kPushThreads) {
    u32 num_rows = 0;
    for (u32 warp = 0; warp < kPushWarps; ++warp) {
      const u32 of_warp = shared.next_row[warp][expert];
      shared.next_row[warp][expert] = num_rows;
      num_rows += of_warp;
    }
    pass.a.chunk_rows[blockIdx.x * kLocalExperts + expert] = num_rows;
    shared.total[expert] = shared.before[expert] = 0;
  }
}

// From all chunks' counts: next_row becomes the first row of x_rows for each warp and expert.
template <Config c>
__device__ __forceinline__ void place_chunk(const PushPass<c>& pass, SortShared<c>& shared) {
  constexpr u32 kLocalExperts = local_experts(c);
  constexpr u32 kSlices = kPushThreads / kLocalExperts;  // threads an expert
  static_assert(kSlices >= 1, "at least one thread an expert");
  const u32 expert = threadIdx.x % kLocalExperts;
  if (threadIdx.x < kSlices * kLocalExperts) {
    u32 total = 0;
    u32 before = 0;
#pragma unroll 4
    for (u32 cta = threadIdx.x / kLocalExperts; cta < gridDim.x; cta += kSlices) {
      const u32 rows = pass.a.chunk_rows[cta * kLocalExperts + expert];
      if (cta < blockIdx.x) before += rows;
      total += rows;
    }
    atomicAdd(&shared.total[expert], total);
    atomicAdd(&shared.before[expert], before);
  }
  __syncthreads();
  if (threadIdx.x < kLocalExperts) {
    u32 first_row = 0;
    for (u32 e = 0; e < expert; ++e) first_row += shared.total[e];
    shared.before[expert] += first_row;
    if (blockIdx.x == 0) {
      pass.a.expert_ends[expert] = static_cast<i32>(first_row + shared.total[expert]);
    }
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < kPushWarps * kLocalExperts; i += kPushThreads) {
    shared.next_row[i / kLocalExperts][i % kLocalExperts] += shared.before[i % kLocalExperts];
  }
  __syncthreads();
}

// Copies each received row to its place among its experts' rows: count, prefix, stable placement.
// No atomic decides a place: same inputs, same table. Cooperative, any grid, the same in every
// pass.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1) push_sort(const __grid_constant__ PushArgs a) {
  __shared__ SortShared<c> shared;
  PushPass<c> pass(a);
  if (pass.faulted()) return;
  const Received<c>& received = shared.received;
  shared.received.load(pass);
  const WarpRows rows(received.num_rows());
  count_chunk(pass, shared, rows);
  if (!pass.grid_barrier(1, kSortBarriers)) return;
  place_chunk(pass, shared);
  const u32 lane = threadIdx.x % 32;
  u32* next_row = shared.next_row[threadIdx.x / 32];
  for_own_routes(pass, received, rows, [&](u32 expert, u32 place) {
    const u32 same = __match_any_sync(~0u, expert);
    const u32 first = expert == kNobody ? 0 : next_row[expert];
    __syncwarp();
    if (expert != kNobody && lane == static_cast<u32>(__ffs(same) - 1)) {
      next_row[expert] = first + __popc(same);
    }
    __syncwarp();
    const u32 row = first + __popc(same & ((1u << lane) - 1));
    if (place != kNobody) a.row_of[place] = expert == kNobody ? kNobody : row;
  });
  __syncwarp();
  for (u32 row = rows.begin; row < rows.end; ++row) {
    const u32 source = received.source_of(row);
    const u32 slot = PushPass<c>::slot(source, row - received.first[source]);
    const u32 place = lane < c.top_k ? a.row_of[u64{slot} * c.top_k + lane] : kNobody;
    for (u32 nth = 0; nth < HiddenBatch<c>::kPerRow; ++nth) {
      HiddenBatch<c> batch(nth);
      batch.load(pass.recv_x(a.rank, slot), kFromPeers);
      for_each_bit(__ballot_sync(~0u, place != kNobody), [&](u32 k) {
        batch.store(a.x_rows + __shfl_sync(~0u, place, k) * row_bytes(c), kToHere);
      });
    }
  }
}

__device__ __forceinline__ float swiglu(float gate, float up) {
  return gate / (1.0f + __expf(-gate)) * up;
}

__device__ __forceinline__ u32 swiglu_pair(u32 gate, u32 up) {
  return ptx::cvt_rn_bf16x2(swiglu(bf16_low(gate), bf16_low(up)),
                            swiglu(bf16_high(gate), bf16_high(up)));
}

// A warp's row: out [I] = pair(gate, up), two channels at a time; in [2 I] has gate, then up.
template <u32 kIntermediate, class Pair>
__device__ __forceinline__ void swiglu_row(const char* in, char* out, Pair pair) {
  static_assert(kIntermediate % kVecElements == 0, "16-byte accesses");
  using Batch = RowBatch<kIntermediate / kVecElements>;
  for (u32 nth = 0; nth < Batch::kPerRow; ++nth) {
    Batch gate(nth);
    Batch up(nth);
    gate.load(in, kFromHere);
    up.load(in + u64{kIntermediate} * 2, kFromHere);
#pragma unroll
    for (u32 i = 0; i < Batch::kSize; ++i) {
      ptx::Vec16& g = gate.vecs[i];
      const ptx::Vec16& u = up.vecs[i];
      g = {pair(g.x, u.x), pair(g.y, u.y), pair(g.z, u.z), pair(g.w, u.w)};
    }
    gate.store(out, kToHere);
  }
}

// silu(gate) * up of the rows that have an expert, in FP32, a warp a row. Any grid.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1) push_swiglu(const __grid_constant__ PushArgs a) {
  constexpr u64 kRowBytes = u64{c.intermediate} * c.element_bytes;
  const u32 num_rows = static_cast<u32>(a.expert_ends[local_experts(c) - 1]);
  for (u32 row = blockIdx.x * kPushWarps + threadIdx.x / 32; row < num_rows;
       row += gridDim.x * kPushWarps) {
    swiglu_row<c.intermediate>(a.gate_up + row * (2 * kRowBytes), a.activated + row * kRowBytes,
                               swiglu_pair);
  }
}

}  // namespace mokbench
