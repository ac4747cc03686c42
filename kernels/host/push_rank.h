// SPDX-License-Identifier: Apache-2.0
// One rank of the push baseline: push dispatch, GEMMs, push combine, one after the other.
#pragma once

#include <vector>

#include "elements.h"
#include "schedule.h"
#include "workspace.h"

namespace mokbench {

class PushRank {
 public:
  struct Buffers {
    char* x_rows;        // [push_capacity_rows, hidden], sorted by expert
    const char* y_rows;  // [push_capacity_rows, hidden]
  };

  // Collective, as MokRank.
  PushRank(Mapping mapping, const Config& config, u32 rank, Buffers buffers, Gemm gemm1, Gemm gemm2,
           const RankOptions& options);

  // In this order. dispatch() returns when every peer's rows lie sorted in x_rows, compute() when
  // y_rows holds their results, combine() when y is complete.
  void dispatch(const TokenBatch& batch);
  void compute();
  void combine(char* y, u64 num_rows);
  void reset();

  struct Stats {
    CopyStats push;  // rows stored at their destinations, this rank's own included
    CopyStats sort;  // rows copied from the receive area to their place in x_rows
  };
  Stats take_stats();

 private:
  using Steps = PushSteps<HostMemory>;
  enum class Phase { kIdle, kDispatched, kComputed };

  // What lies in a row's meta: ids[K] and weights[K] of its routes to this destination.
  struct Meta {
    const i32* ids;
    const float* weights;
  };
  Meta meta(u32 source, u64 j) const;

  void require_phase(Phase phase, const char* name) const;
  // Runs one phase of the pass, in the caller's thread.
  template <class Body>
  void run_phase(Phase to, Body body);
  void push_rows(Steps& steps, const TokenBatch& batch);
  u32 push_to(u32 destination, const TokenBatch& batch);
  bool receive(Steps& steps);
  void sort_rows();
  void push_partials(Steps& steps);
  bool sum_partials(Steps& steps, char* y);

  const Config config_;
  const PushLayout layout_;
  const Buffers buffers_;
  const Gemm gemm1_;
  const Gemm gemm2_;
  Workspace workspace_;
  HostMemory memory_;
  u32 epoch_;
  Phase phase_ = Phase::kIdle;
  Schedule schedule_;
  std::vector<u32> num_received_;    // [source]
  std::vector<u64> first_received_;  // [source], running sum of num_received_
  std::vector<u32> row_of_;          // [received row][k] -> row of x_rows
  std::vector<u32> slot_of_;         // [token][destination] -> j there, or kNobody
  std::vector<u32> num_sent_;        // [destination]
  u32 num_tokens_ = 0;
  std::vector<float> sum_;  // [hidden]
  Stats stats_;
};

}  // namespace mokbench
