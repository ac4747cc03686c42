"""Signaling rounds on the GPU (kernels/signal.cuh), with the twin's SignalRank's methods."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.fabric.clock_offset import (
    Calibration,
    ClockError,
    ClockOffset,
    Ticks,
    after_payload,
    plausible,
    require_few_late,
)
from mokbench.fabric.cuda import MAX_RANKS, CudaFabric
from mokbench.fabric.steady import steady_calls

NUM_PINGS = 256  # kNumPings
NUM_TICKS = 128  # kNumTicks
_SOURCE = "signal.cuh"
_WARP = 32
# 128-byte counters and 16-byte payloads: [ranks] of a few fields, rounded up generously.
SEGMENT_BYTES = 1 << 20

Stamps = dict[str, NDArray[np.int64]]


class SignalArgs(ctypes.Structure):
    """SignalArgs of signal.cuh."""

    _fields_ = (
        ("segments", ctypes.c_uint64 * MAX_RANKS),
        ("rank", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("rounds", ctypes.c_uint32),
        ("base", ctypes.c_uint32),
        ("wait_bound_ns", ctypes.c_uint64),
        ("clock", ctypes.c_uint64),
        ("cycles", ctypes.c_uint64),
        ("started", ctypes.c_uint64),
        ("arrived", ctypes.c_uint64),
        ("ready", ctypes.c_uint64),
        ("ping_sent", ctypes.c_uint64),
        ("ping_seen", ctypes.c_uint64),
        ("ping_back", ctypes.c_uint64),
        ("tick_ns", ctypes.c_uint64),
        ("tick_low", ctypes.c_uint64),
        ("tick_high", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class _Ready:
    """What one call of signal_ready measured; empty on a rank that took no part."""

    ready_us: list[float]
    after_us: list[float]
    bound_us: list[float]


def stamp_counts(rounds: int) -> dict[str, int]:
    """64-bit words of each of the arrays that the kernels fill."""
    names = ("cycles", "started", "arrived", "ready")
    pings = ("ping_sent", "ping_seen", "ping_back")
    ticks = ("tick_ns", "tick_low", "tick_high")
    counts = dict.fromkeys(names, rounds) | dict.fromkeys(pings, 2 * NUM_PINGS)
    return {"clock": 2} | counts | dict.fromkeys(ticks, 4 * NUM_TICKS)


def peer_threads(ranks: int) -> int:
    """peer_threads of signal.cuh: a thread a peer, whole warps."""
    return -(-ranks // _WARP) * _WARP


class CudaSignal:
    """Signaling rounds of one rank; every method but ``local_hop`` is collective.

    ``clock_offset_bound_us`` holds, after ``ready``, how wrong the offset between the two SMs'
    clocks can be: one value, or none on a rank that took no part.
    """

    def __init__(self, fabric: CudaFabric) -> None:
        self._fabric = fabric
        self._buffer = fabric.allocate(SEGMENT_BYTES)
        self._kernels: dict[str, DeviceKernel] = {}
        self.clock_offset_bound_us: list[float] = []

    def hop(self, rounds: int) -> list[float]:
        """signal_hop_us between ranks 0 and 1, on rank 0; empty on the others."""
        stamps = self._run("signal_hop<{n}>", rounds, 2, grid=1, block=_WARP)
        return [us / 2 for us in self._cycles_us(stamps)] if self._fabric.rank == 0 else []

    def local_hop(self, rounds: int) -> list[float]:
        """local_hop_us between the first and the last CTA of this rank."""
        stamps = self._run("signal_local_hop<{n}>", rounds, 1, self._grid, _WARP, alone=True)
        return [us / 2 for us in self._cycles_us(stamps)]

    def entry(self, rounds: int, ranks: int) -> list[float]:
        """signal_entry_us among the first ``ranks`` ranks; empty on the others."""
        block = peer_threads(self._fabric.ranks)
        stamps = self._run("signal_entry<{n}>", rounds, ranks, grid=1, block=block)
        return self._cycles_us(stamps) if self._fabric.rank < ranks else []

    def ready(self, protocol: str, rounds: int, ranks: int) -> tuple[list[float], list[float]]:
        """signal_ready_us and signal_after_arrival_us by pull or push; empty beyond ``ranks``.

        Calls in which the SMs' clocks did not keep step are run again by all ranks, shorter (see
        steady_calls). Raises ClockError when that does not help.
        """

        def call(count: int, pings: int) -> tuple[_Ready, str | None]:
            try:
                return self._ready(protocol, count, ranks, pings), None
            except ClockError as error:
                return _Ready([], [], []), str(error)

        calls = steady_calls(rounds, call, self._fabric.gather)
        bounds_us = [us for one in calls for us in one.bound_us]
        self.clock_offset_bound_us = [max(bounds_us)] if bounds_us else []
        ready_us = [us for one in calls for us in one.ready_us]
        after_us = [us for one in calls for us in one.after_us]
        if protocol == "push":
            late = after_us.count(0.0) / max(1, len(after_us))
            require_few_late(max(self._fabric.gather(late)))
        return ready_us, after_us

    def _ready(self, protocol: str, rounds: int, ranks: int, pings: int) -> _Ready:
        push = protocol == "push"
        name = f"signal_ready<{{n}}, mokbench::Transfer::{'kPush' if push else 'kPull'}>"
        block = peer_threads(self._fabric.ranks) * (2 if push else 1)
        stamps = self._run(name, rounds, ranks, self._grid, block)
        if self._fabric.rank >= ranks:
            return _Ready([], [], [])
        us = us_per_cycle(stamps["clock"])
        offset = offset_of(stamps, pings)
        ready, after = ready_cycles(stamps, offset, push)
        limit_us = self._fabric.wait_bound_s * 1e6
        return _Ready(
            plausible(f"signal_ready_us.{protocol}", ready * us, limit_us),
            plausible(f"signal_after_arrival_us.{protocol}", after * us, limit_us),
            [offset.bound * us],
        )

    @property
    def _grid(self) -> int:
        """The first and the last CTA work, so that they are on SMs as far apart as can be."""
        return max(2, self._fabric.num_sms)

    def _run(
        self, name: str, rounds: int, ranks: int, grid: int, block: int, alone: bool = False
    ) -> Stamps:
        """Launch one kernel and return its arrays; counters start at zero in every call."""
        fabric = self._fabric
        self._buffer.own.zero_()
        arrays = {
            name: torch.zeros(count, dtype=torch.int64, device=fabric.device)
            for name, count in stamp_counts(rounds).items()
        }
        torch.cuda.synchronize()
        if not alone:
            fabric.barrier()
        arguments = SignalArgs(
            segments=(ctypes.c_uint64 * MAX_RANKS)(*self._buffer.pointers),
            rank=fabric.rank,
            ranks=ranks,
            rounds=rounds,
            base=0,
            wait_bound_ns=int(fabric.wait_bound_s * 1e9),
            **{name: array.data_ptr() for name, array in arrays.items()},
        )
        stream = torch.cuda.current_stream().cuda_stream
        self._kernel(name).launch(grid, block, [arguments], stream, cooperative=True)
        torch.cuda.synchronize()
        if fault := self._buffer.fault():
            raise fault
        return {name: array.cpu().numpy() for name, array in arrays.items()}

    @staticmethod
    def _cycles_us(stamps: Stamps) -> list[float]:
        us = us_per_cycle(stamps["clock"])
        return [int(cycles) * us for cycles in stamps["cycles"]]

    def _kernel(self, name: str) -> DeviceKernel:
        expression = "mokbench::" + name.format(n=self._fabric.ranks)
        if expression not in self._kernels:
            cubin = jit.build(_SOURCE, expression, self._fabric.arch)
            self._kernels[expression] = DeviceKernel(cubin)
        return self._kernels[expression]


def us_per_cycle(clock: NDArray[np.int64]) -> float:
    """From the time of a call's rounds in ns and in cycles, taken by the same SM."""
    ns, cycles = (int(value) for value in clock)
    # 0.1 to 10 GHz: anything else is not an SM's clock.
    if ns <= 0 or not 0.1 < cycles / ns < 10:
        raise ClockError(f"{cycles} cycles in {ns} ns is no clock of an SM")
    return ns / cycles / 1e3


def offset_of(stamps: Stamps, pings: int = NUM_PINGS) -> ClockOffset:
    """From the ``pings`` nearest to the rounds of signal_ready, and the timer's ticks."""
    by_call = [stamps[n].reshape(2, NUM_PINGS) for n in ("ping_sent", "ping_seen", "ping_back")]
    before = Calibration.of(*(array[0, NUM_PINGS - pings :] for array in by_call))
    behind = Calibration.of(*(array[1, :pings] for array in by_call))
    ticks = [stamps[n].reshape(2, 2, NUM_TICKS) for n in ("tick_ns", "tick_low", "tick_high")]
    found = []
    for nth, calibration in enumerate((before, behind)):
        mover, observer = (Ticks.of(*(array[nth, side] for array in ticks)) for side in (0, 1))
        found.append(calibration.sharpened(mover, observer))
    return ClockOffset(*found)


def ready_cycles(
    stamps: Stamps, offset: ClockOffset, push: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cycles from the start and from arrival until ready, of each round of signal_ready."""
    started, arrived, ready = (stamps[name] for name in ("started", "arrived", "ready"))
    if not (started.all() and arrived.all() and ready.all()):
        raise ClockError("rounds of signal_ready have no stamps")
    after = after_payload(arrived, ready) if push else offset.elapsed(arrived, ready)
    return offset.elapsed(started, ready), after
