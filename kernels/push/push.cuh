// SPDX-License-Identifier: Apache-2.0
// The push baseline in five launches around the grouped GEMMs: plan, send, sort | GEMMs | give
// back, reduce. Each (token, rank) crosses once; no CPU synchronisation; the epoch lives in device
// memory, so a captured graph replays. host/push_rank.cpp is the twin, docs/protocol.md the
// protocol.
#pragma once

#include "ptx.cuh"

namespace mokbench {

constexpr u32 kPushThreads = 512;
constexpr u32 kPushWarps = kPushThreads / 32;
constexpr u32 kVecElements = 8;  // BF16 of one 16-byte access

struct PushArgs {
  char* segments[kMaxRanks];
  u32 rank;
  u32 num_tokens;
  u64 wait_bound_ns;
  const char* x;              // [T, hidden]
  const i32* topk_idx;        // [T, K], -1 is masked
  const float* topk_weights;  // [T, K]
  char* y;                    // [T, hidden]
  // Scratch of this rank, zeroed before the first pass.
  u32* epoch;
  u32* finished;       // CTAs of the present launch that are done
  u32* barrier;        // arrivals at grid barriers, monotonic
  u32* slot_of;        // [max_tokens][num_ranks] -> j there, or kNobody
  u32* num_sent;       // [num_ranks]
  u32* chunk_rows;     // [grid][local experts]
  u32* row_of;         // [num_ranks][max_tokens][K] -> row of x_rows
  i32* expert_ends;    // [local experts]: first row behind each expert's, for the GEMMs
  char* x_rows;        // [push_capacity_rows, hidden], sorted by expert
  const char* y_rows;  // the GEMMs' output, same rows
};

// One thread's view of the pass. `epoch` is the pass that push_plan began.
template <Config c>
struct PushPass {
  static constexpr PushLayout kLayout = push_layout(c);
  static constexpr u32 kLocalExperts = local_experts(c);
  static constexpr u32 kVecs = c.hidden / kVecElements;
  static_assert(c.element_bytes == 2, "BF16 only");

  DeviceMemory& memory;
  const PushArgs& a;
  Agent<DeviceMemory> agent;

  // `own_memory` lives outside, and steps are made anew: a pass that referred into itself would be
  // kept in local memory, and each access to a segment would begin with loads of its address.
  __device__ __forceinline__ PushPass(DeviceMemory& own_memory, const PushArgs& args)
      : memory(own_memory), a(args), agent{own_memory,        args.segments, c.num_ranks,
                                           args.rank,         Role::kCaller, *args.epoch,
                                           args.wait_bound_ns} {}

  __device__ __forceinline__ PushSteps<DeviceMemory> steps() { return {agent, kLayout}; }

  __device__ __forceinline__ char* at(u32 of_rank, Field field, u64 offset) const {
    return a.segments[of_rank] + field.offset + offset;
  }
  __device__ __forceinline__ u32* count_of(u32 of_rank, u32 source) const {
    const u64 slot = u64{agent.epoch % 2} * c.num_ranks + source;
    return reinterpret_cast<u32*>(at(of_rank, kLayout.recv_count, slot * sizeof(u32)));
  }
  // What one source sent: its row, and ids[K] and weights[K] behind the meta's first two words.
  __device__ __forceinline__ char* recv_x(u32 of_rank, u32 source, u32 j) const {
    return at(of_rank, kLayout.recv_x, (u64{source} * c.max_tokens + j) * row_bytes(c));
  }
  __device__ __forceinline__ u32* meta(u32 of_rank, u32 source, u32 j) const {
    const u64 slot = u64{source} * c.max_tokens + j;
    return reinterpret_cast<u32*>(at(of_rank, kLayout.recv_meta, slot * push_meta_bytes(c))) + 2;
  }
  __device__ __forceinline__ char* partial(u32 of_rank, u32 destination, u32 j) const {
    return at(of_rank, kLayout.partial, (u64{destination} * c.max_tokens + j) * row_bytes(c));
  }

  // Thread r waits for peer r; false for the whole CTA when one wait expired.
  template <class Wait>
  __device__ __forceinline__ bool wait_all(Wait wait) {
    bool good = true;
    if (threadIdx.x < c.num_ranks) good = wait(threadIdx.x);
    return __syncthreads_and(good);
  }

  // All threads: whether this CTA is the launch's last. Everything that any CTA wrote before it
  // is then ordered before what this CTA releases.
  __device__ __forceinline__ bool is_last_cta() {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      last = ptx::atom_add_acq_rel_gpu(a.finished, 1) == gridDim.x - 1;
      if (last) *a.finished = 0;
    }
    __syncthreads();
    return last;
  }

  // Every CTA of a cooperative launch has arrived; `nth` counts the barriers of the launch from 1.
  __device__ __forceinline__ bool grid_barrier(u32 nth, u32 barriers_per_pass) {
    bool good = true;
    __syncthreads();
    if (threadIdx.x == 0) {
      memory.fetch_add_release<Scope::kLocal>(a.barrier, 1);
      const u32 expected = ((agent.epoch - 1) * barriers_per_pass + nth) * gridDim.x;
      good = wait_until<Scope::kLocal>(agent, a.barrier, expected,
                                       WaitSite{Site::kSchedule, nth, agent.rank});
    }
    return __syncthreads_and(good);
  }
};

__device__ __forceinline__ ptx::Vec16* vecs(char* row) {
  return reinterpret_cast<ptx::Vec16*>(row);
}
__device__ __forceinline__ const ptx::Vec16* vecs(const char* row) {
  return reinterpret_cast<const ptx::Vec16*>(row);
}

// Eight running sums of one lane's 16 bytes of a row.
struct VecSum {
  float sum[kVecElements] = {};

  __device__ __forceinline__ void add(ptx::Vec16 v, float weight) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      sum[2 * i] += weight * __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += weight * __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ __forceinline__ ptx::Vec16 rounded() const {
    return {ptx::cvt_rn_bf16x2(sum[0], sum[1]), ptx::cvt_rn_bf16x2(sum[2], sum[3]),
            ptx::cvt_rn_bf16x2(sum[4], sum[5]), ptx::cvt_rn_bf16x2(sum[6], sum[7])};
  }
};

// Exclusive prefix over the CTA of one flag a thread; `total` is the number of set flags.
__device__ __forceinline__ u32 prefix_of_flag(bool flag, u32& total) {
  __shared__ u32 warp_counts[kPushWarps];
  const u32 lane = threadIdx.x % 32;
  const u32 votes = __ballot_sync(~0u, flag);
  __syncthreads();
  if (lane == 0) warp_counts[threadIdx.x / 32] = __popc(votes);
  __syncthreads();
  u32 before = 0;
  total = 0;
  for (u32 warp = 0; warp < kPushWarps; ++warp) {
    if (warp < threadIdx.x / 32) before += warp_counts[warp];
    total += warp_counts[warp];
  }
  return before + __popc(votes & ((1u << lane) - 1));
}

// CTA d numbers the tokens that go to rank d, in token order; begins the pass. Grid: num_ranks.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1) push_plan(const __grid_constant__ PushArgs a) {
  const u32 destination = blockIdx.x;
  u32 num_rows = 0;
  for (u32 first = 0; first < a.num_tokens; first += kPushThreads) {
    const u32 token = first + threadIdx.x;
    bool goes = false;
    if (token < a.num_tokens) {
      for (u32 k = 0; k < c.top_k; ++k) {
        // A masked id is far above any expert once unsigned.
        const u32 expert = static_cast<u32>(a.topk_idx[u64{token} * c.top_k + k]);
        goes = goes || expert - destination * local_experts(c) < local_experts(c);
      }
    }
    u32 total = 0;
    const u32 j = num_rows + prefix_of_flag(goes, total);
    if (token < a.num_tokens) {
      a.slot_of[u64{token} * c.num_ranks + destination] = goes ? j : kNobody;
    }
    num_rows += total;
  }
  if (threadIdx.x == 0) a.num_sent[destination] = num_rows;
  if (threadIdx.x == 0 && destination == 0) *a.epoch += 1;
}

// A warp a token: its row to every rank that wants it, once, with ids and weights; then one count
// and flag a rank. Any grid.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1) push_send(const __grid_constant__ PushArgs a) {
  using Pass = PushPass<c>;
  DeviceMemory memory;
  Pass pass(memory, a);
  const u32 lane = threadIdx.x % 32;
  const u32 num_warps = gridDim.x * kPushWarps;
  for (u32 token = blockIdx.x * kPushWarps + threadIdx.x / 32; token < a.num_tokens;
       token += num_warps) {
    const u32* slots = a.slot_of + u64{token} * c.num_ranks;
    const ptx::Vec16* row = vecs(a.x + token * row_bytes(c));
    for (u32 vec = lane; vec < Pass::kVecs; vec += 32) {
      const ptx::Vec16 value = row[vec];
      for (u32 n = 0; n < c.num_ranks; ++n) {
        const u32 destination = (a.rank + 1 + n) % c.num_ranks;  // spread over the links
        if (slots[destination] == kNobody) continue;
        ptx::st_relaxed_sys_v4(vecs(pass.recv_x(destination, a.rank, slots[destination])) + vec,
                               value);
      }
    }
    if (lane >= c.top_k) continue;
    const i32 id = a.topk_idx[u64{token} * c.top_k + lane];
    const float weight = a.topk_weights[u64{token} * c.top_k + lane];
    for (u32 destination = 0; destination < c.num_ranks; ++destination) {
      if (slots[destination] == kNobody) continue;
      u32* meta = pass.meta(destination, a.rank, slots[destination]);
      const bool there =
          static_cast<u32>(id) - destination * Pass::kLocalExperts < Pass::kLocalExperts;
      ptx::st_relaxed_sys(meta + lane, there ? static_cast<u32>(id) : kNobody);
      ptx::st_relaxed_sys(meta + c.top_k + lane, __float_as_uint(weight));
    }
  }
  if (!pass.is_last_cta() || threadIdx.x >= c.num_ranks) return;
  ptx::st_relaxed_sys(pass.count_of(threadIdx.x, a.rank), a.num_sent[threadIdx.x]);
  pass.steps().publish_dispatched(threadIdx.x);
}

// Rows received from source s begin at first[s] of the pass's received rows, sources in order of
// rank. Shared by the CTA.
template <Config c>
struct Received {
  u32 first[c.num_ranks + 1];

  __device__ __forceinline__ void load(PushPass<c>& pass) {
    if (threadIdx.x == 0) {
      first[0] = 0;
      for (u32 source = 0; source < c.num_ranks; ++source) {
        first[source + 1] = first[source] + ptx::ld_relaxed_sys(pass.count_of(pass.a.rank, source));
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ u32 num_rows() const { return first[c.num_ranks]; }
  __device__ __forceinline__ u32 source_of(u32 row) const {
    u32 source = 0;
    while (row >= first[source + 1]) ++source;
    return source;
  }
};

constexpr u32 kSortBarriers = 1;

// Waits for all rows and copies each to its place among its expert's: count, prefix, stable
// placement by CTA-sized chunks of received rows. Cooperative, any grid.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1) push_sort(const __grid_constant__ PushArgs a) {
  using Pass = PushPass<c>;
  static_assert(Pass::kLocalExperts <= kPushThreads, "one thread an expert");
  DeviceMemory memory;
  Pass pass(memory, a);
  __shared__ Received<c> received;
  __shared__ u32 next_row[kPushThreads];
  const auto wait = [&](u32 source) { return pass.steps().wait_dispatched(source); };
  if (!pass.wait_all(wait)) return;
  received.load(pass);
  const u32 chunk = (received.num_rows() + gridDim.x - 1) / gridDim.x;
  const u32 begin = min(blockIdx.x * chunk, received.num_rows());
  const u32 end = min(begin + chunk, received.num_rows());
  const u32 first_expert = a.rank * Pass::kLocalExperts;
  const u32 expert = threadIdx.x;
  const auto for_own_routes = [&](auto visit) {
    for (u32 row = begin; row < end; ++row) {
      const u32 source = received.source_of(row);
      const u32 j = row - received.first[source];
      const u32* ids = pass.meta(a.rank, source, j);
      for (u32 k = 0; k < c.top_k; ++k) {
        if (ptx::ld_relaxed_sys(ids + k) == first_expert + expert) visit(source, j, k);
      }
    }
  };
  u32 num_rows = 0;
  if (expert < Pass::kLocalExperts) {
    for_own_routes([&](u32, u32, u32) { ++num_rows; });
    a.chunk_rows[blockIdx.x * Pass::kLocalExperts + expert] = num_rows;
  }
  if (!pass.grid_barrier(1, kSortBarriers)) return;
  // Rows of this expert in earlier chunks, and of all earlier experts.
  u32 before = 0;
  u32 total = 0;
  if (expert < Pass::kLocalExperts) {
    for (u32 cta = 0; cta < gridDim.x; ++cta) {
      const u32 rows = a.chunk_rows[cta * Pass::kLocalExperts + expert];
      if (cta < blockIdx.x) before += rows;
      total += rows;
    }
  }
  next_row[threadIdx.x] = total;
  __syncthreads();
  u32 first_row = 0;
  for (u32 e = 0; e < expert && e < Pass::kLocalExperts; ++e) first_row += next_row[e];
  if (expert < Pass::kLocalExperts) {
    if (blockIdx.x == 0) a.expert_ends[expert] = static_cast<i32>(first_row + total);
    u32 row = first_row + before;
    for_own_routes([&](u32 source, u32 j, u32 k) {
      a.row_of[(u64{source} * c.max_tokens + j) * c.top_k + k] = row++;
    });
  }
  __syncthreads();
  const u32 lane = threadIdx.x % 32;
  for (u32 row = begin + threadIdx.x / 32; row < end; row += kPushWarps) {
    const u32 source = received.source_of(row);
    const u32 j = row - received.first[source];
    const u32* ids = pass.meta(a.rank, source, j);
    const ptx::Vec16* from = vecs(pass.recv_x(a.rank, source, j));
    for (u32 vec = lane; vec < Pass::kVecs; vec += 32) {
      const ptx::Vec16 value = ptx::ld_relaxed_sys_v4(from + vec);
      for (u32 k = 0; k < c.top_k; ++k) {
        if (ptx::ld_relaxed_sys(ids + k) == kNobody) continue;
        const u32 to = a.row_of[(u64{source} * c.max_tokens + j) * c.top_k + k];
        vecs(a.x_rows + to * row_bytes(c))[vec] = value;
      }
    }
  }
}

// A warp a received row: the weighted sum over its local experts, back to its source's slot; then
// one flag a source. Any grid.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1)
    push_give_back(const __grid_constant__ PushArgs a) {
  using Pass = PushPass<c>;
  DeviceMemory memory;
  Pass pass(memory, a);
  __shared__ Received<c> received;
  received.load(pass);
  const u32 lane = threadIdx.x % 32;
  for (u32 row = blockIdx.x * kPushWarps + threadIdx.x / 32; row < received.num_rows();
       row += gridDim.x * kPushWarps) {
    const u32 source = received.source_of(row);
    const u32 j = row - received.first[source];
    const u32* ids = pass.meta(a.rank, source, j);
    const u32* rows = a.row_of + (u64{source} * c.max_tokens + j) * c.top_k;
    ptx::Vec16* to = vecs(pass.partial(source, a.rank, j));
    for (u32 vec = lane; vec < Pass::kVecs; vec += 32) {
      VecSum sum;
      for (u32 k = 0; k < c.top_k; ++k) {
        if (ptx::ld_relaxed_sys(ids + k) == kNobody) continue;
        const float weight = __uint_as_float(ptx::ld_relaxed_sys(ids + c.top_k + k));
        sum.add(vecs(a.y_rows + rows[k] * row_bytes(c))[vec], weight);
      }
      ptx::st_relaxed_sys_v4(to + vec, sum.rounded());
    }
  }
  if (!pass.is_last_cta() || threadIdx.x >= c.num_ranks) return;
  pass.steps().publish_combined(threadIdx.x);
}

// A warp a token: the sum of the partial sums of all ranks, in order of rank. Any grid.
template <Config c>
__global__ void __launch_bounds__(kPushThreads, 1) push_reduce(const __grid_constant__ PushArgs a) {
  using Pass = PushPass<c>;
  DeviceMemory memory;
  Pass pass(memory, a);
  const auto wait = [&](u32 destination) {
    return a.num_sent[destination] == 0 || pass.steps().wait_combined(destination);
  };
  if (!pass.wait_all(wait)) return;
  const u32 lane = threadIdx.x % 32;
  for (u32 token = blockIdx.x * kPushWarps + threadIdx.x / 32; token < a.num_tokens;
       token += gridDim.x * kPushWarps) {
    const u32* slots = a.slot_of + u64{token} * c.num_ranks;
    for (u32 vec = lane; vec < Pass::kVecs; vec += 32) {
      VecSum sum;
      for (u32 destination = 0; destination < c.num_ranks; ++destination) {
        if (slots[destination] == kNobody) continue;
        const char* from = pass.partial(a.rank, destination, slots[destination]);
        sum.add(ptx::ld_relaxed_sys_v4(from + vec * sizeof(ptx::Vec16)), 1.0f);
      }
      vecs(a.y + token * row_bytes(c))[vec] = sum.rounded();
    }
  }
}

}  // namespace mokbench
