// SPDX-License-Identifier: Apache-2.0
// Signaling rounds between ranks: hop, entry, and ready by pull and by push, with 16 bytes a peer.
// docs/metrics.md defines each quantity; host/signal_rank.cpp is the twin.
#pragma once

#include "ptx.cuh"

namespace mokbench {

constexpr u32 kSignalThreads = 128;  // one a peer, so as many as kMaxRanks

struct SignalArgs {
  char* segments[kMaxRanks];
  u32 rank;
  u32 ranks;   // that take part: 0 .. ranks - 1
  u32 rounds;
  u32 base;    // every counter of a finished call has reached it; calls advance it alike
  u64 wait_bound_ns;
  // [rounds] each, of this rank: hop and entry fill cycles, ready fills the times.
  u64* cycles;
  u64* start_ns;
  u64* arrived_ns;
  u64* ready_ns;
};

// Values a round uses up: the first for alignment, the second for the measured flag.
constexpr u32 kValuesPerRound = 2;

enum LocalCounter : u32 { kRaised, kObserved, kUnused };

struct SignalAgent {
  DeviceMemory memory;
  Agent<DeviceMemory> agent;

  __device__ __forceinline__ SignalAgent(const SignalArgs& a, u32 num_ranks, Role role)
      : agent{memory, a.segments, num_ranks, a.rank, role, a.base, a.wait_bound_ns} {}

  __device__ __forceinline__ void raise(u32 of_rank, Field field, u32 index, u32 value) {
    memory.store_release<Scope::kSystem>(agent.counter(of_rank, field, index), value);
  }
  __device__ __forceinline__ bool wait_peer(Field field, u32 peer, u32 value, Site site) {
    return wait_until<Scope::kSystem>(agent, agent.counter(agent.rank, field, peer), value,
                                      WaitSite{site, peer, peer});
  }
  __device__ __forceinline__ bool wait_local(const SignalLayout& l, u32 which, u32 value) {
    return wait_until<Scope::kLocal>(agent, agent.counter(agent.rank, l.local, which), value,
                                     WaitSite{Site::kSignal, which, agent.rank});
  }
};

// Round trip of a flag between ranks 0 and 1, in cycles of one SM; one thread.
template <u32 kNumRanks>
__global__ void __launch_bounds__(32, 1) signal_hop(const __grid_constant__ SignalArgs a) {
  if (threadIdx.x != 0 || a.rank > 1) return;
  constexpr SignalLayout layout = signal_layout(kNumRanks);
  SignalAgent self(a, kNumRanks, Role::kCaller);
  const u32 peer = 1 - a.rank;
  u64 started_ns = 0;
  u64 started_cycles = 0;
  // Round 0 waits for the peer's launch and is not a sample.
  for (u32 round = 0; round <= a.rounds; ++round) {
    const u32 value = a.base + round + 1;
    const u64 start = ptx::clock64_cycles();
    if (round == 1) {
      started_cycles = start;
      started_ns = ptx::globaltimer_ns();
    }
    if (a.rank == 0) self.raise(peer, layout.hop, 0, value);
    const bool arrived =
        wait_until<Scope::kSystem>(self.agent, self.agent.counter(a.rank, layout.hop, 0), value,
                                   WaitSite{Site::kSignal, 0, peer});
    if (!arrived) return;
    if (a.rank == 0 && round > 0) a.cycles[round - 1] = ptx::clock64_cycles() - start;
    if (a.rank == 1) self.raise(peer, layout.hop, 0, value);
  }
  // Cycles and time of the same rounds give the clock that turns one into the other.
  a.start_ns[0] = ptx::globaltimer_ns() - started_ns;
  a.ready_ns[0] = ptx::clock64_cycles() - started_cycles;
}

// The same between the first and the last CTA of one rank, at GPU scope.
template <u32 kNumRanks>
__global__ void __launch_bounds__(32, 1) signal_local_hop(const __grid_constant__ SignalArgs a) {
  const bool first = blockIdx.x == 0;
  if (threadIdx.x != 0 || !(first || blockIdx.x == gridDim.x - 1)) return;
  constexpr SignalLayout layout = signal_layout(kNumRanks);
  SignalAgent self(a, kNumRanks, first ? Role::kCaller : Role::kObserver);
  const u32 own = first ? kRaised : kObserved;
  const u32 other = first ? kObserved : kRaised;
  u64 started_ns = 0;
  u64 started_cycles = 0;
  for (u32 round = 0; round <= a.rounds; ++round) {
    const u32 value = a.base + round + 1;
    u32* raised = self.agent.counter(a.rank, layout.local, own);
    const u64 start = ptx::clock64_cycles();
    if (round == 1) {
      started_cycles = start;
      started_ns = ptx::globaltimer_ns();
    }
    if (first) self.memory.store_release<Scope::kLocal>(raised, value);
    if (!self.wait_local(layout, other, value)) return;
    if (first && round > 0) a.cycles[round - 1] = ptx::clock64_cycles() - start;
    if (!first) self.memory.store_release<Scope::kLocal>(raised, value);
  }
  if (!first) return;
  a.start_ns[0] = ptx::globaltimer_ns() - started_ns;
  a.ready_ns[0] = ptx::clock64_cycles() - started_cycles;
}

// Thread t of the CTA speaks with peer t (its own rank's thread has nothing to say). False on a
// fault, for all threads alike.
__device__ __forceinline__ bool speaks(const SignalArgs& a) {
  return threadIdx.x < a.ranks && threadIdx.x != a.rank;
}

// All ranks and threads of the calling CTAs leave together, a flag's travel apart.
__device__ __forceinline__ bool align_ranks(SignalAgent& self, const SignalArgs& a,
                                            const SignalLayout& layout, u32 value) {
  bool good = true;
  if (speaks(a)) {
    self.raise(threadIdx.x, layout.arrived, a.rank, value);
    good = self.wait_peer(layout.arrived, threadIdx.x, value, Site::kAlign);
  }
  return __syncthreads_and(good);
}

// From an aligned start until every peer's flag is here, in cycles of one SM.
template <u32 kNumRanks>
__global__ void __launch_bounds__(kSignalThreads, 1)
    signal_entry(const __grid_constant__ SignalArgs a) {
  if (a.rank >= a.ranks) return;
  constexpr SignalLayout layout = signal_layout(kNumRanks);
  SignalAgent self(a, kNumRanks, Role::kCaller);
  u64 started_ns = 0;
  u64 started_cycles = 0;
  for (u32 round = 0; round <= a.rounds; ++round) {
    const u32 value = a.base + kValuesPerRound * round + 1;
    if (!align_ranks(self, a, layout, value)) return;
    const u64 start = ptx::clock64_cycles();
    if (round == 1) {
      started_cycles = start;
      started_ns = ptx::globaltimer_ns();
    }
    bool good = true;
    if (speaks(a)) {
      self.raise(threadIdx.x, layout.entry, a.rank, value + 1);
      good = self.wait_peer(layout.entry, threadIdx.x, value + 1, Site::kEntry);
    }
    if (!__syncthreads_and(good)) return;
    if (threadIdx.x == 0 && round > 0) a.cycles[round - 1] = ptx::clock64_cycles() - start;
  }
  if (threadIdx.x != 0) return;
  a.start_ns[0] = ptx::globaltimer_ns() - started_ns;
  a.ready_ns[0] = ptx::clock64_cycles() - started_cycles;
}

enum class Transfer : u32 { kPull, kPush };

// CTA 0 moves 16 bytes a peer, CTA 1 is the compute role that waits for the tile: by the local
// counter that CTA 0 raises (pull), or by every peer's own flag (push). Times are globaltimer's,
// since they come from two SMs.
template <u32 kNumRanks, Transfer kTransfer>
__global__ void __launch_bounds__(kSignalThreads, 1)
    signal_ready(const __grid_constant__ SignalArgs a) {
  if (a.rank >= a.ranks) return;
  constexpr SignalLayout layout = signal_layout(kNumRanks);
  const bool moves = blockIdx.x == 0;
  SignalAgent self(a, kNumRanks, moves ? Role::kCaller : Role::kObserver);
  for (u32 round = 0; round <= a.rounds; ++round) {
    const u32 value = a.base + kValuesPerRound * round + 1;
    const bool good = moves ? move_payload<kNumRanks, kTransfer>(self, a, layout, round, value)
                            : observe<kNumRanks, kTransfer>(self, a, layout, round, value);
    if (!good) return;
  }
}

// A slot of 16 bytes in a counter's own line, so that no two ranks' payloads share one.
__device__ __forceinline__ SignalPayload* payload_of(const SignalAgent& self, u32 of_rank,
                                                     Field field, u32 round, u32 peer) {
  const u64 slot = u64{round % 2} * self.agent.num_ranks + peer;
  return reinterpret_cast<SignalPayload*>(self.agent.segments[of_rank] + field.offset +
                                          slot * kCounterBytes);
}
__device__ __forceinline__ void store_payload(SignalPayload* at, u64 stamp_ns, u32 round) {
  const ptx::Vec16 v{static_cast<u32>(stamp_ns), static_cast<u32>(stamp_ns >> 32), round, 0};
  ptx::st_relaxed_sys_v4(at, v);
}

template <u32 kNumRanks, Transfer kTransfer>
__device__ __forceinline__ bool move_payload(SignalAgent& self, const SignalArgs& a,
                                             const SignalLayout& layout, u32 round, u32 value) {
  // The observer has seen the round before, so its slots may be used again.
  bool good = true;
  if (threadIdx.x == 0 && round > 0) good = self.wait_local(layout, kObserved, value - 1);
  if (!__syncthreads_and(good)) return false;
  if (kTransfer == Transfer::kPull && speaks(a)) {
    store_payload(payload_of(self, a.rank, layout.outbox, round, threadIdx.x), 0, round);
  }
  if (!align_ranks(self, a, layout, value)) return false;
  if (threadIdx.x == 0 && round > 0) a.start_ns[round - 1] = ptx::globaltimer_ns();
  if (speaks(a)) {
    if (kTransfer == Transfer::kPush) {
      store_payload(payload_of(self, threadIdx.x, layout.inbox, round, a.rank),
                    ptx::globaltimer_ns(), round);
      self.raise(threadIdx.x, layout.entry, a.rank, value + 1);
    } else {
      const ptx::Vec16 got =
          ptx::ld_relaxed_sys_v4(payload_of(self, threadIdx.x, layout.outbox, round, a.rank));
      good = got.z == round;
      *payload_of(self, a.rank, layout.inbox, round, threadIdx.x) = {0, got.z};
    }
  }
  good = __syncthreads_and(good);
  if (kTransfer == Transfer::kPull && threadIdx.x == 0) {
    if (round > 0) a.arrived_ns[round - 1] = ptx::globaltimer_ns();
    self.memory.store_release<Scope::kLocal>(
        self.agent.counter(a.rank, layout.local, kRaised), value + 1);
  }
  return good;
}

template <u32 kNumRanks, Transfer kTransfer>
__device__ __forceinline__ bool observe(SignalAgent& self, const SignalArgs& a,
                                        const SignalLayout& layout, u32 round, u32 value) {
  __shared__ u64 last_stamp_ns;
  if (threadIdx.x == 0) last_stamp_ns = 0;
  __syncthreads();
  bool good = true;
  if (kTransfer == Transfer::kPull) {
    if (threadIdx.x == 0) good = self.wait_local(layout, kRaised, value + 1);
  } else if (speaks(a)) {
    good = self.wait_peer(layout.entry, threadIdx.x, value + 1, Site::kSignal);
    const ptx::Vec16 got =
        ptx::ld_relaxed_sys_v4(payload_of(self, a.rank, layout.inbox, round, threadIdx.x));
    good = good && got.z == round;
    atomicMax(&last_stamp_ns, got.x | u64{got.y} << 32);
  }
  good = __syncthreads_and(good);
  if (threadIdx.x == 0 && good) {
    if (round > 0) {
      a.ready_ns[round - 1] = ptx::globaltimer_ns();
      if (kTransfer == Transfer::kPush) a.arrived_ns[round - 1] = last_stamp_ns;
    }
    self.memory.store_release<Scope::kLocal>(
        self.agent.counter(a.rank, layout.local, kObserved), value + 1);
  }
  return good;
}

}  // namespace mokbench
