// SPDX-License-Identifier: Apache-2.0
// Do the kernels of several ranks really run at the same time? Each CTA takes a whole SM, spins and
// says when it began and ended.
#pragma once

#include "ptx.cuh"

namespace mokbench {

struct OverlapArgs {
  u64 spin_ns;
  u64* began_ns;  // [grid]
  u64* ended_ns;  // [grid]
};

// Launched with so much shared memory that no second CTA, of any rank, fits beside it on an SM.
__global__ void __launch_bounds__(32, 1) overlap_probe(const __grid_constant__ OverlapArgs a) {
  if (threadIdx.x != 0) return;
  const u64 began_ns = ptx::globaltimer_ns();
  while (ptx::globaltimer_ns() - began_ns < a.spin_ns) ptx::nanosleep(1000);
  a.began_ns[blockIdx.x] = began_ns;
  a.ended_ns[blockIdx.x] = ptx::globaltimer_ns();
}

}  // namespace mokbench
