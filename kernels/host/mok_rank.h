// SPDX-License-Identifier: Apache-2.0
// One rank of the MoK pass: pull dispatch into a ring, two GEMMs, push combine.
#pragma once

#include <memory>
#include <vector>

#include "elements.h"
#include "schedule.h"
#include "team.h"
#include "workspace.h"

namespace mokbench {

class MokRank {
 public:
  struct Buffers {
    char* x_ring;        // [ring_tiles * block_m, hidden]
    const char* y_tile;  // [block_m, hidden]
  };

  // Collective: every rank constructs, all pass a barrier of the caller, then run() may be called.
  MokRank(Mapping mapping, const Config& config, u32 rank, Buffers buffers, Gemm gemm1, Gemm gemm2,
          const RankOptions& options);

  // One pass; the caller's thread publishes, builds the schedule and combines.
  void run(const TokenBatch& batch, char* y);
  // After a fault, between two barriers of the caller.
  void reset();
  // Ends the role threads; run() must not be called after it.
  void stop() { team_.reset(); }

  struct Stats {
    CopyStats pull;
    CopyStats push;
  };
  Stats take_stats();

 private:
  using Steps = MokSteps<HostMemory>;

  // What a role keeps across passes: its delays and where it stands in the rings.
  struct RoleState {
    HostMemory memory;
    Role role;
    Cursor ring;
    Cursor hidden;
    CopyStats copies;
  };

  void serve(RoleState& state, u32 worker);
  void pull(Steps& steps, RoleState& state, u32 worker);
  void run_gemm1(Steps& steps, RoleState& state);
  void run_gemm2(Steps& steps, RoleState& state);
  void push_tile(Steps& steps, RoleState& state, const Tile& tile);

  void lead(Steps& steps, const TokenBatch& batch, char* y);
  void publish(Steps& steps, const TokenBatch& batch);
  bool build_schedule(Steps& steps);
  bool combine(Steps& steps, const TokenBatch& batch, char* y);

  const Config config_;
  const MokLayout layout_;
  const Buffers buffers_;
  const Gemm gemm1_;
  const Gemm gemm2_;
  Workspace workspace_;
  u32 epoch_;
  Schedule schedule_;
  std::vector<u32> rows_sent_;  // [destination], since the last reset, wraps
  std::vector<float> sum_;      // [hidden]
  HostMemory caller_memory_;
  std::vector<RoleState> roles_;
  std::unique_ptr<Team> team_;  // last: its threads use all of the above
};

}  // namespace mokbench
