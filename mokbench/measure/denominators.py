"""What figures are divided by: the matmul peak, copy, read and peer-copy rates of this machine.

All ranks measure at once, since they will also run at once. Rates are medians over repetitions of
the slowest rank's time. And the self-test that a known delay of one rank shows as that skew.
"""

import ctypes
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.errors import MokbenchError
from mokbench.fabric.cuda import CudaFabric
from mokbench.measure.columns import DURATION
from mokbench.measure.gpu_timing import GpuTimer
from mokbench.measure.timing import Step

_MATMUL_SIZE = 8192
# Many times the L2, so that rates are those of memory.
_RATE_BYTES = 1 << 30
_PEER_BYTES = 256 << 20
_WARMUP, _REPETITIONS = 3, 12
_DELAY_S = 200e-6
# A hop between ranks, the delay kernel's own steps and the timer's.
_DELAY_TOLERANCE_S = 20e-6


class MatmulPeak:
    """A square matmul in the workload's dtype by torch (cuBLAS), shared by the ranks of a GPU.

    It is measured in turn with the systems, so that all have the same clock.
    """

    def __init__(self, fabric: CudaFabric, dtype: torch.dtype) -> None:
        size, rows = _MATMUL_SIZE, _MATMUL_SIZE // fabric.ranks_per_gpu
        generator = torch.Generator(fabric.device).manual_seed(fabric.rank)
        made: dict[str, Any] = {"dtype": dtype, "device": fabric.device, "generator": generator}
        self._a = torch.randn(rows, size, **made)
        self._b = torch.randn(size, size, **made)
        self._c = torch.empty(rows, size, dtype=dtype, device=fabric.device)
        self.flops = 2 * rows * size * size

    def run(self) -> Tensor:
        """One matmul of this rank: [8192 / ranks of the GPU, 8192] x [8192, 8192]."""
        return torch.mm(self._a, self._b, out=self._c)


@dataclass(frozen=True)
class DeviceRates:
    """Bytes/s of one rank while all ranks do the same, and the self-test's reading.

    ``copy_bytes_per_s`` counts bytes read plus bytes written. ``peer_bytes_per_s`` is a plain copy
    from the next rank's memory, bytes counted once; None for one rank, and where ranks do not reach
    one another's memory.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    peer_bytes_per_s: float | None
    skew_self_test_us: float
    timer_step_us: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


def device_rates(fabric: CudaFabric, timer: GpuTimer) -> DeviceRates:
    """Measure all of it; collective, the same result on every rank.

    Raises MokbenchError where the self-test's delay is not seen.
    """
    num_bytes = _RATE_BYTES // fabric.ranks_per_gpu
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=fabric.device)
    target = torch.empty_like(source)
    copy_s = _slowest_s(fabric, timer, lambda: target.copy_(source))
    read_s = _slowest_s(fabric, timer, source.sum)
    peer = None
    if fabric.ranks > 1 and fabric.maps_peers:
        buffer = fabric.allocate(_PEER_BYTES)
        remote, local = buffer.of((fabric.rank + 1) % fabric.ranks), torch.empty_like(buffer.own)
        peer = _PEER_BYTES / _slowest_s(fabric, timer, lambda: local.copy_(remote))
    return DeviceRates(
        copy_bytes_per_s=2 * num_bytes / copy_s,
        read_bytes_per_s=num_bytes / read_s,
        peer_bytes_per_s=peer,
        skew_self_test_us=skew_self_test_us(fabric, timer),
        timer_step_us=max((us for us in fabric.gather(timer.step_us()) if us), default=None),
    )


def skew_self_test_us(fabric: CudaFabric, timer: GpuTimer) -> float:
    """The skew that the timer reports when the last rank alone is 200 us late, in us.

    With one rank its own time is the reading. Raises MokbenchError when it is 20 us or more off.
    """
    is_late = fabric.rank == fabric.ranks - 1
    kernel = DeviceKernel(jit.build("timing.cuh", "mokbench::delay", fabric.arch))

    def step() -> None:
        delay_ns = int(_DELAY_S * 1e9) if is_late else 0
        stream = int(torch.cuda.current_stream().cuda_stream)
        kernel.launch(1, 32, [ctypes.c_uint64(delay_ns)], stream)

    timer.isolated(step, _WARMUP)
    durations = fabric.gather_samples(timer.isolated(step, _REPETITIONS))[:, :, DURATION]
    fastest = durations.amin(dim=0) if fabric.ranks > 1 else 0.0
    found_us = float((durations.amax(dim=0) - fastest).median())
    if abs(found_us - _DELAY_S * 1e6) >= _DELAY_TOLERANCE_S * 1e6:
        raise MokbenchError(
            f"self-test of the timing: one rank was made {_DELAY_S * 1e6:.0f} us late, and a skew "
            f"of {found_us:.1f} us was seen; is another program using the GPU?"
        )
    return found_us


def _slowest_s(fabric: CudaFabric, timer: GpuTimer, step: Step) -> float:
    """Median over repetitions of the slowest rank's time, in seconds."""
    timer.isolated(step, _WARMUP)
    durations = fabric.gather_samples(timer.isolated(step, _REPETITIONS))[:, :, DURATION]
    return float(durations.amax(dim=0).median()) / 1e6
