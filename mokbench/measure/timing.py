"""Timing of passes on the host: aligned single passes, and chains of passes.

The two are different quantities. An isolated pass starts with all ranks idle and aligned; a chain
lets one pass's tail overlap the next one's head, so only its period means anything.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mokbench.fabric.host import HostFabric
from mokbench.workload import Regime

Step = Callable[[], object]


class TimeBlock(Protocol):
    """Times ``iterations`` passes: float64 [samples, 2] of (start_us, duration_us) on this rank."""

    def __call__(self, fabric: HostFabric, step: Step, iterations: int) -> Tensor:
        """Collective over all ranks."""


def isolated_block(fabric: HostFabric, step: Step, iterations: int) -> Tensor:
    """One sample a pass; each starts aligned, so a late rank cannot hide in the one before."""
    samples = torch.empty(iterations, 2, dtype=torch.float64)
    for i in range(iterations):
        fabric.align()
        start = time.perf_counter_ns()
        step()
        stop = time.perf_counter_ns()
        samples[i, 0], samples[i, 1] = start / 1e3, (stop - start) / 1e3
    return samples


def steady_block(fabric: HostFabric, step: Step, iterations: int) -> Tensor:
    """One sample a block: the period of ``iterations`` back-to-back passes."""
    fabric.align()
    start = time.perf_counter_ns()
    for _ in range(iterations):
        step()
    stop = time.perf_counter_ns()
    return torch.tensor([[start / 1e3, (stop - start) / 1e3 / iterations]], dtype=torch.float64)


TIME_BLOCK: dict[Regime, TimeBlock] = {
    Regime.ISOLATED: isolated_block,
    Regime.STEADY: steady_block,
}


def phase_samples(
    fabric: HostFabric, dispatch: Step, compute: Step, combine: Step, iterations: int
) -> Tensor:
    """Dispatch and combine alone, each from an aligned start: float64 [iterations, 2] in us.

    Without the second alignment combine would inherit the skew with which ranks leave compute.
    """
    samples = torch.empty(iterations, 2, dtype=torch.float64)
    for i in range(iterations):
        fabric.align()
        start = time.perf_counter_ns()
        dispatch()
        samples[i, 0] = (time.perf_counter_ns() - start) / 1e3
        compute()
        fabric.align()
        start = time.perf_counter_ns()
        combine()
        samples[i, 1] = (time.perf_counter_ns() - start) / 1e3
    return samples
