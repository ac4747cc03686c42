// SPDX-License-Identifier: Apache-2.0
#include "push_rank.h"

#include <algorithm>
#include <utility>

namespace mokbench {

PushRank::PushRank(Mapping mapping, const Config& config, u32 rank, Buffers buffers, Gemm gemm1,
                   Gemm gemm2, const RankOptions& options)
    : config_((check_config(config), config)),
      layout_(push_layout(config)),
      buffers_(buffers),
      gemm1_(std::move(gemm1)),
      gemm2_(std::move(gemm2)),
      workspace_(std::move(mapping), layout_.segment_bytes, config.num_ranks, rank,
                 config_digest(config), options),
      memory_(workspace_.memory(0)),
      epoch_(options.initial_epoch),
      num_received_(config.num_ranks),
      first_received_(config.num_ranks),
      num_sent_(config.num_ranks),
      sum_(config.hidden) {
  reset();
}

void PushRank::reset() {
  workspace_.reset_counters(layout_.dispatched);
  workspace_.reset_counters(layout_.combined);
  workspace_.reset_header();
  epoch_ = workspace_.options.initial_epoch;
  phase_ = Phase::kIdle;
}

PushRank::Stats PushRank::take_stats() { return std::exchange(stats_, Stats{}); }

void PushRank::require_phase(Phase phase, const char* name) const {
  workspace_.require_usable();
  if (phase_ == phase) return;
  throw std::runtime_error(std::string(name) +
                           "() is out of order; a pass is dispatch(), compute(), combine()");
}

template <class Body>
void PushRank::run_phase(Phase to, Body body) {
  auto agent = workspace_.agent(memory_, Role::kCaller, epoch_);
  Steps steps{agent, layout_};
  workspace_.guard(agent, [&] { body(steps); });
  workspace_.raise_error();
  phase_ = to;
}

void PushRank::dispatch(const TokenBatch& batch) {
  require_phase(Phase::kIdle, "dispatch");
  check_topk(config_, batch);
  ++epoch_;
  run_phase(Phase::kDispatched, [&](Steps& steps) {
    push_rows(steps, batch);
    if (receive(steps)) sort_rows();
  });
}

void PushRank::compute() {
  require_phase(Phase::kDispatched, "compute");
  run_phase(Phase::kComputed, [&](Steps&) {
    for (const Tile& tile : schedule_.tiles) {
      gemm1_(tile.expert, tile.first_row, 0, tile.num_rows);
      gemm2_(tile.expert, 0, tile.first_row, tile.num_rows);
    }
  });
}

void PushRank::combine(char* y, u64 num_rows) {
  require_phase(Phase::kComputed, "combine");
  if (num_rows != num_tokens_) {
    throw std::invalid_argument("y has " + std::to_string(num_rows) + " rows; this pass has " +
                                std::to_string(num_tokens_) + " tokens");
  }
  run_phase(Phase::kIdle, [&](Steps& steps) {
    push_partials(steps);
    sum_partials(steps, y);
  });
}

PushRank::Meta PushRank::meta(u32 source, u64 j) const {
  const u64 slot = u64{source} * config_.max_tokens + j;
  const char* at =
      workspace_.at(workspace_.rank, layout_.recv_meta, slot * push_meta_bytes(config_));
  const i32* ids = reinterpret_cast<const i32*>(at) + 2;
  return {ids, reinterpret_cast<const float*>(ids + config_.top_k)};
}

void PushRank::push_rows(Steps& steps, const TokenBatch& batch) {
  num_tokens_ = batch.num_tokens;
  slot_of_.assign(u64{num_tokens_} * config_.num_ranks, kNobody);
  const u64 parity_slot = u64{epoch_ % 2} * config_.num_ranks + workspace_.rank;
  for (u32 n = 0; n < config_.num_ranks; ++n) {
    const u32 destination = nth_peer(workspace_.rank, n, config_.num_ranks);
    const u64 started_ns = thread_cpu_ns();
    const u32 count = push_to(destination, batch);
    stats_.push.add(count * row_bytes(config_), thread_cpu_ns() - started_ns);
    num_sent_[destination] = count;
    copy_row(workspace_.at(destination, layout_.recv_count, parity_slot * sizeof(u32)), &count,
             sizeof(count));
    steps.publish_dispatched(destination);
  }
}

u32 PushRank::push_to(u32 destination, const TokenBatch& batch) {
  const u32 num_local = local_experts(config_);
  const u64 bytes = row_bytes(config_);
  const u64 first_slot = u64{workspace_.rank} * config_.max_tokens;
  u32 j = 0;
  for (u32 token = 0; token < batch.num_tokens; ++token) {
    const i32* ids = batch.topk_idx + u64{token} * config_.top_k;
    const auto goes_there = [&](i32 id) {
      return static_cast<u32>(id) - destination * num_local < num_local;
    };
    if (std::none_of(ids, ids + config_.top_k, goes_there)) continue;
    char* at =
        workspace_.at(destination, layout_.recv_meta, (first_slot + j) * push_meta_bytes(config_));
    u32* token_word = reinterpret_cast<u32*>(at);
    i32* meta_ids = reinterpret_cast<i32*>(at) + 2;
    float* meta_weights = reinterpret_cast<float*>(meta_ids + config_.top_k);
    *token_word = token;
    for (u32 k = 0; k < config_.top_k; ++k) {
      meta_ids[k] = goes_there(ids[k]) ? ids[k] : -1;
      meta_weights[k] = batch.topk_weights[u64{token} * config_.top_k + k];
    }
    copy_row(workspace_.at(destination, layout_.recv_x, (first_slot + j) * bytes),
             batch.x + token * bytes, bytes);
    slot_of_[u64{token} * config_.num_ranks + destination] = j++;
  }
  return j;
}

bool PushRank::receive(Steps& steps) {
  u64 num_rows = 0;
  for (u32 n = 0; n < config_.num_ranks; ++n) {
    const u32 source = nth_peer(workspace_.rank, n, config_.num_ranks);
    if (!steps.wait_dispatched(source)) return false;
    workspace_.check_peer(source);
    const u64 slot = u64{epoch_ % 2} * config_.num_ranks + source;
    num_received_[source] = *reinterpret_cast<const u32*>(
        workspace_.at(workspace_.rank, layout_.recv_count, slot * sizeof(u32)));
    first_received_[source] = num_rows;
    num_rows += num_received_[source];
  }
  const u32 first_expert = workspace_.rank * local_experts(config_);
  schedule_.build(local_experts(config_), config_.block_m, [&](auto visit) {
    for (u32 n = 0; n < config_.num_ranks; ++n) {
      const u32 source = nth_peer(workspace_.rank, n, config_.num_ranks);
      for (u32 j = 0; j < num_received_[source]; ++j) {
        const i32* ids = meta(source, j).ids;
        for (u32 k = 0; k < config_.top_k; ++k) {
          if (ids[k] < 0) continue;
          visit(Route{static_cast<u16>(source), static_cast<u16>(k), j},
                static_cast<u32>(ids[k]) - first_expert);
        }
      }
    }
  });
  row_of_.resize(num_rows * config_.top_k);
  return true;
}

void PushRank::sort_rows() {
  const u64 bytes = row_bytes(config_);
  const u64 started_ns = thread_cpu_ns();
  for (u64 row = 0; row < schedule_.routes.size(); ++row) {
    const Route& route = schedule_.routes[row];
    const u64 slot = u64{route.source} * config_.max_tokens + route.token;
    copy_row(buffers_.x_rows + row * bytes,
             workspace_.at(workspace_.rank, layout_.recv_x, slot * bytes), bytes);
    row_of_[(first_received_[route.source] + route.token) * config_.top_k + route.k] =
        static_cast<u32>(row);
  }
  stats_.sort.add(schedule_.routes.size() * bytes, thread_cpu_ns() - started_ns);
}

void PushRank::push_partials(Steps& steps) {
  const u64 bytes = row_bytes(config_);
  const u64 first_slot = u64{workspace_.rank} * config_.max_tokens;
  for (u32 n = 0; n < config_.num_ranks; ++n) {
    const u32 source = nth_peer(workspace_.rank, n, config_.num_ranks);
    for (u32 j = 0; j < num_received_[source]; ++j) {
      const Meta row_meta = meta(source, j);
      const u32* rows = row_of_.data() + (first_received_[source] + j) * config_.top_k;
      std::fill(sum_.begin(), sum_.end(), 0.0f);
      for (u32 k = 0; k < config_.top_k; ++k) {
        if (row_meta.ids[k] < 0) continue;
        add_scaled_row(sum_.data(), buffers_.y_rows + rows[k] * bytes, row_meta.weights[k],
                       config_.hidden, config_.element_bytes);
      }
      store_row(workspace_.at(source, layout_.partial, (first_slot + j) * bytes), sum_.data(),
                config_.hidden, config_.element_bytes);
    }
    steps.publish_combined(source);
  }
}

bool PushRank::sum_partials(Steps& steps, char* y) {
  for (u32 n = 0; n < config_.num_ranks; ++n) {
    const u32 destination = nth_peer(workspace_.rank, n, config_.num_ranks);
    if (num_sent_[destination] > 0 && !steps.wait_combined(destination)) return false;
  }
  const u64 bytes = row_bytes(config_);
  for (u32 token = 0; token < num_tokens_; ++token) {
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    for (u32 destination = 0; destination < config_.num_ranks; ++destination) {
      const u32 j = slot_of_[u64{token} * config_.num_ranks + destination];
      if (j == kNobody) continue;
      const u64 slot = u64{destination} * config_.max_tokens + j;
      add_scaled_row(sum_.data(), workspace_.at(workspace_.rank, layout_.partial, slot * bytes),
                     1.0f, config_.hidden, config_.element_bytes);
    }
    store_row(y + token * bytes, sum_.data(), config_.hidden, config_.element_bytes);
  }
  return true;
}

}  // namespace mokbench
