// SPDX-License-Identifier: Apache-2.0
// The MoK forward pass of one rank as one cooperative launch, one CTA an SM: schedule, pull
// dispatch, GEMM 1 with SwiGLU, GEMM 2, push combine. docs/mok.md has the drawing.
#pragma once

#include "mok/combine.cuh"
#include "mok/roles.cuh"
#include "mok/schedule.cuh"

namespace mokbench {

constexpr u32 kFirstPullWarp = kGemmThreads / 32;

// All of this pass that other passes' last consumers change is read before the roles begin.
template <MokConfig c>
__device__ __forceinline__ void begin_roles(const MokPass<c>& pass, GemmShared<c.tiles> shared,
                                            MokShared* own) {
  if (threadIdx.x == 0) {
    shared.init_barriers();
    for (u32& hint : own->hints) hint = 0;
    own->abandoned = 0;
    own->epoch = pass.epoch;
    own->num_groups = *pass.a.num_groups;
    own->rings = *pass.a.rings;
  }
  const u32 num_ends = min(*pass.a.num_groups, kTileEndsHere);
  for (u32 i = threadIdx.x; i < num_ends; i += kMokThreads) own->tile_ends[i] = pass.a.tile_ends[i];
  // The schedule was built where bulk copies will write.
  ptx::fence_proxy_async();
  __syncthreads();
}

template <MokConfig c>
__device__ __forceinline__ void begin_stamps(const MokPass<c>& pass) {
  if constexpr (c.stamps) {
    for (u32 i = 0; i < kNumStamps; ++i) pass.a.stamps[blockIdx.x * kNumStamps + i] = 0;
    pass.stamp(kBegun);
  }
}

template <MokConfig c>
__global__ void __launch_bounds__(kMokThreads, 1)
    mok_forward(const __grid_constant__ MokArgs a, const __grid_constant__ MokMaps<c> maps) {
  extern __shared__ __align__(1024) char memory[];
  static_assert(sizeof(MokSortShared<c>) <= gemm_layout(c.tiles).staging);
  static_assert(c.pull_warps >= 1 && c.pull_warps <= kMokWarps - kFirstPullWarp);
  const MokPass<c> pass(a, *a.epoch + 1);
  if (pass.faulted()) return;
  const GemmShared<c.tiles> shared{ptx::cvta_to_shared(memory)};
  MokShared* own = mok_shared<c.tiles>(memory);
  auto& sort = *reinterpret_cast<MokSortShared<c>*>(memory);
  if (threadIdx.x == 0) begin_stamps(pass);
  stage_inputs(pass);
  if (threadIdx.x == 0) pass.stamp(kStaged);
  if (!enter(pass, own->is_last)) return;
  if (threadIdx.x == 0) pass.stamp(kEntered);
  if (!build_schedule(pass, sort)) return;
  if (threadIdx.x == 0) pass.stamp(kScheduled);
  begin_roles(pass, shared, own);
  const u32 group = __shfl_sync(~0u, threadIdx.x / kGroupThreads, 0);  // see grouped_gemm
  const u32 warp = threadIdx.x / 32;
  if (group == 0) {
    ptx::setmaxnreg_dec<kMokProducerRegisters>();
    if (warp == kLoaderWarp) {
      if (threadIdx.x == 0) MokLoader<c>{pass, shared, own, maps, {}, {}}.run();
    } else if (warp == kSchedulerWarp) {
      if (threadIdx.x % 32 == 0) take_items(pass, shared, own);
    } else {
      const MokOutput<c> output{{a}, maps, {shared}};
      GemmStorer<c.tiles, MokOutput<c>>(shared, &own->work, output, warp - kStorerWarp).run();
      finish_items(MokPass<c>(a, own->epoch), own);
    }
  } else if (group > kConsumers) {
    ptx::setmaxnreg_dec<kMokProducerRegisters>();
    if (warp < kFirstPullWarp + c.pull_warps) pull_rows(pass, own, warp - kFirstPullWarp);
  } else {
    ptx::setmaxnreg_inc<kMokConsumerRegisters>();
    {
      const MokOutput<c> output{{a}, maps, {shared}};
      GemmConsumer<c.tiles, MokOutput<c>>(shared, &own->work, output, group - 1).run();
    }
    const MokPass<c> again(a, own->epoch);
    if (!wait_returned(again, own)) return;
    const bool stamps = threadIdx.x == kGroupThreads;
    if (stamps) again.stamp(kReturned);
    sum_rows(again);
    if (stamps) again.stamp(kSummed);
  }
}

}  // namespace mokbench
