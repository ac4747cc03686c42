// SPDX-License-Identifier: Apache-2.0
// Push dispatch: plan, then send, which ends when the rows of all ranks are here. Each (token,
// rank) crosses once.
#pragma once

#include "push/pass.cuh"

namespace mokbench {

// Tokens whose ids a thread has in flight together, as registers allow.
__device__ constexpr u32 plan_tokens(u32 top_k) { return top_k <= 8 ? 8 : 4; }

// The K ids of one token, by the widest loads that their alignment allows.
template <u32 kTopK>
struct TokenIds {
  static constexpr u32 kWords = kTopK % 4 == 0 ? 4 : kTopK % 2 == 0 ? 2 : 1;
  struct alignas(kWords * sizeof(i32)) Part {
    i32 ids[kWords];
  };
  Part parts[kTopK / kWords];

  __device__ __forceinline__ void load(const i32* topk_idx, u32 token) {
    const Part* from = reinterpret_cast<const Part*>(topk_idx + u64{token} * kTopK);
#pragma unroll
    for (u32 i = 0; i < kTopK / kWords; ++i) parts[i] = from[i];
  }
  __device__ __forceinline__ bool any_in(u32 first_expert, u32 num_experts) const {
    bool any = false;
#pragma unroll
    for (u32 i = 0; i < kTopK; ++i) {
      // A masked id is far above any expert once unsigned.
      const u32 expert = static_cast<u32>(parts[i / kWords].ids[i % kWords]);
      any |= expert - first_expert < num_experts;
    }
    return any;
  }
};

// CTA d numbers the tokens that go to rank d, in token order; begins the pass. Grid: num_ranks.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1) push_plan(const __grid_constant__ PushArgs a) {
  constexpr u32 kPlanTokens = plan_tokens(c.top_k);
  constexpr u32 kParts = kPlanTokens * kPushWarps;  // warps' shares of a chunk, in token order
  static_assert(kParts < kPushThreads);
  __shared__ u32 part_rows[kParts];
  __shared__ u32 rows_before[kParts + 1];
  const u32 destination = blockIdx.x;
  const u32 warp = threadIdx.x / 32;
  const u32 lanes_before = (1u << threadIdx.x % 32) - 1;
  u32 num_rows = 0;
  for (u32 first = 0; first < a.num_tokens; first += kPlanTokens * kPushThreads) {
    TokenIds<c.top_k> ids[kPlanTokens];
#pragma unroll
    for (u32 i = 0; i < kPlanTokens; ++i) {
      ids[i].load(a.topk_idx, min(first + i * kPushThreads + threadIdx.x, a.num_tokens - 1));
    }
    u32 votes[kPlanTokens];
#pragma unroll
    for (u32 i = 0; i < kPlanTokens; ++i) {
      const u32 token = first + i * kPushThreads + threadIdx.x;
      votes[i] =
          __ballot_sync(~0u, token < a.num_tokens &&
                                 ids[i].any_in(destination * local_experts(c), local_experts(c)));
      if (threadIdx.x % 32 == 0) part_rows[i * kPushWarps + warp] = __popc(votes[i]);
    }
    __syncthreads();
    if (threadIdx.x <= kParts) {
      u32 before = 0;
      for (u32 part = 0; part < threadIdx.x; ++part) before += part_rows[part];
      rows_before[threadIdx.x] = before;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kPlanTokens; ++i) {
      const u32 token = first + i * kPushThreads + threadIdx.x;
      const bool goes = votes[i] >> threadIdx.x % 32 & 1;
      const u32 j = num_rows + rows_before[i * kPushWarps + warp] + __popc(votes[i] & lanes_before);
      if (token < a.num_tokens) {
        a.slot_of[u64{token} * c.num_ranks + destination] = goes ? j : kNobody;
      }
    }
    num_rows += rows_before[kParts];
  }
  if (threadIdx.x == 0) a.num_sent[destination] = num_rows;
  if (threadIdx.x == 0 && destination == 0) *a.epoch += 1;
}

// One token's way to one destination: its ids there and its weights. Lane k has route k.
template <Config c>
__device__ __forceinline__ void send_meta(const PushPass<c>& pass, u32 destination, u32 slot,
                                          i32 id, float weight) {
  constexpr u32 kLocalExperts = local_experts(c);
  const u32 lane = threadIdx.x % 32;
  if (lane >= c.top_k) return;
  u32* meta = pass.meta(destination, slot);
  const bool there = static_cast<u32>(id) - destination * kLocalExperts < kLocalExperts;
  ptx::st_relaxed_sys(meta + lane, there ? static_cast<u32>(id) : kNobody);
  ptx::st_relaxed_sys(meta + c.top_k + lane, __float_as_uint(weight));
}

// A warp a token: its row to every rank that wants it, once, with ids and weights. The last CTA
// raises the count and flag of each rank and waits for those of all ranks: when this launch is
// over, all that the pass brings here has arrived, or a fault is on record. Any grid.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1) push_send(const __grid_constant__ PushArgs a) {
  constexpr u32 kGroups = (c.num_ranks + 31) / 32;
  PushPass<c> pass(a);
  if (pass.faulted()) return;
  const u32 lane = threadIdx.x % 32;
  for (u32 token = blockIdx.x * kPushWarps + threadIdx.x / 32; token < a.num_tokens;
       token += gridDim.x * kPushWarps) {
    // Lane l of group g has the token's slot at the (32 * g + l)-th peer.
    u32 slots[kGroups];
#pragma unroll
    for (u32 g = 0; g < kGroups; ++g) {
      const u32 n = 32 * g + lane;
      slots[g] = n < c.num_ranks ? a.slot_of[u64{token} * c.num_ranks + pass.nth_peer(n)] : kNobody;
    }
    const u64 route = u64{token} * c.top_k + min(lane, c.top_k - 1);
    const i32 id = a.topk_idx[route];
    const float weight = a.topk_weights[route];
    const auto for_each_destination = [&](auto visit) {
#pragma unroll
      for (u32 g = 0; g < kGroups; ++g) {
        for_each_bit(__ballot_sync(~0u, slots[g] != kNobody), [&](u32 bit) {
          visit(pass.nth_peer(32 * g + bit),
                PushPass<c>::slot(a.rank, __shfl_sync(~0u, slots[g], bit)));
        });
      }
    };
    for (u32 nth = 0; nth < HiddenBatch<c>::kPerRow; ++nth) {
      HiddenBatch<c> batch(nth);
      batch.load(a.x + token * row_bytes(c), kFromHere);
      for_each_destination([&](u32 destination, u32 slot) {
        batch.store(pass.recv_x(destination, slot), kToPeers);
      });
    }
    for_each_destination(
        [&](u32 destination, u32 slot) { send_meta(pass, destination, slot, id, weight); });
  }
  if (!pass.is_last_cta()) return;
  if (threadIdx.x < c.num_ranks) {
    ptx::st_relaxed_sys(pass.count_of(threadIdx.x, a.rank), a.num_sent[threadIdx.x]);
    pass.steps([](auto&& step) { step.publish_dispatched(threadIdx.x); });
  }
  pass.wait_all([](auto&& step, u32 source) { return step.wait_dispatched(source); });
}

}  // namespace mokbench
