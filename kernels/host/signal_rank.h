// SPDX-License-Identifier: Apache-2.0
// Aligns ranks and measures what signaling costs; samples are microseconds.
#pragma once

#include <vector>

#include "workspace.h"

namespace mokbench {

enum class Dispatch { kPull, kPush };

class SignalRank {
 public:
  // Collective, as MokRank. Every method is called by all ranks with the same arguments.
  SignalRank(Mapping mapping, u32 num_ranks, u32 rank, const RankOptions& options);

  // All ranks leave at one agreed time, as far as they have a core then.
  void align();
  // Flag round trip / 2 between ranks 0 and 1, and between two threads of this rank.
  std::vector<double> hop(u32 rounds);
  std::vector<double> local_hop(u32 rounds);
  // From aligned start until the first `ranks` ranks' 16 bytes and flags are here.
  std::vector<double> entry(u32 rounds, u32 ranks);

  struct Ready {
    std::vector<double> ready_us;          // from aligned start until the observer knows
    std::vector<double> after_arrival_us;  // its part after the last payload was there
  };
  Ready ready(Dispatch dispatch, u32 rounds, u32 ranks);
  void reset();

 private:
  using RoleAgent = Agent<HostMemory>;
  enum Local : u32 { kPing, kPong };

  template <class Body>
  void measure(Body body);
  template <class Body, class Other>
  void measure_in_two_threads(Body body, Other other);

  u64 parity_slot(u32 round, u32 peer) const;
  void store_flag(RoleAgent& agent, u32 of_rank, Field field, u32 index, u32 value);
  bool wait_local(RoleAgent& agent, Local which, u32 value);
  bool gather(RoleAgent& agent, u32 ranks, u64& last_arrival_ns);
  bool align_group(RoleAgent& agent, u32 ranks, u64& left_ns);
  void check_ranks(u32 ranks) const;
  void check_payload(const SignalPayload& payload, u32 peer, u32 round) const;

  void send(RoleAgent& agent, u32 ranks);
  bool receive(RoleAgent& agent, u32 ranks, const std::vector<u32>& rounds, u64& last_stamp_ns);
  void stage(u32 ranks);
  void fetch(u32 ranks);
  bool observe(RoleAgent& agent, Dispatch dispatch, u32 rounds, u32 ranks,
               std::vector<u32> rounds_with, u32 local_round);

  const SignalLayout layout_;
  Workspace workspace_;
  HostMemory memory_;
  HostMemory observer_memory_;
  std::vector<u32> rounds_with_;  // [peer]: barrier rounds that both took part in, same on both
  u32 hop_round_ = 0;
  u32 local_round_ = 0;
  u64 seen_ns_ = 0;        // when the observer knew; kPong hands it over
  u64 last_stamp_ns_ = 0;  // push: when the last payload was sent
};

}  // namespace mokbench
