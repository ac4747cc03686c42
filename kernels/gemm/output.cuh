// SPDX-License-Identifier: Apache-2.0
// Where a grouped GEMM's output goes: rows of one matrix, sorted by expert as the input is.
#pragma once

#include "gemm/tile.cuh"

namespace mokbench {

template <GemmConfig c>
struct GemmOutput {
  using Work = GemmWork;
  struct Tag {};
  static constexpr bool kSwiglu = c.swiglu;
  static constexpr bool kPlain = !c.swiglu;
  static constexpr bool kFinishes = false;
  static constexpr bool kAsksForThread = false;
  static constexpr u32 kWorkWords = sizeof(Work) / 4;

  const ptx::TensorMap& map;  // boxes of chunk_rows rows and a warpgroup's columns
  char* rows;
  const float* row_weights;
  u32 num_columns;   // of a row, after SwiGLU
  u32 blocks;        // k-blocks of a row of the input
  float* parts;      // of tiles whose k-blocks are shared out: sums, kPartBytes each
  u32* parts_there;  // [parts][2 warpgroups], 0 when none

  static __device__ __forceinline__ Tag tag_of(const Work&) { return {}; }
  __device__ __forceinline__ u32 k_blocks(const Work&) const { return blocks; }
  template <class Kind>
  __device__ __forceinline__ u32 columns(Kind) const {
    return num_columns;
  }
  // No tile waits for another.
  static __device__ __forceinline__ bool is_sure(u32) { return true; }
  static __device__ __forceinline__ void look_ahead(const Work&, u32) {}

  // A chunk's rows: all of them by a bulk copy, the expert's last rows one by one, since another
  // expert's follow.
  template <class Staged>
  __device__ __forceinline__ void send(Staged staged, u32 row, u32 num_rows, u32 column,
                                       bool leads) const {
    if (num_rows == chunk_rows(c)) {
      if (leads) ptx::cp_async_bulk_tensor_store(map, staged.at, column, row);
      return;
    }
    const u64 pitch = u64{num_columns} * 2;
    staged.for_pieces(threadIdx.x, num_rows, [&](u32 nth, u32 piece, ptx::Vec16 bytes) {
      char* to = rows + (row + nth) * pitch + column * 2 + piece * 16;
      *reinterpret_cast<ptx::Vec16*>(to) = bytes;
    });
  }
};

}  // namespace mokbench
