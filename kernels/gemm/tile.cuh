// SPDX-License-Identifier: Apache-2.0
// The consumers of the BF16 GEMMs on sm_90: two warpgroups that multiply out of the ring of
// k-blocks.
//
// The weights are wgmma's M side, the rows of the input its N side: 64 output columns a warpgroup
// and half, and any multiple of 16 rows, so that an expert's last rows cost what they are.
#pragma once

#include "gemm/store.cuh"
#include "ptx_wgmma.cuh"

namespace mokbench {

// silu(gate) * up, with sigmoid(g) = (1 + tanh(g / 2)) / 2: one instruction of the slow unit a
// value and few others, so that rounding a half tile takes no longer than multiplying one. sigmoid
// is right to 2^-12: tanh.approx is to 2^-11, relatively (PTX ISA).
__device__ __forceinline__ float swiglu_approx(float gate, float up) {
  return gate * up * fmaf(ptx::tanh_approx(0.5f * gate), 0.5f, 0.5f);
}

template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

// One consumer warpgroup. A tile's sums are made in two halves. While the tensor cores finish the
// second, the first is rounded into shared memory, from where its storer sends it; while they begin
// the next tile's first, the second is rounded into registers, which follow during that tile's next
// k-blocks. Code is kept short and in one place: what a tile runs through must stay in the SM's
// instruction cache.
//
// Output says which tiles there are and where they go; GemmOutput is the plain one.
template <GemmConfig c, class Output>
struct GemmConsumer {
  using Work = typename Output::Work;
  static constexpr u32 kMaxUnits = c.tile_rows / kRowUnit;
  static constexpr u32 kWorkWords = Output::kWorkWords;
  static constexpr u32 kChunkRows = chunk_rows(c);
  static constexpr u32 kChunks = TileChunks<c>::kChunks;
  // Of a tile's first half these are staged at once, each into a buffer of its own; all others wait
  // in registers.
  static constexpr u32 kAtOnce = min_of(kChunks, kChunkBuffers);
  static constexpr u32 kLate = 2 * kChunks - kAtOnce;
  static constexpr u32 kPackedChunk = kChunkRows / (Output::kPlain ? 4 : 8);  // a thread's words

  const GemmShared<c> shared;
  const Work* const work_slots;
  const Output& output;
  const u32 group;        // 0 or 1
  const bool leads_warp;  // asked for once: the answer would hold up each k-block
  RingPlace<c.stages> place;
  RingPlace<kWorkSlots> work_place;
  Work work;  // being multiplied
  // Of the tile that is done: the chunks that are not yet staged, see TileChunks; the late ones are
  // in packed.
  u32 chunks = 0;
  bool is_swiglu = false;
  u32 row = 0;
  u32 num_rows = 0;
  u32 second_row = 0;
  u32 laps = 0;   // parity of each buffer's use
  u32 saved = 0;  // bytes of weights in a k-block that the tile being multiplied lacks, if narrow
  u32 packed[kLate * kPackedChunk];

  __device__ __forceinline__ GemmConsumer(GemmShared<c> shared, const Work* work_slots,
                                          const Output& output, u32 group)
      : shared(shared),
        work_slots(work_slots),
        output(output),
        group(group),
        leads_warp(ptx::tid_x() % 32 == 0),
        work{} {}

  __device__ __forceinline__ void run() {
    next_work();
    while (true) {
      if (work.units == 0 || is_part(work) || stages_first()) stage_late();
      if (work.units == 0) return;
      if constexpr (c.split_k) {
        if (is_part(work)) {
          run_part();
          continue;
        }
      }
      run_units<kMaxUnits>();
    }
  }

 private:
  // Lane 0 alone reads the slot, since it gives it back for the others as well.
  __device__ __forceinline__ void next_work() {
    ptx::mbarrier_wait(shared.work_full(work_place.slot), work_place.parity);
    u32 words[kWorkWords];
    if (leads_warp) {
      const u32* slot = reinterpret_cast<const u32*>(work_slots + work_place.slot);
#pragma unroll
      for (u32 i = 0; i < kWorkWords; ++i) words[i] = slot[i];
      ptx::mbarrier_arrive(shared.work_empty(work_place.slot));
    }
#pragma unroll
    for (u32 i = 0; i < kWorkWords; ++i) {
      reinterpret_cast<u32*>(&work)[i] = __shfl_sync(0xffffffff, words[i], 0);
    }
    work_place.advance();
  }

  static constexpr bool is_part(const Work& work) {
    if constexpr (c.split_k) return work.k_parts > 1;
    return false;
  }

  // Whether the tile before must be staged before this one: it has too few k-blocks to do so during
  // its own, or may have to wait for others.
  __device__ __forceinline__ bool stages_first() const {
    return output.k_blocks(work) < kLate + 2 || !output.is_sure(work, group);
  }

  template <u32 kUnits>
  __device__ __forceinline__ void run_units() {
    if (run_units_of(work) == kUnits) {
      run_tiles<kUnits>();
    } else if constexpr (kUnits > 2) {
      run_units<kUnits - (kUnits > 4 ? 1 : 2)>();
    }
  }

  // Tiles of one size, as long as they come. At least two k-blocks.
  template <u32 kUnits>
  __device__ __forceinline__ void run_tiles() {
    constexpr u32 kRows = kUnits * kRowUnit;
    float sums[kRows];
    saved = work.narrow * kHalfBytes;
    begin_block();
    multiply<kRows, 0>(sums, false);
    multiply<kRows, 1>(sums, false);
    place.advance();
    while (true) {
#pragma unroll 1
      for (u32 block = 1; block + 1 < output.k_blocks(work); ++block) {
        multiply_block<kRows>(sums);
        if (block <= kLate) stage_late(block - 1, block);
        place.advance();
      }
      set_done(kRows);
      next_work();
      output.look_ahead(work, group);
      multiply_block<kRows>(sums);
      place.advance();
      const bool goes_on = run_units_of(work) == kUnits && !is_part(work) && !stages_first();
      if (goes_on) begin_block();
      wait_for_buffers();
      ptx::wgmma_wait_group<1>();
      stage_first<kRows>(sums);
      ptx::wgmma_wait_group<0>();
      if (!goes_on) break;
      saved = work.narrow * kHalfBytes;
      multiply<kRows, 0>(sums, false);
      release_previous();
      hand_over_first();
      round_second<kRows>(sums);
      multiply<kRows, 1>(sums, false);
      place.advance();
    }
    release_previous();
    hand_over_first();
    round_second<kRows>(sums);
  }

  __device__ __forceinline__ void set_done(u32 half_rows) {
    second_row = saved > 0 ? half_rows : 0;
    const TileChunks<c> of_tile{work.num_rows, work.column, second_row, output.n(work)};
    chunks = of_tile.mask(group);
    is_swiglu = Output::is_swiglu(work);
    if constexpr (c.row_weights) {
      row = work.row;
      num_rows = work.num_rows;
    }
  }

  // Some k-blocks of a tile. Nothing is overlapped: there are a few at the end of a launch only.
  __device__ __forceinline__ void run_part() {
    float sums[c.tile_rows];
    saved = work.narrow * kHalfBytes;
    begin_block();
    multiply<c.tile_rows, 0>(sums, false);
    multiply<c.tile_rows, 1>(sums, false);
    place.advance();
#pragma unroll 1
    for (u32 block = 1; block < work.num_blocks; ++block) {
      multiply_block<c.tile_rows>(sums);
      place.advance();
    }
    ptx::wgmma_wait_group<0>();
    release_previous();
    ptx::pin_sums(sums, 0, c.tile_rows);
    if (work.k_part > 0) {
      give_sums(sums);
    } else {
      take_sums(sums);
      set_done(c.tile_rows);
      wait_for_buffers();
      stage_first<c.tile_rows>(sums);
      hand_over_first();
      round_second<c.tile_rows>(sums);
    }
    next_work();
  }

  template <u32 kSums>
  __device__ __forceinline__ float* part_at(u32 part) {
    return output.parts + u64{part * kConsumers + group} * (kSums * kGroupThreads) +
           ptx::tid_x() % kGroupThreads;
  }

  template <u32 kSums>
  __device__ __forceinline__ void give_sums(const float (&sums)[kSums]) {
    const u32 part = work.parts_at + work.k_part - 1;
    float* to = part_at<kSums>(part);
#pragma unroll
    for (u32 i = 0; i < kSums; ++i) to[i * kGroupThreads] = sums[i];
    ptx::fence_acq_rel_gpu();
    ptx::bar_sync(1 + group, kGroupThreads);
    if (ptx::tid_x() % kGroupThreads == 0) {
      ptx::st_release_gpu(output.parts_there + part * kConsumers + group, 1);
    }
  }

  // Adds them in order. Unbounded: whoever has them was taken before this part.
  template <u32 kSums>
  __device__ __forceinline__ void take_sums(float (&sums)[kSums]) {
#pragma unroll 1
    for (u32 part = work.parts_at; part < work.parts_at + work.k_parts - 1; ++part) {
      if (ptx::tid_x() % kGroupThreads == 0) {
        u32* there = output.parts_there + part * kConsumers + group;
        while (ptx::ld_acquire_gpu(there) == 0) ptx::nanosleep(100);
        ptx::st_relaxed_gpu(there, 0);  // for the next launch
      }
      ptx::bar_sync(1 + group, kGroupThreads);
      const float* from = part_at<kSums>(part);
#pragma unroll
      for (u32 i = 0; i < kSums; ++i) {
        sums[i] += __ldcg(from + i * kGroupThreads);
        if (i % 16 == 15) ptx::pin_sums(sums, i - 15, 16);  // or their loads fill the registers
      }
    }
  }

  __device__ __forceinline__ void begin_block() {
    ptx::mbarrier_wait(shared.full(place.slot), place.parity);
  }
  // The slot before the current one.
  __device__ __forceinline__ void release_previous() {
    const u32 slot = (place.slot == 0 ? c.stages : place.slot) - 1;
    if (leads_warp) ptx::mbarrier_arrive(shared.empty(slot));
  }

  // The next k-block; gives back the one before, which is done when this one is queued.
  template <u32 kRows>
  __device__ __forceinline__ void multiply_block(float (&sums)[kRows]) {
    begin_block();
    multiply<kRows, 0>(sums, true);
    multiply<kRows, 1>(sums, true);
    ptx::wgmma_wait_group<2>();
    release_previous();
  }

  // One group of wgmmas: a half of the current k-block.
  template <u32 kRows, u32 kHalf>
  __device__ __forceinline__ void multiply(float (&sums)[kRows], bool add) {
    const u32 weights = shared.weights(place.slot);
    const u64 a = ptx::matrix_descriptor(weights + group * kGroupCols * kLineBytes +
                                         (kHalf > 0 ? kHalfBytes - saved : 0));
    // A narrow tile's second half has the rows behind the first's.
    constexpr u32 kRowBytes = kRows * kLineBytes;
    const u64 b = ptx::matrix_descriptor(
        weights + 2 * kHalfBytes - saved +
        (kHalf > 0 ? saved / (kHalfBytes / kRowUnit) * (kRowBytes / kRowUnit) : 0));
    ptx::wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < kBlockK / 16; ++k) {
      // 16 elements are 32 bytes, two of the descriptors' units.
      ptx::wgmma_m64k16<kRows, kHalf * kRows / 2>(sums, a + 2 * k, b + 2 * k, add || k > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Both halves of a finished tile. What can be staged at once is written whether the tile has it
  // or not, and handed over when the next products are queued: meanwhile the tensor cores may have
  // nothing else to do.
  template <u32 kRows>
  __device__ __forceinline__ void stage_first(float (&sums)[kRows]) {
    by_kind([&](auto swiglu) {
      constexpr u32 kWords = words_of_chunk(swiglu.value);
      u32 rounded[kChunks * kPackedChunk];  // as many for both kinds, or MoK spills
      round<kRows, 0, swiglu.value>(sums, rounded, 0);
#pragma unroll
      for (u32 i = 0; i < min_of(ceil_div(kRows, kChunkRows), kAtOnce); ++i) {
        stage_chunk<swiglu.value>(buffer_of(i), rounded, i * kWords);
      }
#pragma unroll
      for (u32 i = kAtOnce * kWords; i < kRows * kWords / kChunkRows; ++i) {
        packed[i - kAtOnce * kWords] = rounded[i];
      }
    });
  }
  __device__ __forceinline__ void hand_over_first() {
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) hand_over(i);
  }
  template <u32 kRows>
  __device__ __forceinline__ void round_second(float (&sums)[kRows]) {
    by_kind([&](auto swiglu) {
      round<kRows, 1, swiglu.value>(sums, packed,
                                    (kChunks - kAtOnce) * words_of_chunk(swiglu.value));
    });
  }
  // The nth of the late chunks, first <= nth < end.
  __device__ __forceinline__ void stage_late(u32 first = 0, u32 end = kLate) {
    by_kind([&](auto swiglu) {
#pragma unroll
      for (u32 i = 0; i < kLate; ++i) {
        if (i < first || i >= end || !has_chunk(kAtOnce + i)) continue;
        wait_for_buffer((kAtOnce + i) % kChunkBuffers);
        stage_chunk<swiglu.value>(buffer_of(kAtOnce + i), packed, i * words_of_chunk(swiglu.value));
        __syncwarp();
        hand_over(kAtOnce + i);
      }
    });
  }
  static constexpr u32 words_of_chunk(bool swiglu) { return kChunkRows / (swiglu ? 8 : 4); }

  // Calls act(Flag) for the kind of the tile that is done.
  template <class Act>
  __device__ __forceinline__ void by_kind(Act act) {
    if constexpr (Output::kSwiglu && Output::kPlain) {
      if (is_swiglu) {
        act(Flag<true>{});
      } else {
        act(Flag<false>{});
      }
    } else {
      act(Flag<Output::kSwiglu>{});
    }
  }

  // Of eight rows a thread has two neighbouring ones at two columns, eight apart: by SwiGLU's
  // packing, gate and up of one column.
  template <u32 kRows, u32 kHalf, bool kSwiglu, u32 kWords>
  __device__ __forceinline__ void round(float (&sums)[kRows], u32 (&to)[kWords], u32 at) {
    constexpr u32 kCount = kRows / 2;
    constexpr u32 kFirst = kHalf * kCount;
    ptx::pin_sums(sums, kFirst, kCount);
    if constexpr (c.row_weights) weigh<kHalf, kCount>(sums);
#pragma unroll
    for (u32 i = 0; i < kCount; i += 4) {
      const float* s = sums + kFirst + i;
      if constexpr (kSwiglu) {
        to[at + i / 4] = ptx::cvt_rn_bf16x2(swiglu_approx(s[0], s[2]), swiglu_approx(s[1], s[3]));
      } else {
        to[at + i / 2] = ptx::cvt_rn_bf16x2(s[0], s[1]);
        to[at + i / 2 + 1] = ptx::cvt_rn_bf16x2(s[2], s[3]);
      }
    }
  }

  // By SwiGLU the weight is the up column's: silu(gate) * (up * weight). A lane loads one row's
  // weight in 32 and the others get it from there: 32 rows are 16 sums.
  template <u32 kHalf, u32 kCount, u32 kSums>
  __device__ __forceinline__ void weigh(float (&sums)[kSums]) {
    constexpr u32 kFirst = kHalf * kCount;
    const u32 lane = ptx::tid_x() % 32;
#pragma unroll
    for (u32 i = kFirst; i < kFirst + kCount; i += 16) {
      const u32 own_row = (i - kFirst) * 2 + lane + (kHalf > 0 ? second_row : 0);
      const float own = own_row < num_rows ? output.row_weights[row + own_row] : 0.f;
#pragma unroll
      for (u32 j = 0; j < min_of(16, kFirst + kCount - i); j += 4) {
        const float first = __shfl_sync(0xffffffff, own, j * 2 + lane % 4 * 2);
        const float second = __shfl_sync(0xffffffff, own, j * 2 + lane % 4 * 2 + 1);
        if constexpr (!c.swiglu) {
          sums[i + j] *= first;
          sums[i + j + 1] *= second;
        }
        sums[i + j + 2] *= first;
        sums[i + j + 3] *= second;
      }
    }
  }

  // Chunks as TileChunks numbers them. To stage one: wait until its buffer's last use is sent,
  // write into it, hand it over if the tile has it.
  __device__ __forceinline__ bool has_chunk(u32 nth) const { return (chunks >> nth & 1) != 0; }
  __device__ __forceinline__ u32 buffer_of(u32 nth) const {
    return shared.staging(group, nth % kChunkBuffers);
  }
  __device__ __forceinline__ void wait_for_buffer(u32 buffer) const {
    ptx::mbarrier_wait(shared.sent(group, buffer), (laps >> buffer & 1) ^ 1);
  }
  // Those of what is staged at once.
  __device__ __forceinline__ void wait_for_buffers() const {
#pragma unroll
    for (u32 i = 0; i < kAtOnce; ++i) wait_for_buffer(i);
  }
  __device__ __forceinline__ void hand_over(u32 nth) {
    if (!has_chunk(nth)) return;
    chunks &= ~(1u << nth);
    laps ^= 1u << nth % kChunkBuffers;
    if (leads_warp) ptx::mbarrier_arrive(shared.staged(group, nth % kChunkBuffers));
  }

  // From rounded[at] on.
  template <bool kSwiglu, u32 kWords>
  __device__ __forceinline__ void stage_chunk(u32 staged, const u32 (&rounded)[kWords], u32 at) {
    const u32 warp = ptx::tid_x() / 32 % 4;
    const u32 lane = ptx::tid_x() % 32;
    // A warp's columns: 16, two pieces; after SwiGLU 8, one piece.
    constexpr u32 kRowsAtOnce = kSwiglu ? 32 : 16;
#pragma unroll
    for (u32 first = 0; first < kChunkRows; first += kRowsAtOnce) {
      const u32 row = first + (kSwiglu ? lane : lane / 16 * 8 + lane % 8);
      const u32 piece = kSwiglu ? warp : warp * 2 + lane / 8 % 2;
      const u32 i = at + first / (kSwiglu ? 8 : 4);
      const u32 to = staged + StagedChunk<kSwiglu>::piece_at(row, piece);
      if (first + kRowsAtOnce <= kChunkRows) {
        ptx::stmatrix_x4_trans(to, rounded[i], rounded[i + 1], rounded[i + 2], rounded[i + 3]);
      } else {
        ptx::stmatrix_x2_trans(to, rounded[i], rounded[i + 1]);
      }
    }
  }
};

}  // namespace mokbench
