// SPDX-License-Identifier: Apache-2.0
// Which tiles a grouped GEMM is made of, and in which order its CTAs take them. No GPU in here:
// the host compiles it too, for tests.
//
// Rows are sorted by expert. A tile is kTileCols output columns of one expert times up to tile_rows
// of its rows, in units of kRowUnit: an expert's units are shared out evenly among its row tiles,
// because a short tile reads its weights for few rows.
#pragma once

#include "protocol.h"

namespace mokbench {

constexpr u32 kTileCols = 128;  // 64 a consumer warpgroup
constexpr u32 kRowUnit = 16;
constexpr u32 kMaxGemmExperts = 512;

// A C++20 template value in the kernel. Stages: k-blocks of both operands in shared memory.
struct GemmConfig {
  u32 tile_rows = 256;
  u32 stages = 4;
  u32 group_tiles = 8;       // row tiles of an expert that share a column block one after the other
  bool swiglu = false;       // weights alternate 8 gate rows, 8 up rows; half as many columns out
  bool row_weights = false;  // output rows are multiplied by a weight each
  bool split_k = false;      // the last tiles may be shared out by k-blocks, see TileQueue
};

constexpr u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
constexpr u32 min_of(u32 a, u32 b) { return a < b ? a : b; }

// Rows of the box by which most of a short tile is loaded.
constexpr u32 part_rows(const GemmConfig& c) {
  return c.tile_rows / 4 > kRowUnit ? c.tile_rows / 4 : kRowUnit;
}

constexpr u32 row_units(u32 rows) { return ceil_div(rows, kRowUnit); }
constexpr u32 row_tiles(const GemmConfig& c, u32 rows) {
  return ceil_div(row_units(rows), c.tile_rows / kRowUnit);
}

// The nth of `parts` even shares of `units`: larger shares first.
struct Share {
  u32 first;
  u32 count;
};
constexpr Share share_of(u32 units, u32 parts, u32 nth) {
  const u32 base = units / parts;
  const u32 extra = units % parts;
  return {nth * base + min_of(nth, extra), base + (nth < extra ? 1 : 0)};
}

// The order in which the tiles of a launch are taken: one after the other by whoever is free. The
// last ones, which would leave CTAs idle, are cut into `pieces` of rows each, or their k-blocks are
// shared out among `k_parts` CTAs, whose sums the first part's owner adds in order. It is taken
// last, so that it waits for CTAs only that are already at work.
struct TileQueue {
  u32 whole;        // tiles that stay whole
  u32 pieces = 1;   // of each of the tiles behind them
  u32 k_parts = 1;  // the same; one of the two is 1
  u32 items;

  constexpr TileQueue(const GemmConfig& c, u32 tiles, u32 num_ctas, u32 k_blocks)
      : whole(tiles), items(tiles) {
    const u32 rest = tiles % num_ctas;
    const u32 most = c.tile_rows / kRowUnit;
    u32 best = k_blocks * block_cycles(most);
    for (u32 cut = 2; cut <= min_of(most, kMaxCut) && rest > 0; ++cut) {
      const u32 rounds = ceil_div(rest * cut, num_ctas);
      const u32 by_rows = rounds * k_blocks * block_cycles(ceil_div(most, cut));
      if (by_rows < best) {
        best = by_rows;
        pieces = cut;
        k_parts = 1;
      }
      if (!c.split_k || rest * (cut - 1) > kPartsACta * num_ctas) continue;
      const u32 by_k =
          rounds * (ceil_div(k_blocks, cut) * block_cycles(most) + kHandOverCycles * cut);
      if (by_k < best) {
        best = by_k;
        pieces = 1;
        k_parts = cut;
      }
    }
    if (pieces * k_parts > 1) {
      whole = tiles - rest;
      items = whole + rest * pieces * k_parts;
    }
  }

  struct Item {
    u32 tile;
    u32 piece;
    u32 k_part;
  };
  constexpr Item item(u32 index) const {
    if (index < whole) return {index, 0, 0};
    const u32 in_tile = (index - whole) % (pieces * k_parts);
    const u32 tile = whole + (index - whole) / (pieces * k_parts);
    if (k_parts > 1) return {tile, 0, k_parts - 1 - in_tile};
    return {tile, in_tile, 0};
  }
  constexpr u32 pieces_of(u32 tile) const { return tile < whole ? 1 : pieces; }
  constexpr u32 k_parts_of(u32 tile) const { return tile < whole ? 1 : k_parts; }

  // Sums of this many parts fit the launch's memory.
  static constexpr u32 kPartsACta = 2;

 private:
  static constexpr u32 kMaxCut = 5;
  // To write a tile's FP32 sums, or to read and add them: 128 KiB at some 30 bytes a cycle.
  static constexpr u32 kHandOverCycles = 5000;

  // Cycles of a k-block: of the tensor cores, or of its operands' way into shared memory, 52 bytes
  // a cycle as seen with tiles of 128 rows on an H200.
  static constexpr u32 block_cycles(u32 units) {
    const u32 loaded = (kTileCols + units * kRowUnit) * 128 / 52;
    const u32 multiplied = 4 * kRowUnit * units;
    return loaded > multiplied ? loaded : multiplied;
  }
};

// A tile, or a piece of one, as the producer hands it to the consumers. None behind the last: units
// is 0.
struct alignas(16) GemmWork {
  u32 units;
  u32 expert;
  u32 row;       // first of the input and of the output
  u32 num_rows;  // that are the expert's
  u32 column;    // first of the output before SwiGLU
  u32 first_block;
  u32 num_blocks;
  u32 k_part;  // of k_parts; 0 gets the others' sums
  u32 k_parts;
  u32 parts_at;  // where the sums of parts 1 and on are kept, in parts
};

// Walks the queue's items in rising order; not all of them need to be asked for. tile_ends[e] is
// the number of tiles of experts 0 to e, row_ends[e] the row behind expert e's last.
struct TileWalk {
  const GemmConfig& c;
  const u32* tile_ends;
  const i32* row_ends;
  u32 num_experts;
  u32 n;
  u32 k_blocks;
  TileQueue queue;
  u32 expert = 0;  // of the item last asked for

  constexpr TileWalk(const GemmConfig& c, const u32* tile_ends, const i32* row_ends,
                     u32 num_experts, u32 n, u32 k_blocks, u32 num_ctas)
      : c(c),
        tile_ends(tile_ends),
        row_ends(row_ends),
        num_experts(num_experts),
        n(n),
        k_blocks(k_blocks),
        queue(c, num_experts > 0 ? tile_ends[num_experts - 1] : 0, num_ctas, k_blocks) {}

  // Columns outer, rows inner: both operands of the tiles that run together stay in the L2. A piece
  // may be empty.
  constexpr GemmWork at(u32 index) {
    const TileQueue::Item item = queue.item(index);
    find_expert(item.tile);
    const u32 begin = expert > 0 ? row_ends[expert - 1] : 0;
    const u32 rows = row_ends[expert] - begin;
    const u32 nth = item.tile - (expert > 0 ? tile_ends[expert - 1] : 0);
    const u32 num_row_tiles = row_tiles(c, rows);
    const u32 group_size = c.group_tiles * ceil_div(n, kTileCols);
    const u32 first_row_tile = nth / group_size * c.group_tiles;
    const u32 within = nth % group_size;
    const u32 in_group = min_of(c.group_tiles, num_row_tiles - first_row_tile);
    const Share tile = share_of(row_units(rows), num_row_tiles, first_row_tile + within % in_group);
    const Share part = share_of(tile.count, queue.pieces_of(item.tile), item.piece);
    const u32 first_row = (tile.first + part.first) * kRowUnit;
    const u32 num_rows = min_of(rows - first_row, part.count * kRowUnit);
    // What a short tile takes is its weights' way, which parts would not shorten.
    const bool is_short = 2 * tile.count * kRowUnit <= c.tile_rows;
    const u32 k_parts = is_short ? 1 : queue.k_parts_of(item.tile);
    if (item.k_part >= k_parts) return {};
    const Share blocks = share_of(k_blocks, k_parts, item.k_part);
    return {.units = part.count,
            .expert = expert,
            .row = begin + first_row,
            .num_rows = num_rows,
            .column = within / in_group * kTileCols,
            .first_block = blocks.first,
            .num_blocks = blocks.count,
            .k_part = item.k_part,
            .k_parts = k_parts,
            .parts_at = k_parts > 1 ? (item.tile - queue.whole) * (k_parts - 1) : 0};
  }

 private:
  constexpr void find_expert(u32 tile) {
    u32 end = num_experts - 1;  // has the tile if no expert before it has
    while (expert < end) {
      const u32 middle = (expert + end) / 2;
      if (tile < tile_ends[middle]) {
        end = middle;
      } else {
        expert = middle + 1;
      }
    }
  }
};

// Dynamic shared memory: the ring, two buffers of stores a consumer warpgroup, barriers, work, and
// the tile ends with a few words behind them.
constexpr u32 kWorkSlots = 1;
constexpr u32 kLineBytes = 128;  // a row of a k-block, the swizzle's width
constexpr u32 kWeightBytes = kTileCols * kLineBytes;
constexpr u32 kStagingBytes = 4 * 64 * kLineBytes;
constexpr u32 kCountWords = 16;
constexpr u32 kPartBytes = kTileCols * 256 * 4;  // sums of a part

struct GemmLayout {
  u32 stage_bytes;
  u32 staging;
  u32 barriers;
  u32 work;
  u32 tile_ends;
  u32 bytes;
};

constexpr GemmLayout gemm_layout(const GemmConfig& c) {
  GemmLayout l{};
  l.stage_bytes = kWeightBytes + c.tile_rows * kLineBytes;
  l.staging = c.stages * l.stage_bytes;
  l.barriers = l.staging + kStagingBytes;
  l.work = ceil_div(l.barriers + 8 * (2 * c.stages + 2 * kWorkSlots), 16) * 16;
  l.tile_ends = l.work + kWorkSlots * static_cast<u32>(sizeof(GemmWork));
  l.bytes = l.tile_ends + 4 * (kMaxGemmExperts + kCountWords);
  return l;
}

}  // namespace mokbench
