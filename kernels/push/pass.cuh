// SPDX-License-Identifier: Apache-2.0
// What the launches of a push pass share: their arguments, one thread's view of the pass, and how
// a warp moves rows. The epoch lives in device memory, so a captured graph replays.
// host/push_rank.cpp is the twin, docs/protocol.md the protocol.
#pragma once

#include "ptx.cuh"

namespace mokbench {

constexpr u32 kPushThreads = 512;
constexpr u32 kPushWarps = kPushThreads / 32;
constexpr u32 kVecElements = 8;  // BF16 of one 16-byte access
// 16-byte loads a lane keeps in flight. 16 warps of 8 are 64 KB an SM, twice what H200's memory
// needs at 4.2 TB/s and 1 us of latency under load (32 KB an SM).
constexpr u32 kMaxBatch = 8;

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
  u32* finished;     // CTAs of the present launch that are done
  u32* barrier;      // arrivals at grid barriers, monotonic
  u32* slot_of;      // [max_tokens][num_ranks] -> j there, or kNobody
  u32* num_sent;     // [num_ranks]
  u32* chunk_rows;   // [grid][local experts]
  u32* row_of;       // [num_ranks][max_tokens][K] -> row of x_rows, or kNobody
  i32* expert_ends;  // [local experts]: first row behind each expert's, for the GEMMs
  // [push_capacity_rows], sorted by expert.
  char* x_rows;         // [hidden]
  const char* gate_up;  // [2 * intermediate], the first GEMM's output
  char* activated;      // [intermediate]
  const char* y_rows;   // [hidden], the second GEMM's output
};

// One thread's view of the pass. `epoch` is the pass that push_plan began.
template <Config c>
struct PushPass {
  static constexpr PushLayout kLayout = push_layout(c);
  static constexpr u32 kLocalExperts = local_experts(c);
  static_assert(c.element_bytes == 2 && c.hidden % kVecElements == 0, "BF16 in 16-byte accesses");
  static_assert(c.top_k <= kMaxTopK && c.num_ranks <= kMaxRanks);

  const PushArgs& a;
  u32 epoch;

  __device__ __forceinline__ explicit PushPass(const PushArgs& args)
      : a(args), epoch(*args.epoch) {}

  // The protocol's steps for one thread. Made where they are taken, since a struct that refers to
  // its own members would live in local memory.
  template <class Take>
  __device__ __forceinline__ auto steps(Take take) const {
    DeviceMemory memory;
    Agent<DeviceMemory> agent{memory,        a.segments, c.num_ranks,    a.rank,
                              Role::kCaller, epoch,      a.wait_bound_ns};
    return take(PushSteps<DeviceMemory>{agent, kLayout});
  }

  // Whether an earlier launch of this rank left a fault: then there is nothing to work on. All
  // CTAs see the same, unless this launch itself waits.
  __device__ __forceinline__ bool faulted() const {
    const Header* header = reinterpret_cast<const Header*>(a.segments[a.rank]);
    return ptx::ld_relaxed_sys(&header->fault.state) != static_cast<u32>(FaultState::kNone);
  }
  // The n-th rank to send to: the next one first, to spread over the links.
  __device__ __forceinline__ u32 nth_peer(u32 n) const { return (a.rank + 1 + n) % c.num_ranks; }

  __device__ __forceinline__ char* at(u32 of_rank, Field field, u64 offset) const {
    return a.segments[of_rank] + field.offset + offset;
  }
  __device__ __forceinline__ u32* count_of(u32 of_rank, u32 source) const {
    const u64 slot = u64{epoch % 2} * c.num_ranks + source;
    return reinterpret_cast<u32*>(at(of_rank, kLayout.recv_count, slot * sizeof(u32)));
  }
  static __device__ __forceinline__ u32 slot(u32 source, u32 j) {
    return source * c.max_tokens + j;
  }
  // What one source sent: its row, and ids[K] and weights[K] behind the meta's first two words.
  __device__ __forceinline__ char* recv_x(u32 of_rank, u32 slot) const {
    return at(of_rank, kLayout.recv_x, slot * row_bytes(c));
  }
  __device__ __forceinline__ u32* meta(u32 of_rank, u32 slot) const {
    return reinterpret_cast<u32*>(at(of_rank, kLayout.recv_meta, slot * push_meta_bytes(c))) + 2;
  }
  // The sums that a destination gave back.
  __device__ __forceinline__ char* partial(u32 of_rank, u32 slot) const {
    return at(of_rank, kLayout.partial, slot * row_bytes(c));
  }

  // Thread r waits for peer r; false for the whole CTA when one wait expired.
  template <class Wait>
  __device__ __forceinline__ bool wait_all(Wait wait) const {
    bool good = true;
    if (threadIdx.x < c.num_ranks) {
      good = steps([&](auto&& step) { return wait(step, threadIdx.x); });
    }
    return __syncthreads_and(good);
  }

  // All threads: whether this CTA is the launch's last. Everything that any CTA wrote before it
  // is then ordered before what this CTA releases.
  __device__ __forceinline__ bool is_last_cta() const {
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
  // The grid must be the same in every pass.
  __device__ __forceinline__ bool grid_barrier(u32 nth, u32 barriers_per_pass) const {
    bool good = true;
    __syncthreads();
    if (threadIdx.x == 0) {
      const u32 expected = ((epoch - 1) * barriers_per_pass + nth) * gridDim.x;
      good = steps([&](auto&& step) {
        step.agent.memory.template fetch_add_release<Scope::kLocal>(a.barrier, 1);
        return wait_until<Scope::kLocal>(step.agent, a.barrier, expected,
                                         WaitSite{Site::kSchedule, nth, a.rank});
      });
    }
    return __syncthreads_and(good);
  }
};

// Rows received from source s begin at first[s] of the pass's received rows, sources in order of
// rank. Shared by the CTA.
template <Config c>
struct Received {
  u32 counts[c.num_ranks];
  u32 first[c.num_ranks + 1];

  __device__ __forceinline__ void load(const PushPass<c>& pass) {
    static_assert(c.num_ranks < kPushThreads, "one thread a source, and one for the total");
    if (threadIdx.x < c.num_ranks) {
      counts[threadIdx.x] = ptx::ld_relaxed_sys(pass.count_of(pass.a.rank, threadIdx.x));
    }
    __syncthreads();
    if (threadIdx.x <= c.num_ranks) {
      u32 before = 0;
      for (u32 source = 0; source < threadIdx.x; ++source) before += counts[source];
      first[threadIdx.x] = before;
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

// A part of a row as a warp moves it: kSize 16-byte accesses a lane, neighbouring lanes side by
// side, all loads in flight together. Lanes behind the row's end load its last bytes again and
// store nothing.
template <u32 kVecs, u32 kMaxSize = kMaxBatch>
struct RowBatch {
  static constexpr u32 kVecsPerLane = (kVecs + 31) / 32;
  static constexpr u32 kPerRow = (kVecsPerLane + kMaxSize - 1) / kMaxSize;
  static constexpr u32 kSize = (kVecsPerLane + kPerRow - 1) / kPerRow;
  static constexpr bool kWhole = kVecs == 32 * kSize * kPerRow;

  u32 first;
  ptx::Vec16 vecs[kSize];

  __device__ __forceinline__ explicit RowBatch(u32 nth)
      : first(nth * kSize * 32 + threadIdx.x % 32) {}

  template <class Load>
  __device__ __forceinline__ void load(const char* row, Load load_vec) {
#pragma unroll
    for (u32 i = 0; i < kSize; ++i) {
      const u32 vec = first + 32 * i;
      vecs[i] = load_vec(row + u64{kWhole ? vec : min(vec, kVecs - 1)} * sizeof(ptx::Vec16));
    }
  }
  template <class Store>
  __device__ __forceinline__ void store(char* row, Store store_vec) const {
#pragma unroll
    for (u32 i = 0; i < kSize; ++i) {
      const u32 vec = first + 32 * i;
      if (kWhole || vec < kVecs) store_vec(row + u64{vec} * sizeof(ptx::Vec16), vecs[i]);
    }
  }
};

template <Config c>
using HiddenBatch = RowBatch<c.hidden / kVecElements>;

// How batches are loaded and stored: rows that peers wrote or will read, with system scope.
constexpr auto kFromPeers = [](const char* at) { return ptx::ld_relaxed_sys_v4(at); };
constexpr auto kToPeers = [](char* at, ptx::Vec16 v) { ptx::st_relaxed_sys_v4(at, v); };
constexpr auto kFromHere = [](const char* at) { return ptx::ld_nc_no_allocate_v4(at); };
constexpr auto kToHere = [](char* at, ptx::Vec16 v) { *reinterpret_cast<ptx::Vec16*>(at) = v; };

// Calls visit(bit) for each set bit of a warp-uniform mask, lowest first.
template <class Visit>
__device__ __forceinline__ void for_each_bit(u32 mask, Visit visit) {
  for (; mask != 0; mask &= mask - 1) visit(static_cast<u32>(__ffs(mask) - 1));
}

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Eight running sums of one lane's 16 bytes of a row.
struct VecSum {
  float sum[kVecElements] = {};

  __device__ __forceinline__ void add(ptx::Vec16 v, float weight) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      sum[2 * i] += weight * bf16_low(words[i]);
      sum[2 * i + 1] += weight * bf16_high(words[i]);
    }
  }
  __device__ __forceinline__ ptx::Vec16 rounded() const {
    return {ptx::cvt_rn_bf16x2(sum[0], sum[1]), ptx::cvt_rn_bf16x2(sum[2], sum[3]),
            ptx::cvt_rn_bf16x2(sum[4], sum[5]), ptx::cvt_rn_bf16x2(sum[6], sum[7])};
  }
};

}  // namespace mokbench
