// SPDX-License-Identifier: Apache-2.0
// Signaling rounds between ranks: hop, entry, and ready by pull and by push, with 16 bytes a peer.
// docs/metrics.md defines each quantity; host/signal_rank.cpp is the twin.
#pragma once

#include "ptx.cuh"

namespace mokbench {

// Exchanges of one calibration between the clocks of two SMs.
constexpr u32 kNumPings = 256;
// Ticks of the GPU's timer that each of them notes, and looks at the timer until it gives up.
constexpr u32 kNumTicks = 128;
constexpr u32 kMaxTickLooks = 1 << 14;

// Threads that speak with peers, one a peer and whole warps: barriers wait for no idle warp.
constexpr u32 peer_threads(u32 num_ranks) { return (num_ranks + 31) / 32 * 32; }

// All arrays are this rank's. Clocks are clock64's of the SM that read them: only differences of
// the same SM mean anything, or of two SMs whose offset is known (fabric/clock_offset.py).
struct SignalArgs {
  char* segments[kMaxRanks];
  u32 rank;
  u32 ranks;   // that take part: 0 .. ranks - 1
  u32 rounds;  // at least 1
  u32 base;    // every counter of a finished call has reached it; calls advance it alike
  u64 wait_bound_ns;
  u64* clock;    // [2]: ns, and cycles of the same time
  u64* cycles;   // [rounds]: hop, local hop and entry
  u64* started;  // [rounds]: ready, by the mover's clock
  u64* arrived;  // [rounds]: ready, by the mover's clock (pull) or the observer's (push)
  u64* ready;    // [rounds]: ready, by the observer's clock
  // [2][kNumPings], before and behind the rounds: sent and back by the mover's clock, seen by the
  // observer's.
  u64* ping_sent;
  u64* ping_seen;
  u64* ping_back;
  // [2][2][kNumTicks], before and behind the rounds, by the mover and by the observer: what the
  // timer showed, and between which of the SM's clocks it began to; 0 if never.
  u64* tick_ns;
  u64* tick_low;
  u64* tick_high;
};

// Values a round uses up: the first for alignment, the second for the measured flag.
constexpr u32 kValuesPerRound = 2;

enum LocalCounter : u32 { kRaised, kObserved, kUnused };

// A round never gets to the part of a wait that looks at faults and sleeps, unless a rank is some
// milliseconds late: that part would be seen in the times.
struct SignalMemory : DeviceMemory {
  static constexpr u32 kNumSpins = 4096;
};

// `memory` lives outside: an agent that refers into itself is kept in local memory, and each access
// of a counter then begins with loads of its address.
struct SignalAgent {
  SignalMemory& memory;
  Agent<SignalMemory> agent;

  __device__ __forceinline__ SignalAgent(SignalMemory& own_memory, const SignalArgs& a,
                                         u32 num_ranks, Role role)
      : memory(own_memory),
        agent{own_memory, a.segments, num_ranks, a.rank, role, a.base, a.wait_bound_ns} {}

  __device__ __forceinline__ void raise(u32 of_rank, Field field, u32 index, u32 value) {
    memory.store_release<Scope::kSystem>(agent.counter(of_rank, field, index), value);
  }
  __device__ __forceinline__ bool wait_peer(Field field, u32 peer, u32 value, Site site) {
    return wait_until<Scope::kSystem>(agent, agent.counter(agent.rank, field, peer), value,
                                      WaitSite{site, peer, peer});
  }
  __device__ __forceinline__ u32* local_counter(const SignalLayout& l, u32 which) const {
    return agent.counter(agent.rank, l.local, which);
  }
  __device__ __forceinline__ void raise_local(const SignalLayout& l, u32 which, u32 value) {
    memory.store_release<Scope::kLocal>(local_counter(l, which), value);
  }
  __device__ __forceinline__ bool wait_local(const SignalLayout& l, u32 which, u32 value) {
    return wait_until<Scope::kLocal>(agent, local_counter(l, which), value,
                                     WaitSite{Site::kSignal, which, agent.rank});
  }
};

// What turns cycles of one SM into time: both clocks over the same rounds.
struct CallClock {
  u64 began_ns = 0;
  u64 began_cycles = 0;

  __device__ __forceinline__ void begin() {
    began_ns = ptx::globaltimer_ns();
    began_cycles = ptx::clock64_cycles();
  }
  __device__ __forceinline__ void end(const SignalArgs& a) const {
    a.clock[0] = ptx::globaltimer_ns() - began_ns;
    a.clock[1] = ptx::clock64_cycles() - began_cycles;
  }
};

// A round's sample is stored behind the next round's flag: the flag's release would wait for it.
struct Samples {
  u64* cycles;
  u64 last = 0;

  __device__ __forceinline__ void store_before(u32 round) const {
    if (round > 1) cycles[round - 2] = last;
  }
};

// Round trip of a flag between ranks 0 and 1, in cycles of one SM; one thread.
template <u32 kNumRanks>
__global__ void __launch_bounds__(32, 1) signal_hop(const __grid_constant__ SignalArgs a) {
  if (threadIdx.x != 0 || a.rank > 1) return;
  // Not constexpr: NVRTC keeps such a struct in global memory where it is passed on.
  const SignalLayout layout = signal_layout(kNumRanks);
  SignalMemory memory;
  SignalAgent self(memory, a, kNumRanks, Role::kCaller);
  const u32 peer = 1 - a.rank;
  CallClock clock;
  Samples samples{a.cycles};
  // Round 0 waits for the peer's launch and is not a sample.
  for (u32 round = 0; round <= a.rounds; ++round) {
    const u32 value = a.base + round + 1;
    if (round == 1) clock.begin();
    const u64 start = ptx::clock64_cycles();
    if (a.rank == 0) {
      self.raise(peer, layout.hop, 0, value);
      samples.store_before(round);
    }
    const bool arrived =
        wait_until<Scope::kSystem>(self.agent, self.agent.counter(a.rank, layout.hop, 0), value,
                                   WaitSite{Site::kSignal, 0, peer});
    if (!arrived) return;
    samples.last = ptx::clock64_cycles() - start;
    if (a.rank == 1) self.raise(peer, layout.hop, 0, value);
  }
  if (a.rank == 0) samples.store_before(a.rounds + 1);
  clock.end(a);
}

// The same between the first and the last CTA of one rank, at GPU scope.
template <u32 kNumRanks>
__global__ void __launch_bounds__(32, 1) signal_local_hop(const __grid_constant__ SignalArgs a) {
  const bool first = blockIdx.x == 0;
  if (threadIdx.x != 0 || !(first || blockIdx.x == gridDim.x - 1)) return;
  const SignalLayout layout = signal_layout(kNumRanks);
  SignalMemory memory;
  SignalAgent self(memory, a, kNumRanks, first ? Role::kCaller : Role::kObserver);
  CallClock clock;
  Samples samples{a.cycles};
  for (u32 round = 0; round <= a.rounds; ++round) {
    const u32 value = a.base + round + 1;
    if (round == 1) clock.begin();
    const u64 start = ptx::clock64_cycles();
    if (first) {
      self.raise_local(layout, kRaised, value);
      samples.store_before(round);
    }
    if (!self.wait_local(layout, first ? kObserved : kRaised, value)) return;
    samples.last = ptx::clock64_cycles() - start;
    if (!first) self.raise_local(layout, kObserved, value);
  }
  if (!first) return;
  samples.store_before(a.rounds + 1);
  clock.end(a);
}

// Thread t of the CTA speaks with peer t; its own rank's thread has nothing to say.
__device__ __forceinline__ bool speaks(const SignalArgs& a, u32 peer) {
  return peer < a.ranks && peer != a.rank;
}

// All ranks and threads of the calling CTAs leave together, a flag's travel apart. False on a
// fault, for all threads alike.
__device__ __forceinline__ bool align_ranks(SignalAgent& self, const SignalArgs& a,
                                            const SignalLayout& layout, u32 value) {
  bool good = true;
  if (speaks(a, threadIdx.x)) {
    self.raise(threadIdx.x, layout.arrived, a.rank, value);
    good = self.wait_peer(layout.arrived, threadIdx.x, value, Site::kAlign);
  }
  return __syncthreads_and(good);
}

// From an aligned start until every peer's flag is here, in cycles of one SM.
template <u32 kNumRanks>
__global__ void __launch_bounds__(peer_threads(kNumRanks), 1)
    signal_entry(const __grid_constant__ SignalArgs a) {
  if (a.rank >= a.ranks) return;
  const SignalLayout layout = signal_layout(kNumRanks);
  SignalMemory memory;
  SignalAgent self(memory, a, kNumRanks, Role::kCaller);
  CallClock clock;
  for (u32 round = 0; round <= a.rounds; ++round) {
    const u32 value = a.base + kValuesPerRound * round + 1;
    if (!align_ranks(self, a, layout, value)) return;
    if (round == 1) clock.begin();
    const u64 start = ptx::clock64_cycles();
    bool good = true;
    if (speaks(a, threadIdx.x)) {
      self.raise(threadIdx.x, layout.entry, a.rank, value + 1);
      good = self.wait_peer(layout.entry, threadIdx.x, value + 1, Site::kEntry);
    }
    if (!__syncthreads_and(good)) return;
    if (threadIdx.x == 0 && round > 0) a.cycles[round - 1] = ptx::clock64_cycles() - start;
  }
  if (threadIdx.x == 0) clock.end(a);
}

enum class Transfer : u32 { kPull, kPush };

// Of both CTAs of signal_ready: by push, as many threads again watch the payload.
constexpr u32 ready_threads(u32 num_ranks, Transfer transfer) {
  return peer_threads(num_ranks) * (transfer == Transfer::kPush ? 2 : 1);
}

// One CTA's part of signal_ready. `exchange` numbers what the two CTAs tell each other through the
// local counters, from a.base + 1: the pings before, one a round, the pings behind.
template <u32 kNumRanks, Transfer kTransfer>
struct ReadyRounds {
  SignalAgent& self;
  const SignalArgs& a;
  const SignalLayout layout;
  u32 exchange;

  // A slot of 16 bytes in a counter's own line, so that no two ranks' payloads share one. The
  // round's mark is its third word.
  __device__ __forceinline__ ptx::Vec16* payload(u32 of_rank, Field field, u32 round,
                                                 u32 peer) const {
    const u64 slot = u64{round % 2} * kNumRanks + peer;
    return reinterpret_cast<ptx::Vec16*>(a.segments[of_rank] + field.offset + slot * kCounterBytes);
  }

  // The mover's side of a calibration; samples are stored behind the flags, as in Samples. One
  // thread.
  __device__ __forceinline__ bool send_pings(u32 calibration) {
    u64* sent = a.ping_sent + calibration * kNumPings;
    u64* back = a.ping_back + calibration * kNumPings;
    u64 back_at = 0;
    for (u32 ping = 0; ping < kNumPings; ++ping) {
      const u64 sent_at = ptx::clock64_cycles();
      self.raise_local(layout, kRaised, ++exchange);
      sent[ping] = sent_at;
      if (ping > 0) back[ping - 1] = back_at;
      if (!self.wait_local(layout, kObserved, exchange)) return false;
      back_at = ptx::clock64_cycles();
    }
    back[kNumPings - 1] = back_at;
    return true;
  }
  // The observer's: one stamp is both its receipt and its answer, since the answer follows at once.
  __device__ __forceinline__ bool answer_pings(u32 calibration) {
    u64* seen = a.ping_seen + calibration * kNumPings;
    for (u32 ping = 0; ping < kNumPings; ++ping) {
      if (!self.wait_local(layout, kRaised, ++exchange)) return false;
      const u64 seen_at = ptx::clock64_cycles();
      self.raise_local(layout, kObserved, exchange);
      seen[ping] = seen_at;
    }
    return true;
  }

  // When the timer, which all SMs share, ticked by this SM's clock. The tick was behind the look
  // before, since that showed the old time, and before the end of the one that showed the new.
  __device__ __forceinline__ void note_ticks(u32 calibration, u32 side) const {
    const u32 first = (calibration * 2 + side) * kNumTicks;
    u64 low = ptx::clock64_cycles();
    u64 shown = ptx::globaltimer_ns();
    u32 tick = 0;
    for (u32 look = 0; look < kMaxTickLooks && tick < kNumTicks; ++look) {
      const u64 begun = ptx::clock64_cycles();
      const u64 now = ptx::globaltimer_ns();
      const u64 high = ptx::clock64_cycles();
      if (now != shown) {
        a.tick_ns[first + tick] = now;
        a.tick_low[first + tick] = low;
        a.tick_high[first + tick] = high;
        ++tick;
      }
      low = begun;
      shown = now;
    }
  }

  // Moves 16 bytes a peer and waits until the observer has seen them. By pull `arrived` is when
  // the bytes are in this rank's memory and the local counter is about to be raised: the fence and
  // the store behind it are the two halves of a release.
  __device__ __forceinline__ bool move(u32 round, u32 mark) {
    const u32 peer = threadIdx.x;
    bool good = true;
    if (kTransfer == Transfer::kPull && speaks(a, peer)) {
      ptx::st_relaxed_sys_v4(payload(a.rank, layout.outbox, round, peer), {0, 0, mark, 0});
    }
    if (!align_ranks(self, a, layout, mark)) return false;
    const u64 started = ptx::clock64_cycles();
    if (speaks(a, peer)) {
      if (kTransfer == Transfer::kPush) {
        ptx::st_relaxed_sys_v4(payload(peer, layout.inbox, round, a.rank), {0, 0, mark, 0});
        self.raise(peer, layout.entry, a.rank, mark + 1);
      } else {
        const ptx::Vec16 got = ptx::ld_relaxed_sys_v4(payload(peer, layout.outbox, round, a.rank));
        ptx::st_relaxed_sys_v4(payload(a.rank, layout.inbox, round, peer), got);
        good = got.z == mark;
      }
    }
    ++exchange;
    if (kTransfer == Transfer::kPull) good = __syncthreads_and(good);
    if (threadIdx.x == 0 && good) {
      u64 arrived = 0;
      if (kTransfer == Transfer::kPull) {
        ptx::fence_acq_rel_gpu();
        arrived = ptx::clock64_cycles();
        ptx::st_relaxed_gpu(self.local_counter(layout, kRaised), exchange);
      }
      if (round > 0) {
        a.started[round - 1] = started;
        if (kTransfer == Transfer::kPull) a.arrived[round - 1] = arrived;
      }
      good = self.wait_local(layout, kObserved, exchange);
    }
    return __syncthreads_and(good);
  }

  // By pull one thread waits for the local counter and is the compute role.
  __device__ __forceinline__ bool observe_pull(u32 round) {
    ++exchange;
    bool good = true;
    if (threadIdx.x == 0) {
      good = self.wait_local(layout, kRaised, exchange);
      const u64 ready = ptx::clock64_cycles();
      if (good) self.raise_local(layout, kObserved, exchange);
      if (good && round > 0) a.ready[round - 1] = ready;
    }
    return __syncthreads_and(good);
  }

  // By push the first threads wait for the peers' flags and are the compute role; the others see
  // the payloads themselves arrive, by the same SM's clock.
  __device__ __forceinline__ bool observe_push(u32 round, u32 mark) {
    __shared__ u64 latest[2];  // flag, payload
    if (threadIdx.x == 0) latest[0] = latest[1] = 0;
    ++exchange;
    __syncthreads();
    const u32 watches = threadIdx.x / peer_threads(kNumRanks);
    const u32 peer = threadIdx.x % peer_threads(kNumRanks);
    bool good = true;
    ptx::Vec16* from = payload(a.rank, layout.inbox, round, peer);
    if (speaks(a, peer)) {
      u32* awaited = watches == 0 ? self.agent.counter(a.rank, layout.entry, peer) : &from->z;
      good = wait_until<Scope::kSystem>(self.agent, awaited, watches == 0 ? mark + 1 : mark,
                                        WaitSite{Site::kSignal, peer, peer});
    }
    __syncwarp();
    const u64 seen = ptx::clock64_cycles();
    if (speaks(a, peer)) {
      atomicMax(&latest[watches], seen);
      good = good && ptx::ld_relaxed_sys_v4(from).z == mark;
    }
    good = __syncthreads_and(good);
    if (threadIdx.x == 0 && good) {
      self.raise_local(layout, kObserved, exchange);
      if (round > 0) {
        a.ready[round - 1] = latest[0];
        a.arrived[round - 1] = latest[1];
      }
    }
    return good;
  }
};

// The first CTA moves 16 bytes a peer, the last is the compute role that waits for the tile: by
// the local counter that the first raises (pull), or by every peer's own flag (push). They are the
// CTAs of signal_local_hop. Cooperative.
template <u32 kNumRanks, Transfer kTransfer>
__global__ void __launch_bounds__(ready_threads(kNumRanks, kTransfer), 1)
    signal_ready(const __grid_constant__ SignalArgs a) {
  const bool moves = blockIdx.x == 0;
  if (a.rank >= a.ranks || !(moves || blockIdx.x == gridDim.x - 1)) return;
  SignalMemory memory;
  SignalAgent self(memory, a, kNumRanks, moves ? Role::kCaller : Role::kObserver);
  ReadyRounds<kNumRanks, kTransfer> rounds{self, a, signal_layout(kNumRanks), a.base};
  const auto calibrate = [&](u32 nth) {
    bool good = true;
    if (threadIdx.x == 0) {
      // The ticks next to the rounds.
      if (nth == 1) rounds.note_ticks(nth, moves ? 0 : 1);
      good = moves ? rounds.send_pings(nth) : rounds.answer_pings(nth);
      if (nth == 0) rounds.note_ticks(nth, moves ? 0 : 1);
    }
    rounds.exchange = a.base + kNumPings + nth * (a.rounds + 1 + kNumPings);
    return __syncthreads_and(good);
  };
  CallClock clock;
  clock.begin();
  if (!calibrate(0)) return;
  for (u32 round = 0; round <= a.rounds; ++round) {
    const u32 mark = a.base + kValuesPerRound * round + 1;
    const bool good = moves                          ? rounds.move(round, mark)
                      : kTransfer == Transfer::kPull ? rounds.observe_pull(round)
                                                     : rounds.observe_push(round, mark);
    if (!good) return;
  }
  if (!calibrate(1)) return;
  if (moves && threadIdx.x == 0) clock.end(a);
}

}  // namespace mokbench
