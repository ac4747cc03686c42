// SPDX-License-Identifier: Apache-2.0
// Which tiles a grouped GEMM is made of, and in which order its CTAs take them. No GPU in here:
// the host compiles it too, for tests.
//
// Rows are sorted by expert. A tile has two halves of kHalfCols output columns and up to tile_rows
// rows each: the same rows and neighbouring columns (a wide tile), or, where an expert has no more
// than kHalfCols columns left, the same columns and neighbouring rows. Rows come in units of
// kRowUnit: an expert's units are shared out evenly among its row tiles, because a short tile reads
// its weights for few rows.
#pragma once

#include "protocol.h"

namespace mokbench {

constexpr u32 kHalfCols = 128;  // columns of a tile's half: 64 a consumer warpgroup
constexpr u32 kRowUnit = 16;
constexpr u32 kMaxGemmExperts = 512;

// A C++20 template value in the kernel. Stages: k-blocks of both operands in shared memory.
struct GemmConfig {
  u32 tile_rows = 128;  // of a half: 32, 64, 128 or 144
  u32 stages = 4;
  u32 group_tiles = 8;       // row tiles of an expert that share a column block one after the other
  bool swiglu = false;       // weights alternate 8 gate rows, 8 up rows; half as many columns out
  bool row_weights = false;  // output rows are multiplied by a weight each
  bool split_k = false;      // the last tiles may be shared out by k-blocks, see TileQueue
};

constexpr u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
constexpr u32 min_of(u32 a, u32 b) { return a < b ? a : b; }

// Column blocks of wide tiles; columns behind them, at most kHalfCols, are a narrow block.
constexpr u32 wide_blocks(u32 n) { return (n + kHalfCols - 1) / (2 * kHalfCols); }
constexpr bool has_narrow_block(u32 n) { return wide_blocks(n) * 2 * kHalfCols < n; }

constexpr u32 row_units(u32 rows) { return ceil_div(rows, kRowUnit); }
// Of a wide block; of a narrow one.
constexpr u32 row_tiles(const GemmConfig& c, u32 rows) {
  return ceil_div(row_units(rows), c.tile_rows / kRowUnit);
}
constexpr u32 narrow_row_tiles(const GemmConfig& c, u32 rows) {
  return ceil_div(row_units(rows), 2 * c.tile_rows / kRowUnit);
}
// Of an expert with this many rows and n columns.
constexpr u32 expert_tiles(const GemmConfig& c, u32 rows, u32 n) {
  return row_tiles(c, rows) * wide_blocks(n) +
         (has_narrow_block(n) ? narrow_row_tiles(c, rows) : 0);
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
// last ones, which would leave CTAs idle, are cut into pieces, or their k-blocks are shared out
// among `k_parts` CTAs, whose sums the first part's owner adds in order. It is taken last, so that
// it waits for CTAs only that are already at work.
struct TileQueue {
  u32 whole;        // tiles that stay whole
  u32 pieces = 1;   // of each of the tiles behind them: an even number parts wide tiles' halves
  u32 k_parts = 1;  // the same; one of the two is 1
  u32 items;

  constexpr explicit TileQueue(u32 tiles) : whole(tiles), items(tiles) {}

  // Decides about the last tiles. The first num_ctas stay whole if there are so many.
  constexpr void cut_last(const GemmConfig& c, u32 num_ctas, u32 k_blocks) {
    const u32 tiles = whole;
    const u32 rest = tiles % num_ctas;
    const u32 most = c.tile_rows / kRowUnit;
    const u32 whole_tile = block_cycles(most, 2 * kHalfCols);
    u32 best = k_blocks * whole_tile;
#pragma unroll 1
    for (u32 cut = 2; cut <= kMaxCut && rest > 0; ++cut) {
      const u32 rounds = ceil_div(rest * cut, num_ctas);
      const u32 cols = cut % 2 == 0 ? 2 : 1;
      if (cut / cols <= most) {
        const u32 units = ceil_div(most, cut / cols);
        const u32 by_piece = rounds * k_blocks * block_cycles(units, 2 * kHalfCols / cols);
        if (by_piece < best) {
          best = by_piece;
          pieces = cut;
          k_parts = 1;
        }
      }
      if (!c.split_k || rest * (cut - 1) > kPartsACta * num_ctas) continue;
      const u32 by_k = rounds * (ceil_div(k_blocks, cut) * whole_tile + kHandOverCycles * cut);
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

  // Sums of this many parts fit the launch's memory.
  static constexpr u32 kPartsACta = 2;

 private:
  static constexpr u32 kMaxCut = 8;
  // To write a tile's FP32 sums, or to read and add them: 128 KiB at some 30 bytes a cycle.
  static constexpr u32 kHandOverCycles = 5000;

  // Cycles of a k-block: of the tensor cores, or of its operands' way into shared memory, taken to
  // be 56 bytes a cycle.
  static constexpr u32 block_cycles(u32 units, u32 cols) {
    const u32 loaded = (cols + units * kRowUnit) * 128 / 56;
    const u32 multiplied = units * cols / 2;
    return loaded > multiplied ? loaded : multiplied;
  }
};

// A tile, or a piece of one, as the producer hands it to the consumers. None behind the last: units
// is 0.
struct alignas(16) GemmWork {
  u8 units;   // of rows
  u8 narrow;  // 1: its halves share columns, 0: rows
  u8 k_part;  // of k_parts; 0 gets the others' sums
  u8 k_parts;
  u32 expert;
  u32 row;       // first of the input and of the output
  u32 num_rows;  // that are the expert's
  u32 column;    // first of the output before SwiGLU
  u32 first_block;
  u32 num_blocks;
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
                     u32 num_experts, u32 n, u32 k_blocks)
      : c(c),
        tile_ends(tile_ends),
        row_ends(row_ends),
        num_experts(num_experts),
        n(n),
        k_blocks(k_blocks),
        queue(num_experts > 0 ? tile_ends[num_experts - 1] : 0) {}

  // Columns outer, rows inner: both operands of the tiles that run together stay in the L2. A piece
  // may be empty.
  constexpr GemmWork at(u32 index) {
    const TileQueue::Item item = queue.item(index);
    find_expert(item.tile);
    const u32 begin = expert > 0 ? row_ends[expert - 1] : 0;
    const u32 rows = row_ends[expert] - begin;
    Place place = place_of(item.tile - (expert > 0 ? tile_ends[expert - 1] : 0), rows);
    Share units = share_of(row_units(rows), place.row_tiles, place.row_tile);
    Share blocks{0, k_blocks};
    u32 k_parts = 1;
    // Most tiles are spared these divisions, above all a launch's first, for which all wait.
    if (item.tile >= queue.whole) {
      // What a short tile takes is its weights' way, which parts would not shorten.
      if (2 * units.count * kRowUnit > c.tile_rows) k_parts = queue.k_parts;
      if (item.k_part >= k_parts) return {};
      blocks = share_of(k_blocks, k_parts, item.k_part);
      units = piece_of(place, units, item.piece);
      if (units.count == 0 || place.column >= n) return {};
    }
    const u32 first_row = units.first * kRowUnit;
    return {.units = static_cast<u8>(units.count),
            .narrow = place.narrow,
            .k_part = static_cast<u8>(item.k_part),
            .k_parts = static_cast<u8>(k_parts),
            .expert = expert,
            .row = begin + first_row,
            .num_rows = min_of(rows - first_row, units.count * kRowUnit),
            .column = place.column,
            .first_block = blocks.first,
            .num_blocks = blocks.count,
            .parts_at = k_parts > 1 ? (item.tile - queue.whole) * (k_parts - 1) : 0};
  }

 private:
  struct Place {
    u32 column;
    bool narrow;
    u32 row_tile;
    u32 row_tiles;  // of its column block
  };

  // The expert's nth tile: wide blocks in groups of row tiles, then the narrow one.
  constexpr Place place_of(u32 nth, u32 rows) const {
    const u32 blocks = wide_blocks(n);
    const u32 num_tiles = row_tiles(c, rows);
    if (nth >= num_tiles * blocks) {
      return {blocks * 2 * kHalfCols, true, nth - num_tiles * blocks, narrow_row_tiles(c, rows)};
    }
    const u32 group_size = c.group_tiles * blocks;
    const u32 first = nth / group_size * c.group_tiles;
    const u32 within = nth % group_size;
    const u32 in_group = min_of(c.group_tiles, num_tiles - first);
    return {within / in_group * 2 * kHalfCols, false, first + within % in_group, num_tiles};
  }

  // An even number of pieces parts the halves of a wide tile, which become narrow tiles.
  constexpr Share piece_of(Place& place, Share units, u32 piece) const {
    u32 pieces = queue.pieces;
    if (pieces % 2 == 0 && !place.narrow) {
      pieces /= 2;
      place.narrow = true;
      place.column += piece / pieces * kHalfCols;
      piece %= pieces;
    }
    const Share part = share_of(units.count, pieces, piece);
    return {units.first + part.first, part.count};
  }

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
constexpr u32 kHalfBytes = kHalfCols * kLineBytes;
constexpr u32 kStagingBuffers = 4;
constexpr u32 kCountWords = 16;
constexpr u32 kPartBytes = 2 * kHalfCols * 128 * 4;  // sums of a part

// Rows that one store takes, of a consumer warpgroup's columns.
constexpr u32 chunk_rows(const GemmConfig& c) {
  return c.tile_rows > 128 ? 48 : min_of(64, c.tile_rows);
}
// Of a buffer for them.
constexpr u32 chunk_bytes(const GemmConfig& c) {
  return (c.tile_rows > 128 ? 48 : 64) * kLineBytes;
}

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
  l.stage_bytes = (2 * kHalfCols + c.tile_rows) * kLineBytes;
  l.staging = c.stages * l.stage_bytes;
  l.barriers = l.staging + kStagingBuffers * chunk_bytes(c);
  l.work = l.barriers + 16 * (c.stages + kWorkSlots + kStagingBuffers);
  l.tile_ends = l.work + kWorkSlots * static_cast<u32>(sizeof(GemmWork));
  l.bytes = l.tile_ends + 4 * (kMaxGemmExperts + kCountWords);
  return l;
}

}  // namespace mokbench
