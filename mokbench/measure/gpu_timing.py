"""Timing on the GPU: CUDA events around a pass whose start all ranks agreed on, on the device.

An isolated pass: the L2 is flushed, a kernel holds the stream until the CPU has queued the whole
pass and all ranks are there, and two events enclose the pass; then all ranks meet again, before
anything else runs. The SMs' clocks are read just outside the events. A device that is behind the
CPU is not held at all, so it does not cool down.

Where ranks do not reach one another's memory, they are there when an NCCL all-reduce is over, which
they leave farther apart than by a flag's travel.
"""

import ctypes
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.errors import MokbenchError
from mokbench.fabric.cuda import MAX_RANKS, CudaFabric
from mokbench.measure.columns import CLOCK, DURATION, EXPIRED, START
from mokbench.measure.sm_clock import start_and_clock
from mokbench.measure.timing import Step
from mokbench.workload import Regime

_SOURCE = "timing.cuh"
_ALIGN_THREADS = 128  # kMaxRanks
# Counters of signal_layout for kMaxRanks ranks fit.
_SEGMENT_BYTES = 1 << 20
# A pass in which the CPU itself waits for the device is let go after this.
_HOLD_S = 5e-3
# Flushing writes more than the L2 holds, so that what the pass before left is evicted.
_FLUSH_FACTOR = 2
# Enough neighbours that some are one step of the timer apart in how far they are apart.
_STEP_EVENTS = 256
# Times are FP32 milliseconds: differences below a nanosecond are rounding.
_ROUNDING_US = 1e-3


class AlignArgs(ctypes.Structure):
    """AlignArgs of timing.cuh."""

    _fields_ = (
        ("segments", ctypes.c_uint64 * MAX_RANKS),
        ("rank", ctypes.c_uint32),
        ("value", ctypes.c_uint32),
        ("go", ctypes.c_uint64),
        ("expired", ctypes.c_uint64),
        ("hold_ns", ctypes.c_uint64),
        ("wait_bound_ns", ctypes.c_uint64),
    )


class StampArgs(ctypes.Structure):
    """StampArgs of timing.cuh."""

    _fields_ = (("stamps", ctypes.c_uint64), ("num_sms", ctypes.c_uint32))


class GpuTimer:
    """Timer of the cuda fabric; see measure.timing.Timer.

    ``flush_bytes`` are written before each isolated pass, so that its L2 holds nothing of the last.
    """

    def __init__(self, fabric: CudaFabric) -> None:
        self._fabric = fabric
        properties = torch.cuda.get_device_properties(fabric.device)
        self._num_sms = properties.multi_processor_count
        self._most_mhz = _most_mhz(fabric.device)
        # Alone, each rank waits for its own release, and an all-reduce then for the others.
        alone = not fabric.maps_peers
        make = fabric.allocate_alone if alone else fabric.allocate
        self._buffer = make(_SEGMENT_BYTES)
        self._meeting = (fabric.nccl_group, torch.zeros(1, device=fabric.device)) if alone else None
        self._value = 0
        self._go = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._go_word = self._go.numpy()
        self._align_args = AlignArgs(
            segments=(ctypes.c_uint64 * MAX_RANKS)(*self._buffer.pointers),
            rank=0 if alone else fabric.rank,
            go=self._go.data_ptr(),
            hold_ns=int(_HOLD_S * 1e9),
            wait_bound_ns=int(fabric.wait_bound_s * 1e9),
        )
        expression = f"mokbench::align_ranks<{1 if alone else fabric.ranks}>"
        self._align_kernel = DeviceKernel(jit.build(_SOURCE, expression, fabric.arch))
        self._stamp_kernel = DeviceKernel(jit.build(_SOURCE, "mokbench::stamp_clocks", fabric.arch))
        self.flush_bytes = _FLUSH_FACTOR * properties.L2_cache_size
        self._flush = torch.zeros(self.flush_bytes, dtype=torch.uint8, device=fabric.device)
        self._epoch_ns = self._first_ns()
        # Construction zeroes the buffer, which a peer's first alignment raises.
        fabric.barrier()

    def l2_state(self, regime: Regime) -> str:
        """Single passes start with a flushed L2, a chain finds what the pass before left."""
        return "flushed" if regime is Regime.ISOLATED else "warm"

    def isolated(self, step: Step, iterations: int) -> Tensor:
        """See Timer; durations are those of CUDA events."""
        events, stamps = _events(2 * iterations), self._stamps(2 * iterations)
        expired = self._holds(iterations)
        for i in range(iterations):
            self._flush.zero_()
            self.align(expired.data_ptr() + i * expired.element_size())
            self._stamp(stamps[2 * i])
            events[2 * i].record()
            step()
            events[2 * i + 1].record()
            self._stamp(stamps[2 * i + 1])
            self._end()
        self._synchronize()
        pairs = zip(events[::2], events[1::2], strict=True)
        duration_us = torch.tensor([a.elapsed_time(b) * 1e3 for a, b in pairs])
        return _block(stamps, duration_us, expired, self._epoch_ns, self._most_mhz)

    def steady(self, step: Step, iterations: int) -> Tensor:
        """See Timer; no flush, no alignment inside. Released when the first pass is queued."""
        events, stamps, expired = _events(2), self._stamps(2), self._holds(1)
        self.align(expired.data_ptr())
        self._stamp(stamps[0])
        events[0].record()
        for _ in range(iterations):
            step()
            self.release()
        events[1].record()
        self._stamp(stamps[1])
        self._synchronize()
        period_us = events[0].elapsed_time(events[1]) * 1e3 / iterations
        period = torch.tensor([period_us])
        return _block(stamps, period, expired, self._epoch_ns, self._most_mhz)

    def phases(self, dispatch: Step, compute: Step, combine: Step, iterations: int) -> Tensor:
        """See Timer; dispatch finds a flushed L2, combine what the expert MLPs left."""
        events = _events(4 * iterations)
        for i in range(iterations):
            self._flush.zero_()
            for phase, part in enumerate((dispatch, combine)):
                if phase:
                    compute()
                self.align()
                events[4 * i + 2 * phase].record()
                part()
                events[4 * i + 2 * phase + 1].record()
                self._end()
        self._synchronize()
        times = [a.elapsed_time(b) * 1e3 for a, b in zip(events[::2], events[1::2], strict=True)]
        return torch.tensor(times, dtype=torch.float64).reshape(iterations, 2)

    def graphed(self, step: Step) -> Step:
        """``step`` once outside, so that nothing is set up while capturing, then captured."""
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                output = step()
        except RuntimeError as error:
            raise MokbenchError(f"the pass cannot be captured in a CUDA graph: {error}") from error

        def replay() -> object:
            graph.replay()
            return output

        return replay

    def step_us(self) -> float | None:
        """Step of the clock behind CUDA events, from events queued one behind the other."""
        events = _events(_STEP_EVENTS)
        self.align()
        for event in events:
            event.record()
        self.release()
        self._synchronize()
        return smallest_step_us([a.elapsed_time(b) * 1e3 for a, b in pairwise(events)])

    def align(self, expired: int = 0) -> None:
        """Queue a kernel that waits for ``release``, 5 ms at most, and then for all ranks.

        Ranks leave it a flag's travel apart, or as an all-reduce ends on them. ``expired`` is the
        address of an int32 that becomes 1 if the 5 ms were over first.
        """
        self._value += 1
        # A launch copies its arguments, so one struct serves all of them.
        self._align_args.value = self._value % 2**32
        self._align_args.expired = expired
        self._align_kernel.launch(1, _ALIGN_THREADS, [self._align_args], _stream())
        if self._meeting is not None:
            group, flag = self._meeting
            dist.all_reduce(flag, group=group)

    def release(self) -> None:
        """Let this rank's last ``align`` go: what it holds back is queued."""
        self._go_word[0] = np.uint32(self._value % 2**32).astype(np.int32)

    def _end(self) -> None:
        """Release what is timed, and let nothing begin behind it before all ranks have ended it.

        Where ranks share a GPU, a flush or the experts of one that is done would slow the others.
        """
        self.align()
        self.release()

    def _first_ns(self) -> int:
        """What globaltimer shows now, the least of all ranks; collective."""
        stamps = self._stamps(1)
        self._stamp(stamps[0])
        shown_ns = stamps[0, :, 1].cpu()
        caught_ns = shown_ns[shown_ns > 0].tolist()
        return min((ns for told in self._fabric.gather(caught_ns) for ns in told), default=0)

    def _stamps(self, count: int) -> Tensor:
        """Room for ``count`` readings of all SMs: int64 [count, SMs, (cycles, ns)]."""
        shape = (count, self._num_sms, 2)
        return torch.zeros(shape, dtype=torch.int64, device=self._fabric.device)

    def _holds(self, count: int) -> Tensor:
        """Which of ``count`` alignments did not wait for ``release``: int32, 0 so far."""
        return torch.zeros(count, dtype=torch.int32, device=self._fabric.device)

    def _stamp(self, stamps: Tensor) -> None:
        arguments = StampArgs(stamps.data_ptr(), self._num_sms)
        self._stamp_kernel.launch(self._num_sms, 32, [arguments], _stream())

    def _synchronize(self) -> None:
        """Wait for the GPU; raises the fault of a rank that did not come to an alignment."""
        torch.cuda.synchronize()
        if fault := self._buffer.fault():
            raise fault


def _events(count: int) -> Sequence[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _most_mhz(device: torch.device) -> float:
    """The fastest SM clock that the driver states; infinite where it states none."""
    from cuda.core import Device

    rate_khz = Device(device.index).properties.clock_rate
    return rate_khz / 1e3 if rate_khz > 0 else math.inf


def _block(
    stamps: Tensor,
    duration_us: Tensor,
    expired: Tensor,
    epoch_ns: int,
    most_mhz: float = math.inf,
) -> Tensor:
    """Columns of a block: when each sample began, how long it took, the SMs' clock, its hold."""
    readings = stamps.cpu().reshape(-1, 2, *stamps.shape[1:])
    samples = torch.empty(len(duration_us), 4, dtype=torch.float64)
    samples[:, DURATION], samples[:, EXPIRED] = duration_us, expired.cpu().double()
    for i, (before, after) in enumerate(readings):
        samples[i, START], samples[i, CLOCK] = start_and_clock(before, after, epoch_ns, most_mhz)
    return samples


def smallest_step_us(apart_us: Sequence[float]) -> float | None:
    """Smallest difference other than 0 between times, or between a time and 0; None for none."""
    times = sorted([0.0, *apart_us])
    steps = (later - earlier for earlier, later in pairwise(times))
    return min((step for step in steps if step > _ROUNDING_US), default=None)
