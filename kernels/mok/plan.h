// SPDX-License-Identifier: Apache-2.0
// In which order a rank's CTAs take the tiles of both GEMMs of a MoK pass, and how large its rings
// must be for that. No GPU in here: the host compiles it too, for tests.
//
// Rows are sorted by expert and cut into row tiles of up to tile_rows, each in a slot of the ring
// of dispatched rows and later in one of the ring of hidden rows. Groups of neighbouring row tiles
// of an expert take the same weights one after the other. A group's tiles of GEMM 2 come `lag`
// tiles of GEMM 1 behind the group's last: so late that none of them waits, so early that the ring
// of hidden rows is short.
#pragma once

#include "gemm/plan.h"

namespace mokbench {

// What the order depends on besides the routing.
struct MokOrder {
  u32 tile_rows;
  u32 group_tiles;  // row tiles
  u32 lag;          // tiles of GEMM 1
  u32 blocks[2];    // column blocks of GEMM 1 and GEMM 2
};

constexpr u32 mok_blocks(u32 n) { return wide_blocks(n) + (has_narrow_block(n) ? 1 : 0); }

// The order of a rank on num_ctas SMs. A CTA has a tile in work and the next one in view, so a tile
// that was taken 2 * num_ctas ago is as good as done.
constexpr MokOrder mok_order(u32 tile_rows, u32 group_tiles, u32 hidden, u32 intermediate,
                             u32 num_ctas) {
  return {tile_rows, group_tiles, 2 * num_ctas, {mok_blocks(2 * intermediate), mok_blocks(hidden)}};
}

// The smallest legal rings. All row tiles of a group are at work before the first of them is done
// with GEMM 1. A tile's hidden rows are gone when the GEMM 2 of its group is: until then at most
// the tiles of the lag follow, the rest of a group before it and a group behind it.
constexpr u32 least_ring_tiles(const MokOrder& o) { return o.group_tiles; }
constexpr u32 least_hidden_ring_tiles(const MokOrder& o) {
  return ceil_div(o.lag, o.blocks[0]) + 2 * o.group_tiles;
}

// Where in the order the GEMM 2 of a group begins, given the row tiles before its end and its
// begin.
constexpr u32 gemm2_begin(const MokOrder& o, u32 tiles_before, u32 tiles_through, u32 all_tiles) {
  return min_of(tiles_through * o.blocks[0] + o.lag, all_tiles * o.blocks[0]) +
         tiles_before * o.blocks[1];
}

// One place in the order.
struct MokItem {
  u32 gemm;  // 0 or 1
  u32 group;
  u32 in_group;  // row tile
  u32 block;     // of columns
};

// Finds items by their place. `groups` of them, tile_ends[g] the row tiles of groups 0 to g.
struct MokWalk {
  const MokOrder& order;
  const u32* tile_ends;
  u32 groups;

  constexpr u32 all_tiles() const { return groups > 0 ? tile_ends[groups - 1] : 0; }
  constexpr u32 items() const { return all_tiles() * (order.blocks[0] + order.blocks[1]); }

  constexpr MokItem at(u32 index) const {
    const u32 begun = groups_begun(index);
    if (begun > 0) {
      const u32 group = begun - 1;
      const u32 before = tiles_before(group);
      const u32 within = index - begin_of(group);
      if (within < (tile_ends[group] - before) * order.blocks[1]) return item(1, group, within);
    }
    const u32 nth = index - tiles_before(begun) * order.blocks[1];
    const u32 group = group_of(nth / order.blocks[0]);
    return item(0, group, nth - tiles_before(group) * order.blocks[0]);
  }

 private:
  constexpr u32 tiles_before(u32 group) const { return group > 0 ? tile_ends[group - 1] : 0; }
  constexpr u32 begin_of(u32 group) const {
    return gemm2_begin(order, tiles_before(group), tile_ends[group], all_tiles());
  }
  // Columns outer, rows inner: row tiles that share weights follow each other.
  constexpr MokItem item(u32 gemm, u32 group, u32 within) const {
    const u32 tiles = tile_ends[group] - tiles_before(group);
    return {gemm, group, within % tiles, within / tiles};
  }
  // Groups whose GEMM 2 begins at or before `index`; their begins only rise.
  constexpr u32 groups_begun(u32 index) const {
    u32 low = 0;
    u32 high = groups;
    while (low < high) {
      const u32 middle = (low + high) / 2;
      if (begin_of(middle) <= index) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  constexpr u32 group_of(u32 tile) const {
    u32 low = 0;
    u32 high = groups - 1;
    while (low < high) {
      const u32 middle = (low + high) / 2;
      if (tile < tile_ends[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

}  // namespace mokbench
