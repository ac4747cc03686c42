// SPDX-License-Identifier: Apache-2.0
#include "signal_rank.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "core_pair.h"
#include "schedule.h"

namespace mokbench {

namespace {

// From the last arrival to the agreed start: several hops, so that every rank knows it by then.
constexpr u64 kLeaveMarginNs = 20000;

double to_us(u64 ns) { return static_cast<double>(ns) * 1e-3; }

u64 config_digest_of(u32 num_ranks) { return config_digest(Config{.num_ranks = num_ranks}); }

}  // namespace

SignalRank::SignalRank(Mapping mapping, u32 num_ranks, u32 rank, const RankOptions& options)
    : layout_(signal_layout(num_ranks)),
      workspace_(std::move(mapping), layout_.segment_bytes, num_ranks, rank,
                 config_digest_of(num_ranks), options),
      memory_(workspace_.memory(0)),
      observer_memory_(workspace_.memory(1)) {
  reset();
}

void SignalRank::reset() {
  const u32 start = workspace_.options.initial_epoch;
  for (const Field field : {layout_.arrived, layout_.hop, layout_.entry, layout_.local}) {
    workspace_.reset_counters(field);
  }
  workspace_.reset_header();
  rounds_with_.assign(workspace_.num_ranks, start);
  hop_round_ = local_round_ = start;
}

template <class Body>
void SignalRank::measure(Body body) {
  workspace_.require_usable();
  auto agent = workspace_.agent(memory_, Role::kCaller, local_round_);
  workspace_.guard(agent, [&] { body(agent); });
  workspace_.raise_error();
}

template <class Body, class Other>
void SignalRank::measure_in_two_threads(Body body, Other other) {
  measure([&](RoleAgent& agent) {
    auto observer = workspace_.agent(observer_memory_, Role::kObserver, local_round_);
    const CorePair cores(agent.rank, agent.num_ranks);
    std::thread thread([&] {
      cores.join();
      workspace_.guard(observer, [&] { other(observer); });
    });
    workspace_.guard(agent, [&] { body(agent); });
    thread.join();
  });
}

// A round with a peer is two barrier rounds, so every second value alternates.
u64 SignalRank::parity_slot(u32 round, u32 peer) const {
  return u64{round / 2 % 2} * workspace_.num_ranks + peer;
}

void SignalRank::store_flag(RoleAgent& agent, u32 of_rank, Field field, u32 index, u32 value) {
  agent.memory.step();
  agent.memory.store_release<Scope::kSystem>(agent.counter(of_rank, field, index), value);
}

bool SignalRank::wait_local(RoleAgent& agent, Local which, u32 value) {
  return wait_until<Scope::kLocal>(agent, agent.counter(agent.rank, layout_.local, which), value,
                                   WaitSite{Site::kSignal, which, agent.rank});
}

bool SignalRank::gather(RoleAgent& agent, u32 ranks, u64& last_arrival_ns) {
  const u32 rank = agent.rank;
  last_arrival_ns = agent.memory.now_ns();
  const auto stamp = [&](u32 of_rank, u32 round, u32 source) {
    const u64 slot = u64{round % 2} * workspace_.num_ranks + source;
    return reinterpret_cast<u64*>(workspace_.at(of_rank, layout_.arrived_ns, slot * sizeof(u64)));
  };
  for (u32 n = 0; n + 1 < ranks; ++n) {
    const u32 peer = nth_peer(rank, n, ranks);
    const u32 round = ++rounds_with_[peer];
    *stamp(peer, round, rank) = last_arrival_ns;
    store_flag(agent, peer, layout_.arrived, rank, round);
  }
  for (u32 n = 0; n + 1 < ranks; ++n) {
    const u32 peer = nth_peer(rank, n, ranks);
    const u32 round = rounds_with_[peer];
    if (!wait_until<Scope::kSystem>(agent, agent.counter(rank, layout_.arrived, peer), round,
                                    WaitSite{Site::kAlign, peer, peer})) {
      return false;
    }
    workspace_.check_peer(peer);
    last_arrival_ns = std::max(last_arrival_ns, *stamp(rank, round, peer));
  }
  return true;
}

// The first gather may have slept for a late rank, the second finds all ranks awake. All compute
// the same time to leave from the same stamps.
bool SignalRank::align_group(RoleAgent& agent, u32 ranks, u64& left_ns) {
  u64 last_arrival_ns = 0;
  if (!gather(agent, ranks, last_arrival_ns) || !gather(agent, ranks, last_arrival_ns)) {
    return false;
  }
  left_ns = last_arrival_ns + kLeaveMarginNs;
  while (agent.memory.now_ns() < left_ns) agent.memory.pause();
  return true;
}

void SignalRank::align() {
  measure([&](RoleAgent& agent) {
    u64 left_ns = 0;
    align_group(agent, workspace_.num_ranks, left_ns);
  });
}

std::vector<double> SignalRank::hop(u32 rounds) {
  std::vector<double> samples;
  const u32 rank = workspace_.rank;
  if (workspace_.num_ranks < 2 || rank > 1) return samples;
  const u32 peer = 1 - rank;
  measure([&](RoleAgent& agent) {
    u64 left_ns = 0;
    if (!align_group(agent, 2, left_ns)) return;
    const auto wait = [&] {
      return wait_until<Scope::kSystem>(agent, agent.counter(rank, layout_.hop, 0), hop_round_,
                                        WaitSite{Site::kSignal, 0, peer});
    };
    for (u32 i = 0; i < rounds; ++i) {
      ++hop_round_;
      const u64 started_ns = agent.memory.now_ns();
      if (rank == 0) store_flag(agent, peer, layout_.hop, 0, hop_round_);
      if (!wait()) return;
      if (rank == 0) samples.push_back(to_us(agent.memory.now_ns() - started_ns) / 2);
      if (rank == 1) store_flag(agent, peer, layout_.hop, 0, hop_round_);
    }
  });
  return samples;
}

std::vector<double> SignalRank::local_hop(u32 rounds) {
  std::vector<double> samples;
  const u32 first = local_round_ + 1;
  measure_in_two_threads(
      [&](RoleAgent& agent) {
        for (u32 i = 0; i < rounds; ++i) {
          const u64 started_ns = agent.memory.now_ns();
          store_flag(agent, agent.rank, layout_.local, kPing, ++local_round_);
          if (!wait_local(agent, kPong, local_round_)) return;
          samples.push_back(to_us(agent.memory.now_ns() - started_ns) / 2);
        }
      },
      [&](RoleAgent& agent) {
        for (u32 i = 0; i < rounds; ++i) {
          if (!wait_local(agent, kPing, first + i)) return;
          store_flag(agent, agent.rank, layout_.local, kPong, first + i);
        }
      });
  return samples;
}

void SignalRank::check_ranks(u32 ranks) const {
  if (ranks >= 1 && ranks <= workspace_.num_ranks) return;
  throw std::invalid_argument("ranks is " + std::to_string(ranks) + "; allowed are 1 to " +
                              std::to_string(workspace_.num_ranks));
}

void SignalRank::check_payload(const SignalPayload& payload, u32 peer, u32 round) const {
  if (payload.round == round) return;
  throw std::logic_error("rank " + std::to_string(workspace_.rank) + ": payload of rank " +
                         std::to_string(peer) + " is of round " + std::to_string(payload.round) +
                         ", not " + std::to_string(round));
}

void SignalRank::send(RoleAgent& agent, u32 ranks) {
  for (u32 n = 0; n + 1 < ranks; ++n) {
    const u32 peer = nth_peer(agent.rank, n, ranks);
    const u32 round = rounds_with_[peer];
    const SignalPayload payload{agent.memory.now_ns(), round};
    copy_row(workspace_.at(peer, layout_.inbox, parity_slot(round, agent.rank) * kCounterBytes),
             &payload, sizeof(payload));
    store_flag(agent, peer, layout_.entry, agent.rank, round);
  }
}

bool SignalRank::receive(RoleAgent& agent, u32 ranks, const std::vector<u32>& rounds,
                         u64& last_stamp_ns) {
  last_stamp_ns = 0;
  for (u32 n = 0; n + 1 < ranks; ++n) {
    const u32 peer = nth_peer(agent.rank, n, ranks);
    const u32 round = rounds[peer];
    if (!wait_until<Scope::kSystem>(agent, agent.counter(agent.rank, layout_.entry, peer), round,
                                    WaitSite{Site::kSignal, peer, peer})) {
      return false;
    }
    SignalPayload payload;
    copy_row(&payload,
             workspace_.at(agent.rank, layout_.inbox, parity_slot(round, peer) * kCounterBytes),
             sizeof(payload));
    check_payload(payload, peer, round);
    last_stamp_ns = std::max(last_stamp_ns, payload.stamp_ns);
  }
  return true;
}

std::vector<double> SignalRank::entry(u32 rounds, u32 ranks) {
  check_ranks(ranks);
  std::vector<double> samples;
  if (workspace_.rank >= ranks) return samples;
  measure([&](RoleAgent& agent) {
    for (u32 i = 0; i < rounds; ++i) {
      u64 left_ns = 0;
      u64 last_stamp_ns = 0;
      if (!align_group(agent, ranks, left_ns)) return;
      send(agent, ranks);
      if (!receive(agent, ranks, rounds_with_, last_stamp_ns)) return;
      samples.push_back(to_us(agent.memory.now_ns() - left_ns));
    }
  });
  return samples;
}

// For the next round: what peers will fetch lies ready before the aligned start.
void SignalRank::stage(u32 ranks) {
  for (u32 n = 0; n + 1 < ranks; ++n) {
    const u32 peer = nth_peer(workspace_.rank, n, ranks);
    const u32 round = rounds_with_[peer] + 2;
    const SignalPayload payload{memory_.now_ns(), round};
    copy_row(
        workspace_.at(workspace_.rank, layout_.outbox, parity_slot(round, peer) * kCounterBytes),
        &payload, sizeof(payload));
  }
}

void SignalRank::fetch(u32 ranks) {
  for (u32 n = 0; n + 1 < ranks; ++n) {
    const u32 peer = nth_peer(workspace_.rank, n, ranks);
    const u32 round = rounds_with_[peer];
    SignalPayload payload;
    copy_row(
        &payload,
        workspace_.at(peer, layout_.outbox, parity_slot(round, workspace_.rank) * kCounterBytes),
        sizeof(payload));
    check_payload(payload, peer, round);
  }
}

// The compute role: waits for the flags of all peers (push) or for the local counter (pull).
bool SignalRank::observe(RoleAgent& agent, Dispatch dispatch, u32 rounds, u32 ranks,
                         std::vector<u32> rounds_with, u32 local_round) {
  for (u32 i = 0; i < rounds; ++i) {
    ++local_round;
    for (u32& round : rounds_with) round += 2;
    u64 last_stamp_ns = 0;
    const bool seen = dispatch == Dispatch::kPush
                          ? receive(agent, ranks, rounds_with, last_stamp_ns)
                          : wait_local(agent, kPing, local_round);
    if (!seen) return false;
    seen_ns_ = agent.memory.now_ns();
    last_stamp_ns_ = last_stamp_ns;
    store_flag(agent, agent.rank, layout_.local, kPong, local_round);
  }
  return true;
}

SignalRank::Ready SignalRank::ready(Dispatch dispatch, u32 rounds, u32 ranks) {
  check_ranks(ranks);
  Ready result;
  if (workspace_.rank >= ranks || ranks < 2) return result;
  const auto before = rounds_with_;
  const u32 local_before = local_round_;
  measure_in_two_threads(
      [&](RoleAgent& agent) {
        for (u32 i = 0; i < rounds; ++i) {
          u64 left_ns = 0;
          if (dispatch == Dispatch::kPull) stage(ranks);
          if (!align_group(agent, ranks, left_ns)) return;
          ++local_round_;
          u64 arrived_ns = 0;
          if (dispatch == Dispatch::kPull) {
            fetch(ranks);
            arrived_ns = agent.memory.now_ns();
            store_flag(agent, agent.rank, layout_.local, kPing, local_round_);
          } else {
            send(agent, ranks);
          }
          if (!wait_local(agent, kPong, local_round_)) return;
          if (dispatch == Dispatch::kPush) arrived_ns = last_stamp_ns_;
          result.ready_us.push_back(to_us(seen_ns_ - left_ns));
          result.after_arrival_us.push_back(to_us(seen_ns_ - arrived_ns));
        }
      },
      [&](RoleAgent& agent) { observe(agent, dispatch, rounds, ranks, before, local_before); });
  return result;
}

}  // namespace mokbench
