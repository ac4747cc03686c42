// SPDX-License-Identifier: Apache-2.0
// What stands around a timed pass: ranks aligned on the device, the SMs' clocks read, and a known
// delay for the self-test of the skew.
#pragma once

#include "ptx.cuh"

namespace mokbench {

struct AlignArgs {
  char* segments[kMaxRanks];
  u32 rank;
  u32 value;      // one more than in the call before
  const u32* go;  // in pinned host memory
  u32* expired;   // of this rank, or null: becomes 1 if hold_ns were over before `go`
  u64 hold_ns;
  u64 wait_bound_ns;
};

// Holds the stream until the CPU, which has queued what is timed behind it, raises `go` to `value`,
// or for hold_ns: a pass in which the CPU waits for the device cannot be queued as a whole. Then
// until all ranks are here; they leave a flag's travel apart. One CTA of kMaxRanks threads, thread
// t for peer t.
template <u32 kNumRanks>
__global__ void __launch_bounds__(kMaxRanks, 1) align_ranks(const __grid_constant__ AlignArgs a) {
  const SignalLayout layout = signal_layout(kNumRanks);
  const u64 began_ns = ptx::globaltimer_ns();
  if (threadIdx.x == 0) {
    while (!reached(ptx::ld_relaxed_sys(a.go), a.value)) {
      if (ptx::globaltimer_ns() - began_ns > a.hold_ns) {
        if (a.expired != nullptr) *a.expired = 1;
        break;
      }
      ptx::nanosleep(200);
    }
  }
  __syncthreads();
  const u32 peer = threadIdx.x;
  if (peer >= kNumRanks || peer == a.rank) return;
  DeviceMemory memory;
  Agent<DeviceMemory> agent{memory,        a.segments, kNumRanks,      a.rank,
                            Role::kCaller, a.value,    a.wait_bound_ns};
  memory.store_release<Scope::kSystem>(agent.counter(peer, layout.arrived, a.rank), a.value);
  wait_until<Scope::kSystem>(agent, agent.counter(a.rank, layout.arrived, peer), a.value,
                             WaitSite{Site::kAlign, peer, peer});
}

struct StampArgs {
  // [num_sms][2]: the SM's clock64 and the time; an SM that no CTA came to keeps its zeros.
  u64* stamps;
  u32 num_sms;
};

// A CTA an SM, if the GPU spreads them so. Only one SM's own two readings make a clock rate.
__global__ void __launch_bounds__(32, 1) stamp_clocks(const __grid_constant__ StampArgs a) {
  const u32 sm = ptx::smid();
  if (threadIdx.x != 0 || sm >= a.num_sms) return;
  a.stamps[2 * sm] = ptx::clock64_cycles();
  a.stamps[2 * sm + 1] = ptx::globaltimer_ns();
}

struct DelayArgs {
  u64 delay_ns;
};

__global__ void __launch_bounds__(32, 1) delay(const __grid_constant__ DelayArgs a) {
  const u64 began_ns = ptx::globaltimer_ns();
  if (threadIdx.x != 0) return;
  while (ptx::globaltimer_ns() - began_ns < a.delay_ns) ptx::nanosleep(100);
}

}  // namespace mokbench
