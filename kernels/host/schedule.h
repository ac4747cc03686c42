// SPDX-License-Identifier: Apache-2.0
// Expert-sorted rows of one destination, by count, prefix sum and stable placement.
#pragma once

#include <vector>

#include "protocol.h"

namespace mokbench {

struct Route {
  u16 source;
  u16 k;
  u32 token;  // index at the source (mok), slot of the received row (push)
};

struct Tile {
  u32 expert;  // local to the rank
  u32 first_row;
  u32 num_rows;  // up to block_m; the rest of the tile is padding
};

struct Schedule {
  std::vector<Route> routes;  // row -> where it comes from, sorted by expert
  std::vector<Tile> tiles;

  // `for_each(visit)` calls visit(Route, local expert) for every route, in the order that rows of
  // one expert shall have, and does so twice.
  template <class ForEach>
  void build(u32 num_local_experts, u32 block_m, ForEach for_each) {
    next_row_.assign(num_local_experts + 1, 0);
    for_each([this](Route, u32 expert) { ++next_row_[expert + 1]; });
    tiles.clear();
    for (u32 expert = 0; expert < num_local_experts; ++expert) {
      const u32 num_rows = next_row_[expert + 1];
      for (u32 row = 0; row < num_rows; row += block_m) {
        const u32 left = num_rows - row;
        tiles.push_back({expert, next_row_[expert] + row, left < block_m ? left : block_m});
      }
      next_row_[expert + 1] += next_row_[expert];
    }
    routes.resize(next_row_[num_local_experts]);
    for_each([this](Route route, u32 expert) { routes[next_row_[expert]++] = route; });
  }

 private:
  std::vector<u32> next_row_;
};

// The order in which a rank goes round its peers: the next rank first, itself last, so that at any
// time the ranks use different links.
inline u32 nth_peer(u32 rank, u32 n, u32 num_ranks) { return (rank + 1 + n) % num_ranks; }

}  // namespace mokbench
