// SPDX-License-Identifier: Apache-2.0
// One rank's view of every rank's segment, and what its roles do when something goes wrong.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory.h"
#include "protocol.h"

namespace mokbench {

// (expert local to the rank, first row of the input buffer, first row of the output buffer, rows)
using Gemm = std::function<void(u32, u32, u32, u32)>;

// One rank's share of a pass.
struct TokenBatch {
  const char* x;              // [T, hidden]
  const i32* topk_idx;        // [T, K], -1 is masked
  const float* topk_weights;  // [T, K]
  u32 num_tokens;
};

struct RankOptions {
  double wait_bound_s = 10;
  u32 initial_epoch = 0;  // every counter starts here; tests start just below the wrap
  double max_delay_us = 0;
  u64 delay_seed = 0;
};

struct CopyStats {
  u64 bytes = 0;
  u64 ns = 0;  // CPU time of the copying thread
  void add(u64 more_bytes, u64 more_ns) {
    bytes += more_bytes;
    ns += more_ns;
  }
};

// Memory that holds every rank's segment one behind another; `owner` keeps it mapped.
struct Mapping {
  char* base;
  u64 bytes;
  std::shared_ptr<void> owner;
};

std::string describe(const FaultRecord& fault);

class FaultError : public std::runtime_error {
 public:
  explicit FaultError(const FaultRecord& record)
      : std::runtime_error(describe(record)), record(record) {}
  FaultRecord record;
};

// Throws std::invalid_argument naming the field, the value and what is allowed.
void check_config(const Config& config);

// Throws std::invalid_argument on an id out of range or twice in a row of top-k ids.
void check_topk(const Config& config, const TokenBatch& batch);

class Workspace {
 public:
  Workspace(Mapping mapping, u64 segment_bytes, u32 num_ranks, u32 rank, u64 digest,
            const RankOptions& options);

  const u32 num_ranks;
  const u32 rank;
  const RankOptions options;

  char* at(u32 of_rank, Field field, u64 offset = 0) const {
    return segments_[of_rank] + field.offset + offset;
  }
  // `seed` tells the delays of this rank's roles apart.
  HostMemory memory(u64 seed) const;
  Agent<HostMemory> agent(HostMemory& memory, Role role, u32 epoch) const;

  // Every counter of the field to the value that all counters start at. Nobody may use them yet.
  void reset_counters(Field field) const;
  // Clears fault, beacon and stored error.
  void reset_header();

  bool faulted() const;
  // Throws when an earlier pass faulted: its counters are somewhere in between.
  void require_usable() const;
  // Throws when a peer built its workspace from another Config. After that peer's first publish.
  void check_peer(u32 peer) const;
  // Stores the exception in flight for raise_error() and makes all roles and peers leave.
  void fail(Agent<HostMemory>& agent);
  // After a pass: rethrows a role's exception, else throws FaultError if a wait expired.
  void raise_error();

  template <class Body>
  void guard(Agent<HostMemory>& agent, Body body) {
    try {
      body();
    } catch (...) {
      fail(agent);
    }
  }

 private:
  Header* header(u32 of_rank) const { return reinterpret_cast<Header*>(segments_[of_rank]); }

  Mapping mapping_;
  std::vector<char*> segments_;
  u64 digest_;
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

}  // namespace mokbench
