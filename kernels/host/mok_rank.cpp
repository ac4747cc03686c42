// SPDX-License-Identifier: Apache-2.0
#include "mok_rank.h"

#include <algorithm>
#include <utility>

namespace mokbench {

MokRank::MokRank(Mapping mapping, const Config& config, u32 rank, Buffers buffers, Gemm gemm1,
                 Gemm gemm2, const RankOptions& options)
    : config_((check_config(config), config)),
      layout_(mok_layout(config)),
      buffers_(buffers),
      gemm1_(std::move(gemm1)),
      gemm2_(std::move(gemm2)),
      workspace_(std::move(mapping), layout_.segment_bytes, config.num_ranks, rank,
                 config_digest(config), options),
      epoch_(options.initial_epoch),
      sum_(config.hidden),
      caller_memory_(workspace_.memory(0)) {
  for (u32 i = 0; i < config_.pull_workers + 2; ++i) {
    const Role role = i < config_.pull_workers    ? Role::kPull
                      : i == config_.pull_workers ? Role::kGemm1
                                                  : Role::kGemm2;
    roles_.push_back({workspace_.memory(i + 1), role, {}, {}, {}});
  }
  reset();
  std::vector<std::function<void()>> roles;
  for (u32 i = 0; i < roles_.size(); ++i) {
    roles.push_back([this, i] { serve(roles_[i], i); });
  }
  team_ = std::make_unique<Team>(std::move(roles));
}

void MokRank::reset() {
  for (const Field field : {layout_.entry, layout_.returned, layout_.schedule, layout_.ring_ready,
                            layout_.ring_free, layout_.hidden_ready, layout_.hidden_free}) {
    workspace_.reset_counters(field);
  }
  workspace_.reset_header();
  epoch_ = workspace_.options.initial_epoch;
  rows_sent_.assign(config_.num_ranks, 0);
  for (RoleState& state : roles_) state.ring = state.hidden = Cursor{};
}

MokRank::Stats MokRank::take_stats() {
  Stats stats;
  for (RoleState& state : roles_) {
    CopyStats& sum = state.role == Role::kPull ? stats.pull : stats.push;
    sum.add(state.copies.bytes, state.copies.ns);
    state.copies = {};
  }
  return stats;
}

void MokRank::run(const TokenBatch& batch, char* y) {
  workspace_.require_usable();
  check_topk(config_, batch);
  ++epoch_;
  // Roles wake now, so that their wake-up overlaps with staging; they wait for the schedule.
  team_->start();
  auto agent = workspace_.agent(caller_memory_, Role::kCaller, epoch_);
  Steps steps{agent, layout_, workspace_.options.initial_epoch, config_.block_m};
  workspace_.guard(agent, [&] { lead(steps, batch, y); });
  team_->wait();
  workspace_.raise_error();
}

void MokRank::lead(Steps& steps, const TokenBatch& batch, char* y) {
  publish(steps, batch);
  if (!build_schedule(steps)) return;
  combine(steps, batch, y);
}

void MokRank::publish(Steps& steps, const TokenBatch& batch) {
  const u32 rank = workspace_.rank;
  copy_row(workspace_.at(rank, layout_.x), batch.x, batch.num_tokens * row_bytes(config_));
  const u64 slot = u64{epoch_ % 2} * config_.num_ranks + rank;
  const u64 idx_bytes = u64{config_.top_k} * sizeof(i32);
  for (u32 n = 0; n < config_.num_ranks; ++n) {
    const u32 peer = nth_peer(rank, n, config_.num_ranks);
    copy_row(workspace_.at(peer, layout_.gathered_idx, slot * config_.max_tokens * idx_bytes),
             batch.topk_idx, batch.num_tokens * idx_bytes);
    copy_row(workspace_.at(peer, layout_.gathered_tokens, slot * sizeof(u32)), &batch.num_tokens,
             sizeof(u32));
    steps.publish_entry(peer);
  }
  for (u64 i = 0; i < u64{batch.num_tokens} * config_.top_k; ++i) {
    if (batch.topk_idx[i] >= 0) ++rows_sent_[owner_of(config_, batch.topk_idx[i])];
  }
}

bool MokRank::build_schedule(Steps& steps) {
  const u32 rank = workspace_.rank;
  for (u32 n = 0; n < config_.num_ranks; ++n) {
    const u32 source = nth_peer(rank, n, config_.num_ranks);
    if (!steps.wait_entry(source)) return false;
    workspace_.check_peer(source);
  }
  const u32 num_local = local_experts(config_);
  schedule_.build(num_local, config_.block_m, [&](auto visit) {
    for (u32 n = 0; n < config_.num_ranks; ++n) {
      const u32 source = nth_peer(rank, n, config_.num_ranks);
      const u64 slot = u64{epoch_ % 2} * config_.num_ranks + source;
      const u64 first = slot * config_.max_tokens * config_.top_k;
      const i32* ids = reinterpret_cast<const i32*>(
          workspace_.at(rank, layout_.gathered_idx, first * sizeof(i32)));
      const u32 num_tokens = *reinterpret_cast<const u32*>(
          workspace_.at(rank, layout_.gathered_tokens, slot * sizeof(u32)));
      for (u32 token = 0; token < num_tokens; ++token) {
        for (u32 k = 0; k < config_.top_k; ++k) {
          // A masked id is far above any expert once unsigned.
          const u32 expert = static_cast<u32>(*ids++) - rank * num_local;
          if (expert < num_local) {
            visit(Route{static_cast<u16>(source), static_cast<u16>(k), token}, expert);
          }
        }
      }
    }
  });
  steps.publish_schedule();
  return true;
}

bool MokRank::combine(Steps& steps, const TokenBatch& batch, char* y) {
  const u32 rank = workspace_.rank;
  for (u32 n = 0; n < config_.num_ranks; ++n) {
    const u32 destination = nth_peer(rank, n, config_.num_ranks);
    if (!steps.wait_returned(destination, rows_sent_[destination])) return false;
  }
  const u64 bytes = row_bytes(config_);
  const char* row = workspace_.at(rank, layout_.combine);
  for (u32 token = 0; token < batch.num_tokens; ++token) {
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    for (u32 k = 0; k < config_.top_k; ++k, row += bytes) {
      const u64 route = u64{token} * config_.top_k + k;
      if (batch.topk_idx[route] < 0) continue;
      add_scaled_row(sum_.data(), row, batch.topk_weights[route], config_.hidden,
                     config_.element_bytes);
    }
    store_row(y + token * bytes, sum_.data(), config_.hidden, config_.element_bytes);
  }
  return true;
}

void MokRank::serve(RoleState& state, u32 worker) {
  auto agent = workspace_.agent(state.memory, state.role, epoch_);
  Steps steps{agent, layout_, workspace_.options.initial_epoch, config_.block_m};
  workspace_.guard(agent, [&] {
    if (!steps.wait_schedule()) return;
    if (state.role == Role::kPull) pull(steps, state, worker);
    if (state.role == Role::kGemm1) run_gemm1(steps, state);
    if (state.role == Role::kGemm2) run_gemm2(steps, state);
  });
}

void MokRank::pull(Steps& steps, RoleState& state, u32 worker) {
  const u64 bytes = row_bytes(config_);
  u32 turn = worker;  // tiles until this worker's next one
  for (const Tile& tile : schedule_.tiles) {
    const Cursor at = state.ring;
    state.ring.advance(config_.ring_tiles);
    if (turn-- != 0) continue;
    turn = config_.pull_workers - 1;
    if (!steps.wait_ring_free(at)) return;
    const u64 started_ns = thread_cpu_ns();
    char* slot = buffers_.x_ring + u64{at.slot} * config_.block_m * bytes;
    for (u32 row = 0; row < tile.num_rows; ++row) {
      const Route& route = schedule_.routes[tile.first_row + row];
      copy_row(slot + row * bytes, workspace_.at(route.source, layout_.x, route.token * bytes),
               bytes);
    }
    state.copies.add(tile.num_rows * bytes, thread_cpu_ns() - started_ns);
    steps.raise_ring_ready(at, config_.block_m);
  }
}

void MokRank::run_gemm1(Steps& steps, RoleState& state) {
  for (const Tile& tile : schedule_.tiles) {
    if (!steps.wait_ring_ready(state.ring) || !steps.wait_hidden_free(state.hidden)) return;
    gemm1_(tile.expert, state.ring.slot * config_.block_m, state.hidden.slot * config_.block_m,
           tile.num_rows);
    steps.raise_hidden_ready(state.hidden);
    steps.release_ring(state.ring);
    state.ring.advance(config_.ring_tiles);
    state.hidden.advance(config_.hidden_ring_tiles);
  }
}

void MokRank::run_gemm2(Steps& steps, RoleState& state) {
  for (const Tile& tile : schedule_.tiles) {
    if (!steps.wait_hidden_ready(state.hidden)) return;
    gemm2_(tile.expert, state.hidden.slot * config_.block_m, 0, tile.num_rows);
    steps.release_hidden(state.hidden);
    state.hidden.advance(config_.hidden_ring_tiles);
    push_tile(steps, state, tile);
  }
}

void MokRank::push_tile(Steps& steps, RoleState& state, const Tile& tile) {
  const u64 bytes = row_bytes(config_);
  const Route* routes = schedule_.routes.data() + tile.first_row;
  // Rows of one source are neighbours, so each source is told once per tile.
  for (u32 row = 0; row < tile.num_rows;) {
    const u32 source = routes[row].source;
    const u32 first = row;
    const u64 started_ns = thread_cpu_ns();
    for (; row < tile.num_rows && routes[row].source == source; ++row) {
      const u64 slot = u64{routes[row].token} * config_.top_k + routes[row].k;
      copy_row(workspace_.at(source, layout_.combine, slot * bytes), buffers_.y_tile + row * bytes,
               bytes);
    }
    state.copies.add((row - first) * bytes, thread_cpu_ns() - started_ns);
    steps.publish_returned(source, row - first);
  }
}

}  // namespace mokbench
