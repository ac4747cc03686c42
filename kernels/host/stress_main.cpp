// SPDX-License-Identifier: Apache-2.0
// The twin with ranks as threads of one process and a plain matmul, for ThreadSanitizer; built and
// run by tests/test_tsan.py. Arguments: mok|push|signal num_ranks passes element_bytes seed.
// Exit status: 0 right, 1 a wrong result or a fault, 66 (ThreadSanitizer's) a race.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "elements.h"
#include "mok_rank.h"
#include "push_rank.h"
#include "shared_memory.h"
#include "signal_rank.h"

namespace mokbench {

namespace {

float element_at(const char* rows, u64 idx, u32 element_bytes) {
  if (element_bytes == 2) return load_element(reinterpret_cast<const Bf16*>(rows)[idx]);
  return reinterpret_cast<const float*>(rows)[idx];
}

void set_element(char* rows, u64 idx, float value, u32 element_bytes) {
  store_row(rows + idx * element_bytes, &value, 1, element_bytes);
}

// Weights of every expert: up and gate [2I, H], down [H, I].
struct Layer {
  Config config;
  std::vector<float> w13, w2;

  Layer(const Config& c, u64 seed) : config(c) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<float> uniform(-0.5f, 0.5f);
    w13.resize(u64{c.num_experts} * 2 * c.intermediate * c.hidden);
    w2.resize(u64{c.num_experts} * c.hidden * c.intermediate);
    for (float& w : w13) w = uniform(random);
    for (float& w : w2) w = uniform(random);
  }

  // One row through gate, up and SwiGLU, stored as elements.
  void up(u32 expert, const char* x, char* hidden) const {
    const Config& c = config;
    const float* w = w13.data() + u64{expert} * 2 * c.intermediate * c.hidden;
    for (u32 i = 0; i < c.intermediate; ++i) {
      float gate = 0, value = 0;
      for (u32 h = 0; h < c.hidden; ++h) {
        const float in = element_at(x, h, c.element_bytes);
        gate += w[u64{i} * c.hidden + h] * in;
        value += w[u64{c.intermediate + i} * c.hidden + h] * in;
      }
      set_element(hidden, i, gate / (1 + std::exp(-gate)) * value, c.element_bytes);
    }
  }
  void down(u32 expert, const char* hidden, char* y) const {
    const Config& c = config;
    const float* w = w2.data() + u64{expert} * c.hidden * c.intermediate;
    for (u32 h = 0; h < c.hidden; ++h) {
      float sum = 0;
      for (u32 i = 0; i < c.intermediate; ++i) {
        sum += w[u64{h} * c.intermediate + i] * element_at(hidden, i, c.element_bytes);
      }
      set_element(y, h, sum, c.element_bytes);
    }
  }
};

struct Tokens {
  std::vector<char> x, y;
  std::vector<i32> idx;
  std::vector<float> weights;
  u32 num_tokens;

  // Other counts, none at all now and then, and other routes in every pass; some are masked.
  Tokens(const Config& c, u64 seed) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    num_tokens = static_cast<u32>(random() % (c.max_tokens + 1));
    x.resize(num_tokens * row_bytes(c));
    y.resize(x.size());
    for (u64 i = 0; i < u64{num_tokens} * c.hidden; ++i) {
      set_element(x.data(), i, uniform(random) - 0.5f, c.element_bytes);
    }
    std::vector<i32> experts(c.num_experts);
    for (u32 e = 0; e < c.num_experts; ++e) experts[e] = static_cast<i32>(e);
    for (u32 token = 0; token < num_tokens; ++token) {
      std::shuffle(experts.begin(), experts.end(), random);
      for (u32 k = 0; k < c.top_k; ++k) {
        idx.push_back(random() % 8 == 0 ? -1 : experts[k]);
        weights.push_back(uniform(random));
      }
    }
  }
  TokenBatch batch() const { return {x.data(), idx.data(), weights.data(), num_tokens}; }
};

// Token by token, without any of the twin's code but the element type.
double largest_error(const Layer& layer, const Tokens& tokens) {
  const Config& c = layer.config;
  std::vector<char> hidden(c.intermediate * c.element_bytes), row(row_bytes(c));
  double largest = 0;
  for (u32 token = 0; token < tokens.num_tokens; ++token) {
    std::vector<double> sum(c.hidden, 0.0);
    for (u32 k = 0; k < c.top_k; ++k) {
      const u64 route = u64{token} * c.top_k + k;
      if (tokens.idx[route] < 0) continue;
      const u32 expert = static_cast<u32>(tokens.idx[route]);
      layer.up(expert, tokens.x.data() + token * row_bytes(c), hidden.data());
      layer.down(expert, hidden.data(), row.data());
      for (u32 h = 0; h < c.hidden; ++h) {
        sum[h] += double{tokens.weights[route]} * element_at(row.data(), h, c.element_bytes);
      }
    }
    for (u32 h = 0; h < c.hidden; ++h) {
      const float y = element_at(tokens.y.data(), u64{token} * c.hidden + h, c.element_bytes);
      largest = std::max(largest, std::abs(y - sum[h]) / (1 + std::abs(sum[h])));
    }
  }
  return largest;
}

// Rows of the GEMMs' buffers, by the pointers that MokRank and PushRank take.
struct Buffers {
  std::vector<char> x, hidden, y;
  Gemm gemm1, gemm2;

  Buffers(const Layer& layer, u32 rank, u64 x_rows, u64 hidden_rows, u64 y_rows) {
    const Config& c = layer.config;
    const u64 hidden_bytes = u64{c.intermediate} * c.element_bytes;
    x.resize(x_rows * row_bytes(c));
    hidden.resize(hidden_rows * hidden_bytes);
    y.resize(y_rows * row_bytes(c));
    const u32 first = rank * local_experts(c);
    gemm1 = [=, this, &layer](u32 expert, u32 in_row, u32 out_row, u32 rows) {
      for (u32 i = 0; i < rows; ++i) {
        layer.up(first + expert, x.data() + (in_row + i) * row_bytes(layer.config),
                 hidden.data() + (out_row + i) * hidden_bytes);
      }
    };
    gemm2 = [=, this, &layer](u32 expert, u32 in_row, u32 out_row, u32 rows) {
      for (u32 i = 0; i < rows; ++i) {
        layer.down(first + expert, hidden.data() + (in_row + i) * hidden_bytes,
                   y.data() + (out_row + i) * row_bytes(layer.config));
      }
    };
  }
};

struct Run {
  std::string protocol;
  u32 passes;
  u64 seed;
  Layer layer;
  Mapping memory;
  RankOptions options;
  std::barrier<> built;

  void check(u32 rank, u32 pass, const Tokens& tokens) const {
    const double error = largest_error(layer, tokens);
    const double allowed = layer.config.element_bytes == 2 ? 2e-2 : 1e-5;
    if (error <= allowed) return;
    throw std::runtime_error("rank " + std::to_string(rank) + ", pass " + std::to_string(pass) +
                             ": error " + std::to_string(error));
  }
  Tokens tokens(u32 rank, u32 pass) const {
    return Tokens(layer.config, seed + 1000 * (pass + 1) + rank);
  }

  void mok(u32 rank) {
    const Config& c = layer.config;
    Buffers buffers(layer, rank, u64{c.ring_tiles} * c.block_m,
                    u64{c.hidden_ring_tiles} * c.block_m, c.block_m);
    MokRank mok(memory, c, rank, {buffers.x.data(), buffers.y.data()}, buffers.gemm1, buffers.gemm2,
                options);
    built.arrive_and_wait();
    for (u32 pass = 0; pass < passes; ++pass) {
      Tokens mine = tokens(rank, pass);
      mok.run(mine.batch(), mine.y.data());
      check(rank, pass, mine);
    }
  }
  void push(u32 rank) {
    const Config& c = layer.config;
    const u64 rows = push_capacity_rows(c);
    Buffers buffers(layer, rank, rows, c.block_m, rows);
    PushRank push(memory, c, rank, {buffers.x.data(), buffers.y.data()}, buffers.gemm1,
                  buffers.gemm2, options);
    built.arrive_and_wait();
    for (u32 pass = 0; pass < passes; ++pass) {
      Tokens mine = tokens(rank, pass);
      push.dispatch(mine.batch());
      push.compute();
      push.combine(mine.y.data(), mine.num_tokens);
      check(rank, pass, mine);
    }
  }
  void signal(u32 rank) {
    const u32 ranks = layer.config.num_ranks;
    SignalRank signal(memory, ranks, rank, options);
    built.arrive_and_wait();
    signal.align();
    signal.hop(passes);
    signal.local_hop(passes);
    for (u32 group = 1; group <= ranks; ++group) {
      signal.entry(passes, group);
      signal.ready(Dispatch::kPull, passes, group);
      signal.ready(Dispatch::kPush, passes, group);
    }
    signal.align();
  }
};

int stress(const std::string& protocol, u32 num_ranks, u32 passes, u32 element_bytes, u64 seed) {
  const Config config{.num_ranks = num_ranks,
                      .num_experts = 3 * num_ranks,
                      .top_k = 3,
                      .max_tokens = 20,
                      .hidden = 24,
                      .intermediate = 16,
                      .element_bytes = element_bytes,
                      .block_m = 4,
                      .ring_tiles = 1 + static_cast<u32>(seed % 3),
                      .hidden_ring_tiles = 1 + static_cast<u32>(seed % 2),
                      .pull_workers = 1 + static_cast<u32>(seed % 2)};
  const u64 segment = protocol == "mok"    ? mok_layout(config).segment_bytes
                      : protocol == "push" ? push_layout(config).segment_bytes
                                           : signal_layout(num_ranks).segment_bytes;
  const auto memory = map_anonymous(num_ranks * segment, true);
  const RankOptions options{.wait_bound_s = 60,
                            .initial_epoch = ~0u - passes / 2,
                            .max_delay_us = 100,
                            .delay_seed = seed};
  Run run{protocol,
          passes,
          seed,
          Layer(config, seed),
          {static_cast<char*>(memory.get()), num_ranks * segment, memory},
          options,
          std::barrier<>(num_ranks)};
  std::vector<std::string> errors(num_ranks);
  std::vector<std::thread> ranks;
  for (u32 rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        if (protocol == "mok") run.mok(rank);
        if (protocol == "push") run.push(rank);
        if (protocol == "signal") run.signal(rank);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  int status = 0;
  for (u32 rank = 0; rank < num_ranks; ++rank) {
    ranks[rank].join();
    if (errors[rank].empty()) continue;
    std::fprintf(stderr, "%s\n", errors[rank].c_str());
    status = 1;
  }
  return status;
}

}  // namespace

}  // namespace mokbench

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: %s mok|push|signal num_ranks passes element_bytes seed\n",
                 argv[0]);
    return 2;
  }
  const auto number = [&](int i) { return static_cast<unsigned>(std::atoi(argv[i])); };
  return mokbench::stress(argv[1], number(2), number(3), number(4), number(5));
}
