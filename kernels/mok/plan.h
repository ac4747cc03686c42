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

// A C++20 template value in the kernel. The layer's block_m is the tiles' tile_rows.
struct MokConfig {
  Config layer;
  GemmConfig tiles;
  u32 pull_warps = 4;   // of a CTA: 1 to 4
  bool stamps = false;  // when each role did what, see MokStamp
};

// When a CTA did what, in ns of %globaltimer (kWaited: a sum); zero if never. STAMPS of
// mokbench/mok_config.py names them.
enum MokStamp : u32 {
  kBegun,
  kStaged,      // its share of the inputs
  kEntered,     // every rank's inputs are there
  kScheduled,   // the table is built
  kPulled,      // its last row, by the CTA's first pull warp
  kWaited,      // its loader, for rows
  kGemm1Begun,  // its first item of GEMM 1
  kGemm1Ended,  // its last one, stored
  kGemm2Begun,
  kGemm2Ended,
  kReturned,  // every rank's rows are back
  kSummed,
  kNumStamps,
};

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
  constexpr u32 tiles_before(u32 group) const { return group > 0 ? tile_ends[group - 1] : 0; }
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

// Groups of row tiles of an expert.
struct alignas(16) MokGroup {
  u32 expert;
  u32 first_row;   // the expert's first, of all rows sorted by expert
  u32 num_rows;    // of the expert
  u32 first_tile;  // of the group, among the expert's
};

constexpr u32 mok_row_tiles(const MokOrder& o, u32 rows) {
  return ceil_div(row_units(rows), o.tile_rows / kRowUnit);
}
constexpr u32 mok_groups(const MokOrder& o, u32 rows) {
  return ceil_div(mok_row_tiles(o, rows), o.group_tiles);
}
// At most, of so many rows and experts.
constexpr u64 most_groups(u32 tile_rows, u32 group_tiles, u64 rows, u32 experts) {
  return rows / (u64{tile_rows} * group_tiles) + experts;
}

// Rows of a row tile: the expert's units are shared out evenly.
struct MokRows {
  u32 first;  // of all rows sorted by expert
  u32 count;
  u32 units;
};
constexpr MokRows rows_of_tile(const MokOrder& o, const MokGroup& group, u32 in_group) {
  const Share units = share_of(row_units(group.num_rows), mok_row_tiles(o, group.num_rows),
                               group.first_tile + in_group);
  const u32 first = units.first * kRowUnit;
  return {group.first_row + first, min_of(group.num_rows - first, units.count * kRowUnit),
          units.count};
}

// `tiles` places behind `at`.
constexpr Cursor cursor_behind(Cursor at, u32 tiles, u32 ring_tiles) {
  const u32 slots = at.slot + tiles;
  return {slots % ring_tiles, at.lap + slots / ring_tiles};
}

// Where a pass begins in both rings: row tile t of a pass has the t-th slot from there.
struct MokRings {
  Cursor x;
  Cursor hidden;
};

// Which GEMM an item is of and where its row tile lies in both rings, in one register.
struct MokTag {
  u32 bits;

  static constexpr MokTag of(u32 gemm, u32 x_slot, u32 hidden_slot) {
    return {gemm << 31 | x_slot << 16 | hidden_slot};
  }
  constexpr u32 gemm() const { return bits >> 31; }
  constexpr u32 x_slot() const { return bits >> 16 & 0x7fff; }
  constexpr u32 hidden_slot() const { return bits & 0xffff; }
};

// An item as the scheduler hands it on. None behind the last: units is 0.
struct alignas(16) MokWork {
  u8 units;   // of rows
  u8 narrow;  // 1: its halves share columns, 0: rows
  u16 num_rows;
  u32 column;  // first of the output before SwiGLU
  MokTag tag;
  u32 turn = 0;  // counts the CTA's items from 1
  // Not the consumers'.
  u32 row;  // first of the output: of the ring of hidden rows, or of all rows sorted by expert
  u32 expert;
  u32 x_lap;
  u32 hidden_lap;
};

constexpr u32 kMokWordsOfConsumers = 4;

constexpr MokWork mok_work(const MokWalk& walk, const MokGroup* groups, const MokRings& rings,
                           const Config& layer, u32 index) {
  const MokItem item = walk.at(index);
  const MokGroup group = groups[item.group];
  const MokRows rows = rows_of_tile(walk.order, group, item.in_group);
  const u32 tile = walk.tiles_before(item.group) + item.in_group;
  const Cursor x = cursor_behind(rings.x, tile, layer.ring_tiles);
  const Cursor hidden = cursor_behind(rings.hidden, tile, layer.hidden_ring_tiles);
  const u32 n = item.gemm == 0 ? 2 * layer.intermediate : layer.hidden;
  return {.units = static_cast<u8>(rows.units),
          .narrow = item.block == wide_blocks(n),
          .num_rows = static_cast<u16>(rows.count),
          .column = item.block * 2 * kHalfCols,
          .tag = MokTag::of(item.gemm, x.slot, hidden.slot),
          .row = item.gemm == 0 ? hidden.slot * walk.order.tile_rows : rows.first,
          .expert = group.expert,
          .x_lap = x.lap,
          .hidden_lap = hidden.lap};
}

// Rows are pulled a few at a time, by whichever warp of the rank has the turn.
constexpr u32 kPullRows = 4;

// A table entry: which route a row belongs to. K * max_tokens is at most 2^25.
constexpr u32 kRouteBits = 25;
constexpr u32 packed_route(u32 source, u32 route) { return source << kRouteBits | route; }
constexpr u32 source_of_route(u32 packed) { return packed >> kRouteBits; }
constexpr u32 route_of_route(u32 packed) { return packed & ((1u << kRouteBits) - 1); }

}  // namespace mokbench
