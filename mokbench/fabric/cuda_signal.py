"""Signaling rounds on the GPU (kernels/signal.cuh), with the twin's SignalRank's methods."""

import ctypes

import torch
from torch import Tensor

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.fabric.cuda import CudaFabric

_MAX_RANKS = 128  # kMaxRanks of protocol.h
_SOURCE = "signal.cuh"
_THREADS = 128  # kSignalThreads
_WARP = 32
# 128-byte counters and 16-byte payloads: [ranks] of a few fields, rounded up generously.
_SEGMENT_BYTES = 1 << 20


class SignalArgs(ctypes.Structure):
    """SignalArgs of signal.cuh."""

    _fields_ = (
        ("segments", ctypes.c_uint64 * _MAX_RANKS),
        ("rank", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("rounds", ctypes.c_uint32),
        ("base", ctypes.c_uint32),
        ("wait_bound_ns", ctypes.c_uint64),
        ("cycles", ctypes.c_uint64),
        ("start_ns", ctypes.c_uint64),
        ("arrived_ns", ctypes.c_uint64),
        ("ready_ns", ctypes.c_uint64),
    )


class CudaSignal:
    """Signaling rounds of one rank; every method but ``local_hop`` is collective."""

    def __init__(self, fabric: CudaFabric) -> None:
        self._fabric = fabric
        self._buffer = fabric.allocate(_SEGMENT_BYTES)
        self._kernels: dict[str, DeviceKernel] = {}

    def hop(self, rounds: int) -> list[float]:
        """signal_hop_us between ranks 0 and 1, on rank 0; empty on the others."""
        times = self._run("signal_hop<{n}>", rounds, 2, grid=1, block=_WARP)
        return [us / 2 for us in self._cycles_us(times)] if self._fabric.rank == 0 else []

    def local_hop(self, rounds: int) -> list[float]:
        """local_hop_us between the first and the last CTA of this rank."""
        grid = self._fabric.num_sms
        times = self._run("signal_local_hop<{n}>", rounds, 1, grid, _WARP, alone=True)
        return [us / 2 for us in self._cycles_us(times)]

    def entry(self, rounds: int, ranks: int) -> list[float]:
        """signal_entry_us among the first ``ranks`` ranks; empty on the others."""
        times = self._run("signal_entry<{n}>", rounds, ranks, grid=1, block=_THREADS)
        return self._cycles_us(times) if self._fabric.rank < ranks else []

    def ready(self, protocol: str, rounds: int, ranks: int) -> tuple[list[float], list[float]]:
        """signal_ready_us and its part after the payload's arrival, for pull or push."""
        transfer = {"pull": "kPull", "push": "kPush"}[protocol]
        name = f"signal_ready<{{n}}, mokbench::Transfer::{transfer}>"
        times = self._run(name, rounds, ranks, grid=2, block=_THREADS)
        if self._fabric.rank >= ranks:
            return [], []
        _, start, arrived, ready = times
        return ((ready - start) / 1e3).tolist(), ((ready - arrived) / 1e3).tolist()

    def _run(
        self, name: str, rounds: int, ranks: int, grid: int, block: int, alone: bool = False
    ) -> tuple[Tensor, ...]:
        """Launch one kernel and return its arrays; counters start at zero in every call."""
        fabric = self._fabric
        self._buffer.own.zero_()
        arrays = torch.zeros(4, max(1, rounds), dtype=torch.int64, device=fabric.device)
        torch.cuda.synchronize()
        if not alone:
            fabric.barrier()
        pointers = self._buffer.pointers
        arguments = SignalArgs(
            segments=(ctypes.c_uint64 * _MAX_RANKS)(*pointers),
            rank=fabric.rank,
            ranks=ranks,
            rounds=rounds,
            base=0,
            wait_bound_ns=int(fabric.wait_bound_s * 1e9),
            cycles=arrays[0].data_ptr(),
            start_ns=arrays[1].data_ptr(),
            arrived_ns=arrays[2].data_ptr(),
            ready_ns=arrays[3].data_ptr(),
        )
        stream = torch.cuda.current_stream().cuda_stream
        self._kernel(name).launch(grid, block, [arguments], stream, cooperative=True)
        torch.cuda.synchronize()
        if fault := self._buffer.fault():
            raise fault
        return tuple(arrays.cpu().double())

    @staticmethod
    def _cycles_us(times: tuple[Tensor, ...]) -> list[float]:
        """Rounds in us; the whole call's time and cycles give the clock they were counted by."""
        cycles, total_ns, _, total_cycles = times
        return (cycles * float(total_ns[0] / total_cycles[0]) / 1e3).tolist()

    def _kernel(self, name: str) -> DeviceKernel:
        expression = "mokbench::" + name.format(n=self._fabric.ranks)
        if expression not in self._kernels:
            cubin = jit.build(_SOURCE, expression, self._fabric.arch)
            self._kernels[expression] = DeviceKernel(cubin)
        return self._kernels[expression]
