// SPDX-License-Identifier: Apache-2.0
// Push combine: give back one weighted sum a received row, then reduce what all ranks gave back.
#pragma once

#include "push/pass.cuh"

namespace mokbench {

// One less than kMaxBatch: the running sums take eight registers each, and eight would spill.
template <Config c>
using SumBatch = RowBatch<c.hidden / kVecElements, kMaxBatch - 1>;

template <Config c>
struct HiddenSums {
  VecSum sums[SumBatch<c>::kSize];

  __device__ __forceinline__ void add(const SumBatch<c>& batch, float weight) {
#pragma unroll
    for (u32 i = 0; i < SumBatch<c>::kSize; ++i) sums[i].add(batch.vecs[i], weight);
  }
  __device__ __forceinline__ void round_to(SumBatch<c>& batch) const {
#pragma unroll
    for (u32 i = 0; i < SumBatch<c>::kSize; ++i) batch.vecs[i] = sums[i].rounded();
  }
};

// A received row as its warp sees it: lane k has the row of x_rows and y_rows of route k, or
// kNobody, and the weight.
template <Config c>
struct ReceivedRow {
  u32 source = 0;
  u32 j = 0;
  u32 place = kNobody;
  float weight = 0.0f;

  __device__ __forceinline__ void load(const PushPass<c>& pass, const Received<c>& received,
                                       u32 row) {
    if (row >= received.num_rows()) return;
    source = received.source_of(row);
    j = row - received.first[source];
    const u32 lane = threadIdx.x % 32;
    if (lane >= c.top_k) return;
    const u32 slot = PushPass<c>::slot(source, j);
    place = pass.a.row_of[u64{slot} * c.top_k + lane];
    weight = __uint_as_float(ptx::ld_relaxed_sys(pass.meta(pass.a.rank, slot) + c.top_k + lane));
  }
};

// A warp a received row: the weighted sum over its local experts, in k order, back to its source's
// slot; then one flag a source. Any grid.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1)
    push_give_back(const __grid_constant__ PushArgs a) {
  __shared__ Received<c> received;
  PushPass<c> pass(a);
  if (pass.faulted()) return;
  received.load(pass);
  const u32 num_warps = gridDim.x * kPushWarps;
  u32 row = blockIdx.x * kPushWarps + threadIdx.x / 32;
  ReceivedRow<c> next;
  next.load(pass, received, row);
  for (; row < received.num_rows(); row += num_warps) {
    const ReceivedRow<c> now = next;
    next.load(pass, received, row + num_warps);  // in flight while this row is summed
    const u32 routes = __ballot_sync(~0u, now.place != kNobody);
    char* to = pass.partial(now.source, PushPass<c>::slot(a.rank, now.j));
    for (u32 nth = 0; nth < SumBatch<c>::kPerRow; ++nth) {
      SumBatch<c> batch(nth);
      HiddenSums<c> sums;
      for_each_bit(routes, [&](u32 k) {
        const u32 place = __shfl_sync(~0u, now.place, k);
        batch.load(a.y_rows + place * row_bytes(c), kFromHere);
        sums.add(batch, __shfl_sync(~0u, now.weight, k));
      });
      sums.round_to(batch);
      batch.store(to, kToPeers);
    }
  }
  if (!pass.is_last_cta() || threadIdx.x >= c.num_ranks) return;
  pass.steps([](auto&& step) { step.publish_combined(threadIdx.x); });
}

// Lane l of group g has the token's slot at rank 32 * g + l, or kNobody.
template <Config c>
struct TokenSlots {
  static constexpr u32 kGroups = (c.num_ranks + 31) / 32;
  u32 slots[kGroups];

  __device__ __forceinline__ void load(const PushArgs& a, u32 token) {
#pragma unroll
    for (u32 g = 0; g < kGroups; ++g) {
      const u32 rank = 32 * g + threadIdx.x % 32;
      const bool there = token < a.num_tokens && rank < c.num_ranks;
      slots[g] = there ? a.slot_of[u64{token} * c.num_ranks + rank] : kNobody;
    }
  }
};

// A warp a token: the sum of the partial sums of all ranks, in order of rank. Any grid.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1) push_reduce(const __grid_constant__ PushArgs a) {
  PushPass<c> pass(a);
  if (pass.faulted()) return;
  const auto wait = [&](auto&& step, u32 destination) {
    return a.num_sent[destination] == 0 || step.wait_combined(destination);
  };
  if (!pass.wait_all(wait)) return;
  const u32 num_warps = gridDim.x * kPushWarps;
  u32 token = blockIdx.x * kPushWarps + threadIdx.x / 32;
  TokenSlots<c> next;
  next.load(a, token);
  for (; token < a.num_tokens; token += num_warps) {
    const TokenSlots<c> now = next;
    next.load(a, token + num_warps);  // in flight while this token is summed
    for (u32 nth = 0; nth < SumBatch<c>::kPerRow; ++nth) {
      SumBatch<c> batch(nth);
      HiddenSums<c> sums;
#pragma unroll
      for (u32 g = 0; g < TokenSlots<c>::kGroups; ++g) {
        for_each_bit(__ballot_sync(~0u, now.slots[g] != kNobody), [&](u32 bit) {
          const u32 slot = PushPass<c>::slot(32 * g + bit, __shfl_sync(~0u, now.slots[g], bit));
          batch.load(pass.partial(a.rank, slot), kFromPeers);
          sums.add(batch, 1.0f);
        });
      }
      sums.round_to(batch);
      batch.store(a.y + token * row_bytes(c), kToHere);
    }
  }
}

}  // namespace mokbench
