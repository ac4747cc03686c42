// SPDX-License-Identifier: Apache-2.0
// Where a grouped GEMM's output goes: rows of one matrix, sorted by expert as the input is.
#pragma once

#include "gemm/tile.cuh"

namespace mokbench {

template <GemmConfig c>
struct GemmOutput {
  using Work = GemmWork;
  static constexpr bool kSwiglu = c.swiglu;
  static constexpr bool kPlain = !c.swiglu;
  static constexpr u32 kWorkWords = sizeof(Work) / 4;

  const ptx::TensorMap& map;  // boxes of chunk_rows rows and a warpgroup's columns
  char* rows;
  const float* row_weights;
  u32 num_columns;   // of the weights
  u32 blocks;        // k-blocks of a row of the input
  float* parts;      // of tiles whose k-blocks are shared out: sums, kPartBytes each
  u32* parts_there;  // [parts][2 warpgroups], 0 when none

  static __device__ __forceinline__ bool is_swiglu(const Work&) { return c.swiglu; }
  static __device__ __forceinline__ bool is_part(const Work& work) {
    return c.split_k && work.k_parts > 1;
  }
  static __device__ __forceinline__ bool is_stored(const Work& work) {
    return !c.split_k || work.k_part == 0;
  }
  __device__ __forceinline__ u32 k_blocks(const Work&) const { return blocks; }
  __device__ __forceinline__ u32 n(const Work&) const { return num_columns; }
  // No tile waits for another.
  static __device__ __forceinline__ bool is_sure(const Work&, u32) { return true; }
  static __device__ __forceinline__ void look_ahead(const Work&, u32) {}

  struct Rows {};
  static __device__ __forceinline__ Rows rows_of(const Work&) { return {}; }
  // A chunk's rows: all of them by a bulk copy, the expert's last rows one by one, since another
  // expert's follow.
  __device__ __forceinline__ void send(const Work& work, Rows, u32 at, u32 first_row, u32 num_rows,
                                       u32 weight_column) const {
    const u32 row = work.row + first_row;
    const u32 column = c.swiglu ? weight_column / 2 : weight_column;
    if (num_rows == chunk_rows(c)) {
      send_whole(map, at, column, row);
      return;
    }
    const u64 pitch = u64{c.swiglu ? num_columns / 2 : num_columns} * 2;
    const StagedChunk<c.swiglu> staged{at};
    staged.for_pieces(num_rows, [&](u32 nth, u32 piece, ptx::Vec16 bytes) {
      char* to = rows + (row + nth) * pitch + column * 2 + piece * 16;
      *reinterpret_cast<ptx::Vec16*>(to) = bytes;
    });
  }
  static __device__ __forceinline__ void finish(const Work&, u32) {}
};

}  // namespace mokbench
