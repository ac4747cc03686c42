// SPDX-License-Identifier: Apache-2.0
// What a rank and its peers agree on: the layout of a segment, counters, waits, faults and the
// steps of the MoK and push passes. NVRTC compiles this for the kernels, g++ for the host twin
// (host/). The twin shows protocol bugs (who waits for whom, reuse, deadlock). It cannot show
// errors in PTX memory ordering or scope, nor in the TMA proxy. Proofs and diagrams:
// docs/protocol.md.
#pragma once

#ifdef __CUDACC__
#define MOKBENCH_DEVICE_INLINE __device__ __forceinline__
#else
#define MOKBENCH_DEVICE_INLINE inline
#endif

namespace mokbench {

using u16 = unsigned short;
using u8 = unsigned char;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(i32) == 4 && sizeof(u64) == 8);

constexpr u32 kMaxRanks = 128;
constexpr u32 kMaxExperts = 1024;
constexpr u32 kMaxTopK = 16;
constexpr u32 kMaxBlockM = 256;
constexpr u32 kMaxRingTiles = 64;
constexpr u32 kMaxPullWorkers = 16;

// A C++20 template value in the kernels, a run-time value in the twin.
struct Config {
  u32 num_ranks = 1;
  u32 num_experts = 1;
  u32 top_k = 1;
  u32 max_tokens = 1;  // of one rank
  u32 hidden = 64;
  u32 intermediate = 64;
  u32 element_bytes = 2;  // 2 is BF16, 4 is FP32
  u32 block_m = 64;
  u32 ring_tiles = 4;
  u32 hidden_ring_tiles = 2;
  u32 pull_workers = 1;
};

MOKBENCH_DEVICE_INLINE constexpr u32 local_experts(const Config& c) {
  return c.num_experts / c.num_ranks;
}
MOKBENCH_DEVICE_INLINE constexpr u32 owner_of(const Config& c, u32 expert) {
  return expert / local_experts(c);
}
MOKBENCH_DEVICE_INLINE constexpr u64 row_bytes(const Config& c) {
  return u64{c.hidden} * c.element_bytes;
}
// Rows of one rank's expert-sorted push buffers: every rank's tokens on as many experts as can be.
MOKBENCH_DEVICE_INLINE constexpr u64 push_capacity_rows(const Config& c) {
  const u32 routes = c.top_k < local_experts(c) ? c.top_k : local_experts(c);
  return u64{c.num_ranks} * c.max_tokens * routes;
}

enum class Role : u32 { kCaller, kPull, kGemm1, kGemm2, kObserver };
constexpr const char* kRoleNames[] = {"caller", "pull", "gemm1", "gemm2", "observer"};

enum class Site : u32 {
  kEntry,
  kSchedule,
  kRingFree,
  kRingReady,
  kHiddenFree,
  kHiddenReady,
  kReturned,
  kDispatched,
  kCombined,
  kAlign,
  kSignal,
  kCallback,
};
constexpr const char* kSiteNames[] = {"entry",       "schedule",     "ring_free", "ring_ready",
                                      "hidden_free", "hidden_ready", "returned",  "dispatched",
                                      "combined",    "align",        "signal",    "callback"};

enum class FaultState : u32 { kNone, kWriting, kComplete };
constexpr u32 kNobody = ~0u;

// One per rank; the first role whose wait expires writes it, the rank's other roles then leave.
struct FaultRecord {
  u32 state;  // FaultState
  u32 rank;
  u32 role;
  u32 site;
  u32 slot;
  u32 expected;
  u32 observed;
  u32 late_rank;
  u32 epoch;
  u32 reserved;
  u64 waited_ns;
};
static_assert(sizeof(FaultRecord) == 48);

// Whom a rank waits for, and when it last looked: peers follow it to the rank that is really late.
struct Beacon {
  u32 late_rank;  // kNobody while the rank does not wait for a peer
  u32 reserved;
  u64 alive_ns;
};

// At offset 0 of every segment, whatever the protocol.
struct Header {
  FaultRecord fault;
  Beacon beacon;
  u64 config_digest;  // ranks with different Configs would read each other's bytes wrongly
  u64 reserved[7];
};
static_assert(sizeof(Header) == 128);

MOKBENCH_DEVICE_INLINE constexpr u64 config_digest(const Config& c) {
  const u32 fields[] = {c.num_ranks,  c.num_experts,      c.top_k,         c.max_tokens,
                        c.hidden,     c.intermediate,     c.element_bytes, c.block_m,
                        c.ring_tiles, c.hidden_ring_tiles};
  u64 digest = 14695981039346656037ull;  // FNV-1a
  for (const u32 field : fields) digest = (digest ^ field) * 1099511628211ull;
  return digest;
}

struct Field {
  u64 offset;
  u64 bytes;
};

// A counter has 128 bytes to itself: two 64-byte lines that x86 prefetches together, one GPU line.
constexpr u64 kCounterBytes = 128;
constexpr u64 kFieldAlign = 256;

struct NoVisitor {
  MOKBENCH_DEVICE_INLINE constexpr void operator()(const char*, Field) const {}
};

template <class Visit>
struct Placer {
  Visit& visit;
  u64 end = 0;
  MOKBENCH_DEVICE_INLINE constexpr Field operator()(const char* name, u64 bytes) {
    const Field field{(end + kFieldAlign - 1) / kFieldAlign * kFieldAlign, bytes};
    end = field.offset + bytes;
    visit(name, field);
    return field;
  }
  MOKBENCH_DEVICE_INLINE constexpr Field counters(const char* name, u64 count) {
    return (*this)(name, count * kCounterBytes);
  }
  MOKBENCH_DEVICE_INLINE constexpr u64 total() const { return (end + 4095) / 4096 * 4096; }
};

struct MokLayout {
  Field header, entry, returned, schedule, ring_ready, ring_free, hidden_ready, hidden_free;
  Field gathered_tokens, gathered_idx, x, combine;
  u64 segment_bytes;
};

template <class Visit = NoVisitor>
MOKBENCH_DEVICE_INLINE constexpr MokLayout mok_layout(const Config& c, Visit visit = {}) {
  Placer<Visit> place{visit};
  MokLayout l{};
  l.header = place("header", sizeof(Header));
  l.entry = place.counters("entry", c.num_ranks);        // [source]
  l.returned = place.counters("returned", c.num_ranks);  // [destination]
  l.schedule = place.counters("schedule", 1);
  l.ring_ready = place.counters("ring_ready", c.ring_tiles);
  l.ring_free = place.counters("ring_free", c.ring_tiles);
  l.hidden_ready = place.counters("hidden_ready", c.hidden_ring_tiles);
  l.hidden_free = place.counters("hidden_free", c.hidden_ring_tiles);
  // [epoch parity][source], and each source's [token][k] expert ids behind it.
  l.gathered_tokens = place("gathered_tokens", 2ull * c.num_ranks * sizeof(u32));
  l.gathered_idx = place("gathered_idx", 2ull * c.num_ranks * c.max_tokens * c.top_k * sizeof(i32));
  l.x = place("x", c.max_tokens * row_bytes(c));
  l.combine = place("combine", u64{c.max_tokens} * c.top_k * row_bytes(c));  // [token][k]
  l.segment_bytes = place.total();
  return l;
}

// Travels with each pushed row; ids are global, -1 where route k does not go to this destination.
MOKBENCH_DEVICE_INLINE constexpr u64 push_meta_bytes(const Config& c) {
  return (2ull + 2ull * c.top_k) * sizeof(u32);  // token, reserved, ids[K], weights[K]
}

struct PushLayout {
  Field header, dispatched, combined, recv_count, recv_meta, recv_x, partial;
  u64 segment_bytes;
};

template <class Visit = NoVisitor>
MOKBENCH_DEVICE_INLINE constexpr PushLayout push_layout(const Config& c, Visit visit = {}) {
  Placer<Visit> place{visit};
  const u64 rows = u64{c.num_ranks} * c.max_tokens;
  PushLayout l{};
  l.header = place("header", sizeof(Header));
  l.dispatched = place.counters("dispatched", c.num_ranks);              // [source]
  l.combined = place.counters("combined", c.num_ranks);                  // [destination]
  l.recv_count = place("recv_count", 2ull * c.num_ranks * sizeof(u32));  // [parity][source]
  l.recv_meta = place("recv_meta", rows * push_meta_bytes(c));           // [source][j]
  l.recv_x = place("recv_x", rows * row_bytes(c));                       // [source][j]
  l.partial = place("partial", rows * row_bytes(c));                     // [destination][j]
  l.segment_bytes = place.total();
  return l;
}

// Payload of one signaling sample: 16 bytes.
struct SignalPayload {
  u64 stamp_ns;
  u64 round;
};

struct SignalLayout {
  Field header, arrived, arrived_ns, hop, entry, local, inbox, outbox;
  u64 segment_bytes;
};

template <class Visit = NoVisitor>
MOKBENCH_DEVICE_INLINE constexpr SignalLayout signal_layout(u32 num_ranks, Visit visit = {}) {
  Placer<Visit> place{visit};
  const u64 parity_peers = 2ull * num_ranks;
  SignalLayout l{};
  l.header = place("header", sizeof(Header));
  l.arrived = place.counters("arrived", num_ranks);                // [source]
  l.arrived_ns = place("arrived_ns", parity_peers * sizeof(u64));  // [parity][source]
  l.hop = place.counters("hop", 1);
  l.entry = place.counters("entry", num_ranks);       // [source]
  l.local = place.counters("local", 3);               // between two threads of this rank
  l.inbox = place.counters("inbox", parity_peers);    // [parity][source]
  l.outbox = place.counters("outbox", parity_peers);  // [parity][destination]
  l.segment_bytes = place.total();
  return l;
}

// Counters only grow and may wrap: right while the two are less than 2^31 steps apart.
MOKBENCH_DEVICE_INLINE constexpr bool reached(u32 observed, u32 expected) {
  return static_cast<i32>(observed - expected) >= 0;
}

// Position in a ring. A lap count beside the slot stays right when it wraps, for any ring size;
// sequence % ring would jump at 2^32 unless the size is a power of two.
struct Cursor {
  u32 slot = 0;
  u32 lap = 0;
  MOKBENCH_DEVICE_INLINE constexpr void advance(u32 num_slots) {
    if (++slot == num_slots) {
      slot = 0;
      ++lap;
    }
  }
};

// kLocal orders roles of one rank (GPU scope), kSystem ranks (system scope).
enum class Scope { kLocal, kSystem };

// One role of one rank. Memory is the policy: load_acquire, store_release, fetch_add_release and
// their relaxed kin by Scope, compare_exchange, now_ns (a clock that all ranks share), pause,
// relax(waited_ns), and step(), where stress tests put their delays.
template <class Memory>
struct Agent {
  Memory& memory;
  char* const* segments;  // of all ranks, mapped here
  u32 num_ranks;
  u32 rank;
  Role role;
  u32 epoch;
  u64 wait_bound_ns;

  MOKBENCH_DEVICE_INLINE Header* header(u32 of_rank) const {
    return reinterpret_cast<Header*>(segments[of_rank]);
  }
  MOKBENCH_DEVICE_INLINE u32* counter(u32 of_rank, Field field, u32 index) const {
    return reinterpret_cast<u32*>(segments[of_rank] + field.offset + index * kCounterBytes);
  }
  MOKBENCH_DEVICE_INLINE bool faulted(u32 of_rank) const {
    return memory.template load_acquire<Scope::kSystem>(&header(of_rank)->fault.state) !=
           static_cast<u32>(FaultState::kNone);
  }
};

struct WaitSite {
  Site site;
  u32 slot;
  u32 late_rank;  // who will raise the counter; the own rank for a wait between its roles
};

// The rank at the end of the chain "who waits for whom" that starts at `late`: a waiting rank that
// looked lately is not at fault, whoever it waits for may be. A stopped or killed rank's beacon is
// old, so the chain ends there.
template <class Memory>
MOKBENCH_DEVICE_INLINE u32 blame(Agent<Memory>& agent, u32 late) {
  for (u32 hop = 0; hop < agent.num_ranks; ++hop) {
    Header* header = agent.header(late);
    u32 next = kNobody;
    if (agent.memory.template load_acquire<Scope::kSystem>(&header->fault.state) ==
        static_cast<u32>(FaultState::kComplete)) {
      next = agent.memory.template load_relaxed<Scope::kSystem>(&header->fault.late_rank);
    } else {
      const u64 alive =
          agent.memory.template load_relaxed<Scope::kSystem>(&header->beacon.alive_ns);
      if (alive + agent.wait_bound_ns / 2 < agent.memory.now_ns()) break;
      next = agent.memory.template load_relaxed<Scope::kSystem>(&header->beacon.late_rank);
    }
    if (next >= agent.num_ranks || next == late || next == agent.rank) break;
    late = next;
  }
  return late;
}

// First writer wins. Ordered before any role of this rank, or any peer, that sees kComplete.
template <class Memory>
MOKBENCH_DEVICE_INLINE void record_fault(Agent<Memory>& agent, WaitSite at, u32 expected,
                                         u32 observed, u64 waited_ns) {
  FaultRecord& fault = agent.header(agent.rank)->fault;
  if (!agent.memory.compare_exchange(&fault.state, static_cast<u32>(FaultState::kNone),
                                     static_cast<u32>(FaultState::kWriting))) {
    return;
  }
  const auto store = [&](auto* field, auto value) {
    agent.memory.template store_relaxed<Scope::kSystem>(field, value);
  };
  store(&fault.rank, agent.rank);
  store(&fault.role, static_cast<u32>(agent.role));
  store(&fault.site, static_cast<u32>(at.site));
  store(&fault.slot, at.slot);
  store(&fault.expected, expected);
  store(&fault.observed, observed);
  store(&fault.late_rank, at.late_rank);
  store(&fault.epoch, agent.epoch);
  store(&fault.waited_ns, waited_ns);
  agent.memory.template store_release<Scope::kSystem>(&fault.state,
                                                      static_cast<u32>(FaultState::kComplete));
}

// Polls until `counter` reached `expected`; false when the wait expired (the fault is then on
// record) or another role of this rank faulted. The bound restarts when the counter moves, and is
// twice as long between roles of one rank: the role that waits for a peer shall report first. A
// peer that has itself faulted will not come: that ends the wait at once. On true, all that the
// counter's writers wrote before raising it is visible here.
template <Scope scope, class Memory>
MOKBENCH_DEVICE_INLINE bool wait_until(Agent<Memory>& agent, u32* counter, u32 expected,
                                       WaitSite at) {
  Memory& memory = agent.memory;
  u32 observed = 0;
  for (u32 spin = 0; spin < Memory::kNumSpins; ++spin) {
    observed = memory.template load_acquire<scope>(counter);
    if (reached(observed, expected)) {
      memory.step();
      return true;
    }
    memory.pause();
  }
  const bool on_peer = at.late_rank != agent.rank;
  const u64 bound_ns = on_peer ? agent.wait_bound_ns : 2 * agent.wait_bound_ns;
  Beacon& beacon = agent.header(agent.rank)->beacon;
  u64 since = memory.now_ns();
  bool arrived = false;
  for (;;) {
    const u64 now = memory.now_ns();
    if (on_peer) {
      memory.template store_relaxed<Scope::kSystem>(&beacon.late_rank, at.late_rank);
      memory.template store_relaxed<Scope::kSystem>(&beacon.alive_ns, now);
    }
    const bool peer_faulted = on_peer && agent.faulted(at.late_rank);
    const u32 current = memory.template load_acquire<scope>(counter);
    arrived = reached(current, expected);
    if (arrived || agent.faulted(agent.rank)) break;
    if (current != observed) since = now;
    observed = current;
    if (peer_faulted || now - since > bound_ns) {
      const WaitSite blamed{at.site, at.slot, blame(agent, at.late_rank)};
      record_fault(agent, blamed, expected, observed, now - since);
      break;
    }
    memory.relax(now - since);
  }
  if (on_peer) memory.template store_relaxed<Scope::kSystem>(&beacon.late_rank, kNobody);
  if (arrived) memory.step();
  return arrived;
}

// Steps of a MoK pass. Every counter starts at `base`; epochs are base + 1, base + 2, ...
// A publish orders all that this role wrote or acquired before it; a wait is wait_until's.
template <class Memory>
struct MokSteps {
  Agent<Memory>& agent;
  const MokLayout& layout;
  u32 base;
  u32 block_m;
  // How many parts of a tile raise its counters, one each: where GEMMs are cut by columns as well.
  u32 gemm1_parts = 1;
  u32 gemm2_parts = 1;

  template <Scope scope>
  MOKBENCH_DEVICE_INLINE void add(u32 of_rank, Field field, u32 index, u32 count) {
    agent.memory.step();
    agent.memory.template fetch_add_release<scope>(agent.counter(of_rank, field, index), count);
  }
  MOKBENCH_DEVICE_INLINE bool wait_local(Field field, Site site, u32 slot, u32 expected) {
    return wait_until<Scope::kLocal>(agent, agent.counter(agent.rank, field, slot), expected,
                                     WaitSite{site, slot, agent.rank});
  }

  // Before: x staged, top-k ids and token count stored in the peer's gathered area of this parity.
  MOKBENCH_DEVICE_INLINE void publish_entry(u32 peer) {
    agent.memory.step();
    agent.memory.template store_release<Scope::kSystem>(
        agent.counter(peer, layout.entry, agent.rank), agent.epoch);
  }
  MOKBENCH_DEVICE_INLINE bool wait_entry(u32 source) {
    return wait_until<Scope::kSystem>(agent, agent.counter(agent.rank, layout.entry, source),
                                      agent.epoch, WaitSite{Site::kEntry, source, source});
  }
  MOKBENCH_DEVICE_INLINE void publish_schedule() {
    add<Scope::kLocal>(agent.rank, layout.schedule, 0, 1);
  }
  MOKBENCH_DEVICE_INLINE bool wait_schedule() {
    return wait_local(layout.schedule, Site::kSchedule, 0, agent.epoch);
  }
  // The slot has been released by all parts in each earlier lap.
  MOKBENCH_DEVICE_INLINE bool wait_ring_free(Cursor at) {
    return wait_local(layout.ring_free, Site::kRingFree, at.slot, base + at.lap * gemm1_parts);
  }
  // A tile raises block_m in all, padding included, so the value to wait for is known beforehand.
  MOKBENCH_DEVICE_INLINE void raise_ring_ready(Cursor at, u32 rows) {
    add<Scope::kLocal>(agent.rank, layout.ring_ready, at.slot, rows);
  }
  MOKBENCH_DEVICE_INLINE bool wait_ring_ready(Cursor at) {
    return wait_local(layout.ring_ready, Site::kRingReady, at.slot, base + (at.lap + 1) * block_m);
  }
  MOKBENCH_DEVICE_INLINE void release_ring(Cursor at) {
    add<Scope::kLocal>(agent.rank, layout.ring_free, at.slot, 1);
  }
  MOKBENCH_DEVICE_INLINE bool wait_hidden_free(Cursor at) {
    return wait_local(layout.hidden_free, Site::kHiddenFree, at.slot, base + at.lap * gemm2_parts);
  }
  MOKBENCH_DEVICE_INLINE void raise_hidden_ready(Cursor at) {
    add<Scope::kLocal>(agent.rank, layout.hidden_ready, at.slot, 1);
  }
  MOKBENCH_DEVICE_INLINE bool wait_hidden_ready(Cursor at) {
    return wait_local(layout.hidden_ready, Site::kHiddenReady, at.slot,
                      base + (at.lap + 1) * gemm1_parts);
  }
  MOKBENCH_DEVICE_INLINE void release_hidden(Cursor at) {
    add<Scope::kLocal>(agent.rank, layout.hidden_free, at.slot, 1);
  }
  // Before: `rows` rows stored in the source's combine slots.
  MOKBENCH_DEVICE_INLINE void publish_returned(u32 source, u32 rows) {
    add<Scope::kSystem>(source, layout.returned, agent.rank, rows);
  }
  // `total_rows`: sent to this destination since the counters were at base, this pass included. The
  // kernel returns once a pass to every source, rows or none: there it counts passes.
  MOKBENCH_DEVICE_INLINE bool wait_returned(u32 destination, u32 total_rows) {
    return wait_until<Scope::kSystem>(
        agent, agent.counter(agent.rank, layout.returned, destination), base + total_rows,
        WaitSite{Site::kReturned, destination, destination});
  }
};

// Steps of a push pass: one flag each way between every two ranks, equal to the epoch.
template <class Memory>
struct PushSteps {
  Agent<Memory>& agent;
  const PushLayout& layout;

  MOKBENCH_DEVICE_INLINE void publish(u32 peer, Field field) {
    agent.memory.step();
    agent.memory.template store_release<Scope::kSystem>(agent.counter(peer, field, agent.rank),
                                                        agent.epoch);
  }
  MOKBENCH_DEVICE_INLINE bool wait(u32 peer, Field field, Site site) {
    return wait_until<Scope::kSystem>(agent, agent.counter(agent.rank, field, peer), agent.epoch,
                                      WaitSite{site, peer, peer});
  }
  // Before: rows, their meta and their count of this parity stored at the destination.
  MOKBENCH_DEVICE_INLINE void publish_dispatched(u32 destination) {
    publish(destination, layout.dispatched);
  }
  MOKBENCH_DEVICE_INLINE bool wait_dispatched(u32 source) {
    return wait(source, layout.dispatched, Site::kDispatched);
  }
  // Before: the partial sums of this source's rows stored there, and nothing of them read again.
  MOKBENCH_DEVICE_INLINE void publish_combined(u32 source) { publish(source, layout.combined); }
  MOKBENCH_DEVICE_INLINE bool wait_combined(u32 destination) {
    return wait(destination, layout.combined, Site::kCombined);
  }
};

}  // namespace mokbench
