// SPDX-License-Identifier: Apache-2.0
// How finished tiles of the BF16 GEMMs leave shared memory on sm_90: a warp for each consumer
// warpgroup sends what that has rounded, chunk by chunk, so that no consumer waits for a store.
#pragma once

#include "gemm/pipeline.cuh"

namespace mokbench {

// Units of 16 rows that one wgmma multiplies for a half: odd numbers of them run as the next even
// one where they are few.
template <class Work>
__device__ __forceinline__ u32 run_units_of(const Work& work) {
  const u32 units = work.narrow ? ceil_div(work.units, 2) : work.units;
  return units > 4 ? units : ceil_div(units, 2) * 2;
}

// What a warpgroup stages of a tile and its storer sends, in this order: kChunks of each half, of
// which those without rows or columns are left out.
template <GemmConfig c>
struct TileChunks {
  static constexpr u32 kRows = chunk_rows(c);
  static constexpr u32 kChunks = c.tile_rows / kRows;  // of a half

  u32 num_rows;
  u32 column;
  u32 second_row;  // where the second half begins in the rows; 0 if it has the same rows
  u32 n;           // columns of the output before SwiGLU

  __device__ __forceinline__ u32 first_row(u32 nth) const {
    return nth % kChunks * kRows + (nth >= kChunks ? second_row : 0);
  }
  // Before SwiGLU.
  __device__ __forceinline__ u32 first_column(u32 nth, u32 group) const {
    return column + group * kGroupCols + (nth >= kChunks && second_row == 0 ? kHalfCols : 0);
  }
  __device__ __forceinline__ u32 rows(u32 nth, u32 group) const {
    const bool cut = nth < kChunks && second_row > 0 && second_row < num_rows;
    const u32 end = cut ? second_row : num_rows;
    const u32 first = first_row(nth);
    return first < end && first_column(nth, group) < n ? min_of(end - first, kRows) : 0;
  }
  // A bit for each chunk that there is.
  __device__ __forceinline__ u32 mask(u32 group) const {
    u32 found = 0;
#pragma unroll
    for (u32 nth = 0; nth < 2 * kChunks; ++nth) found |= (rows(nth, group) > 0) << nth;
    return found;
  }
};

// A warpgroup's columns of a chunk of rows, in shared memory.
template <bool kSwiglu>
struct StagedChunk {
  static constexpr u32 kColumns = kSwiglu ? kGroupCols / 2 : kGroupCols;
  static constexpr u32 kPieces = kColumns * 2 / 16;  // of a row, 16 bytes each

  u32 at;

  // Swizzled as the bulk copy expects it.
  static __device__ __forceinline__ u32 piece_at(u32 row, u32 piece) {
    if constexpr (kSwiglu) return row * 64 + ((piece ^ (row >> 1 & 3)) << 4);
    return row * 128 + ((piece ^ (row & 7)) << 4);
  }
  // A warp calls visit(row, piece, its 16 bytes).
  template <class Visit>
  __device__ __forceinline__ void for_pieces(u32 num_rows, Visit visit) const {
#pragma unroll 1
    for (u32 i = ptx::tid_x() % 32; i < num_rows * kPieces; i += 32) {
      visit(i / kPieces, i % kPieces, ptx::ld_shared_v4(at + piece_at(i / kPieces, i % kPieces)));
    }
  }
};

// A warp that sends the tiles of one consumer warpgroup.
template <GemmConfig c, class Output>
struct GemmStorer {
  using Work = typename Output::Work;
  using Chunks = TileChunks<c>;

  const GemmShared<c> shared;
  const Work* const work_slots;
  const Output& output;
  const u32 group;  // 0 or 1
  RingPlace<kWorkSlots> work_place;
  u32 laps = 0;  // parity of each buffer's use

  __device__ __forceinline__ GemmStorer(GemmShared<c> shared, const Work* work_slots,
                                        const Output& output, u32 group)
      : shared(shared), work_slots(work_slots), output(output), group(group) {}

  __device__ __forceinline__ void run() {
    Work work = take_work();
    while (work.units > 0) work = Output::is_stored(work) ? store(work) : take_work();
    if (ptx::tid_x() % 32 == 0) ptx::cp_async_bulk_wait_all();
  }

 private:
  __device__ __forceinline__ Work take_work() {
    ptx::mbarrier_wait(shared.work_full(work_place.slot), work_place.parity);
    const Work work = work_slots[work_place.slot];
    // Each lane gives back what it has read: registers are too short to let one read for all.
    ptx::mbarrier_arrive(shared.work_empty(work_place.slot));
    work_place.advance();
    return work;
  }

  // Returns the next tile, taken as soon as this one's first chunk is there: the scheduler must not
  // wait for stores.
  __device__ __forceinline__ Work store(const Work& work) {
    const u32 half_rows = Output::is_part(work) ? c.tile_rows : run_units_of(work) * kRowUnit;
    const Chunks chunks{work.num_rows, work.column, work.narrow ? half_rows : 0, output.n(work)};
    const auto rows = output.rows_of(work);
    Work next;
    bool has_next = false;
#pragma unroll 1
    for (u32 nth = 0; nth < 2 * Chunks::kChunks; ++nth) {
      const u32 num_rows = chunks.rows(nth, group);
      if (num_rows == 0) continue;
      const u32 buffer = nth % kChunkBuffers;
      ptx::mbarrier_wait(shared.staged(group, buffer), laps >> buffer & 1);
      laps ^= 1u << buffer;
      if (!has_next) next = take_work();
      has_next = true;
      const u32 at = shared.staging(group, buffer);
      const u32 column = chunks.first_column(nth, group);
      output.send(work, rows, at, chunks.first_row(nth), num_rows, column);
      __syncwarp();
      if (ptx::tid_x() % 32 == 0) ptx::mbarrier_arrive(shared.sent(group, buffer));
    }
    output.finish(work, group);
    return has_next ? next : take_work();
  }
};

// One lane sends a chunk by a bulk copy and waits until it is read. It makes visible to the copy
// what the consumers staged and handed over by a barrier: a proxy fence anywhere on that way will
// do (PTX ISA, causality order), and a consumer's would wait for its queued wgmmas.
__device__ __forceinline__ void send_whole(const ptx::TensorMap& map, u32 at, u32 column, u32 row) {
  if (ptx::tid_x() % 32 > 0) return;
  ptx::fence_proxy_async();
  ptx::cp_async_bulk_tensor_store(map, at, column, row);
  ptx::cp_async_bulk_commit_group();
  ptx::cp_async_bulk_wait_group_read<0>();
}

}  // namespace mokbench
