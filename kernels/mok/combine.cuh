// SPDX-License-Identifier: Apache-2.0
// How a MoK pass ends: the last consumers tell every source, and each rank sums what came back.
#pragma once

#include "mok/pass.cuh"

namespace mokbench {

constexpr u32 kCombineBarrier = 3;
constexpr u32 kConsumerThreads = kConsumers * kGroupThreads;
constexpr u32 kConsumerWarps = kConsumerThreads / 32;
constexpr u32 kSumVecs = 4;    // 16-byte pieces of a token that a lane sums
constexpr u32 kSumRoutes = 4;  // rows whose pieces it has in flight

// A storer without another item. The rank's last one tells all ranks that their rows are there,
// unless a wait was given up, and makes this rank ready for the next pass.
template <MokConfig c>
__device__ __forceinline__ void finish_items(const MokPass<c>& pass, const MokShared* own) {
  const MokArgs& a = pass.a;
  __syncwarp();
  const u32 lane = threadIdx.x % 32;
  bool is_last = false;
  if (lane == 0) {
    is_last = ptx::atom_add_acq_rel_gpu(a.finished, 1) == kConsumers * gridDim.x - 1;
  }
  if (!__shfl_sync(~0u, is_last, 0) || pass.faulted()) return;
  for (u32 n = lane; n < c.layer.num_ranks; n += 32) {
    pass.steps(Role::kGemm2, [&](auto&& step) { step.publish_returned(pass.nth_peer(n), 1); });
  }
  if (lane > 0) return;
  const MokOrder order = pass.order();
  const u32 tiles = pass.walk(order, own).all_tiles();
  *a.next_item = 0;
  *a.finished = 0;
  *a.epoch = pass.epoch;
  *a.rings = {cursor_behind(own->rings.x, tiles, c.layer.ring_tiles),
              cursor_behind(own->rings.hidden, tiles, c.layer.hidden_ring_tiles)};
}

// All consumers: false when a wait was given up.
template <MokConfig c>
__device__ __forceinline__ bool wait_returned(const MokPass<c>& pass, MokShared* own) {
  const u32 rank = threadIdx.x - kGroupThreads;
  if (rank < c.layer.num_ranks) {
    const bool good = pass.steps(Role::kCaller,
                                 [&](auto&& step) { return step.wait_returned(rank, pass.epoch); });
    if (!good) own->abandoned = 1;
  }
  ptx::bar_sync(kCombineBarrier, kConsumerThreads);
  return own->abandoned == 0;
}

// y[t] = sum over k, in order, of weight * row, in FP32. A warp a piece of a token.
template <MokConfig c>
__device__ __forceinline__ void sum_rows(const MokPass<c>& pass) {
  constexpr u32 kTopK = c.layer.top_k;
  constexpr u32 kVecs = c.layer.hidden / kVecElements;
  constexpr u32 kPieces = ceil_div(kVecs, 32 * kSumVecs);  // of a token
  const MokArgs& a = pass.a;
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32 - kGroupThreads / 32;
  const u32 num_pieces = a.num_tokens * kPieces;
  for (u32 i = blockIdx.x * kConsumerWarps + warp; i < num_pieces;
       i += gridDim.x * kConsumerWarps) {
    const u32 token = i / kPieces;
    const u32 first = i % kPieces * (32 * kSumVecs) + lane;
    u32 id = kNobody;
    float weight = 0.f;
    if (lane < kTopK) {
      id = static_cast<u32>(a.topk_idx[u64{token} * kTopK + lane]);
      weight = a.topk_weights[u64{token} * kTopK + lane];
    }
    const u32 live = __ballot_sync(~0u, id < c.layer.num_experts);
    const char* rows = pass.at(a.rank, pass.kLayout.combine, u64{token} * kTopK * pass.kRowBytes);
    VecSum sums[kSumVecs];
#pragma unroll 1
    for (u32 begin = 0; begin < kTopK; begin += kSumRoutes) {
      ptx::Vec16 vecs[kSumRoutes][kSumVecs];
#pragma unroll
      for (u32 j = 0; j < kSumRoutes; ++j) {
        if ((live >> (begin + j) & 1) == 0) continue;
#pragma unroll
        for (u32 v = 0; v < kSumVecs; ++v) {
          const u32 vec = min(first + 32 * v, kVecs - 1);
          vecs[j][v] = kFromPeers(rows + (begin + j) * pass.kRowBytes + vec * 16);
        }
      }
#pragma unroll
      for (u32 j = 0; j < kSumRoutes; ++j) {
        const float of_route = __shfl_sync(~0u, weight, begin + j);
        if ((live >> (begin + j) & 1) == 0) continue;
#pragma unroll
        for (u32 v = 0; v < kSumVecs; ++v) sums[v].add(vecs[j][v], of_route);
      }
    }
    char* to = a.y + token * pass.kRowBytes;
#pragma unroll
    for (u32 v = 0; v < kSumVecs; ++v) {
      if (first + 32 * v < kVecs) kToHere(to + (first + 32 * v) * 16, sums[v].rounded());
    }
  }
}

}  // namespace mokbench
