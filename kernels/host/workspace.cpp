// SPDX-License-Identifier: Apache-2.0
#include "workspace.h"

#include <array>
#include <cstdio>
#include <utility>

namespace mokbench {

std::string describe(const FaultRecord& fault) {
  const char* site = kSiteNames[fault.site];
  const char* role = kRoleNames[fault.role];
  std::array<char, 320> text;
  if (fault.site == static_cast<u32>(Site::kCallback)) {
    std::snprintf(text.data(), text.size(), "rank %u: role %s raised in epoch %u", fault.rank, role,
                  fault.epoch);
  } else {
    std::snprintf(text.data(), text.size(),
                  "rank %u: role %s gave up at site %s[%u] after %.3f s (expected %u, observed %u, "
                  "epoch %u): rank %u is late",
                  fault.rank, role, site, fault.slot, static_cast<double>(fault.waited_ns) * 1e-9,
                  fault.expected, fault.observed, fault.epoch, fault.late_rank);
  }
  return text.data();
}

namespace {

void check_range(const char* name, u64 value, u64 low, u64 high) {
  if (value >= low && value <= high) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                              "; allowed are " + std::to_string(low) + " to " +
                              std::to_string(high));
}

void check_multiple(const char* name, u64 value, u64 unit, const char* why) {
  if (value % unit == 0) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                              "; allowed are multiples of " + std::to_string(unit) + ", " + why);
}

}  // namespace

void check_config(const Config& c) {
  check_range("num_ranks", c.num_ranks, 1, kMaxRanks);
  check_range("num_experts", c.num_experts, c.num_ranks, kMaxExperts);
  check_multiple("num_experts", c.num_experts, c.num_ranks, "the number of ranks");
  check_range("top_k", c.top_k, 1, kMaxTopK < c.num_experts ? kMaxTopK : c.num_experts);
  check_range("max_tokens", c.max_tokens, 1, 1u << 24);
  check_range("hidden", c.hidden, 8, 1u << 20);
  check_multiple("hidden", c.hidden, 8, "so that rows are copied in pieces of 16 bytes");
  check_range("intermediate", c.intermediate, 8, 1u << 20);
  check_multiple("intermediate", c.intermediate, 8,
                 "so that rows are copied in pieces of 16 bytes");
  if (c.element_bytes != 2 && c.element_bytes != 4) {
    throw std::invalid_argument("element_bytes is " + std::to_string(c.element_bytes) +
                                "; allowed are 2 (BF16) and 4 (FP32)");
  }
  check_range("block_m", c.block_m, 1, kMaxBlockM);
  check_range("ring_tiles", c.ring_tiles, 1, kMaxRingTiles);
  check_range("hidden_ring_tiles", c.hidden_ring_tiles, 1, kMaxRingTiles);
  check_range("pull_workers", c.pull_workers, 1, kMaxPullWorkers);
  // Counters compare right only while they are less than 2^31 apart.
  check_range("num_ranks * max_tokens * top_k", u64{c.num_ranks} * c.max_tokens * c.top_k, 1,
              (1u << 31) - 1);
}

void check_topk(const Config& config, const TokenBatch& batch) {
  std::vector<u32> last_token(config.num_experts, kNobody);
  for (u32 token = 0; token < batch.num_tokens; ++token) {
    for (u32 k = 0; k < config.top_k; ++k) {
      const i32 id = batch.topk_idx[u64{token} * config.top_k + k];
      if (id == -1) continue;
      const auto place = [&] {
        return "topk_idx[" + std::to_string(token) + "][" + std::to_string(k) + "] is " +
               std::to_string(id);
      };
      if (id < 0 || static_cast<u32>(id) >= config.num_experts) {
        throw std::invalid_argument(place() + "; allowed are -1 (masked) to " +
                                    std::to_string(config.num_experts - 1));
      }
      if (last_token[id] == token) {
        throw std::invalid_argument(place() +
                                    " as is another route of that token; a token goes "
                                    "to an expert once");
      }
      last_token[id] = token;
    }
  }
}

Workspace::Workspace(Mapping mapping, u64 segment_bytes, u32 num_ranks, u32 rank, u64 digest,
                     const RankOptions& options)
    : num_ranks(num_ranks),
      rank(rank),
      options(options),
      mapping_(std::move(mapping)),
      digest_(digest) {
  check_range("num_ranks", num_ranks, 1, kMaxRanks);
  check_range("rank", rank, 0, num_ranks - 1);
  if (!(options.wait_bound_s > 0 && options.wait_bound_s <= 1e6)) {
    throw std::invalid_argument("wait_bound_s is " + std::to_string(options.wait_bound_s) +
                                "; allowed are more than 0 to 1e6 seconds");
  }
  if (!(options.max_delay_us >= 0 && options.max_delay_us <= 1e6)) {
    throw std::invalid_argument("max_delay_us is " + std::to_string(options.max_delay_us) +
                                "; allowed are 0 to 1e6");
  }
  if (mapping_.bytes / segment_bytes < num_ranks) {
    throw std::invalid_argument("the shared memory has " + std::to_string(mapping_.bytes) +
                                " bytes; " + std::to_string(num_ranks) + " segments of " +
                                std::to_string(segment_bytes) + " bytes need " +
                                std::to_string(num_ranks * segment_bytes));
  }
  for (u32 r = 0; r < num_ranks; ++r) segments_.push_back(mapping_.base + r * segment_bytes);
  reset_header();
}

HostMemory Workspace::memory(u64 seed) const {
  return HostMemory(options.max_delay_us, (options.delay_seed * kMaxRanks + rank) * 64 + seed);
}

Agent<HostMemory> Workspace::agent(HostMemory& memory, Role role, u32 epoch) const {
  return {memory,
          segments_.data(),
          num_ranks,
          rank,
          role,
          epoch,
          static_cast<u64>(options.wait_bound_s * 1e9)};
}

void Workspace::reset_counters(Field field) const {
  for (u64 offset = 0; offset < field.bytes; offset += kCounterBytes) {
    const std::atomic_ref<u32> counter(*reinterpret_cast<u32*>(at(rank, field, offset)));
    counter.store(options.initial_epoch, std::memory_order_relaxed);
  }
}

void Workspace::reset_header() {
  Header* mine = header(rank);
  mine->config_digest = digest_;
  std::atomic_ref<u32>(mine->beacon.late_rank).store(kNobody);
  std::atomic_ref<u32>(mine->fault.state).store(static_cast<u32>(FaultState::kNone));
  const std::lock_guard lock(error_mutex_);
  error_ = nullptr;
}

bool Workspace::faulted() const {
  return std::atomic_ref<u32>(header(rank)->fault.state).load() !=
         static_cast<u32>(FaultState::kNone);
}

void Workspace::require_usable() const {
  if (!faulted()) return;
  throw std::runtime_error("rank " + std::to_string(rank) +
                           ": an earlier pass faulted; call reset() on every rank first");
}

void Workspace::check_peer(u32 peer) const {
  if (header(peer)->config_digest == digest_) return;
  throw std::runtime_error("rank " + std::to_string(rank) + ": rank " + std::to_string(peer) +
                           " built its workspace from another TwinConfig; they must be equal");
}

void Workspace::fail(Agent<HostMemory>& agent) {
  {
    const std::lock_guard lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
  record_fault(agent, WaitSite{Site::kCallback, 0, rank}, 0, 0, 0);
}

void Workspace::raise_error() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(error_mutex_);
    error = std::exchange(error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
  if (faulted()) throw FaultError(header(rank)->fault);
}

}  // namespace mokbench
