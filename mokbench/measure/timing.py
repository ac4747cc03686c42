"""Timing of passes: aligned single passes, chains of passes, phases; and how the host does it.

Single passes and chains are different quantities. An isolated pass starts with all ranks idle and
aligned; a chain lets one pass's tail overlap the next one's head, so only its period means
anything.
"""

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mokbench.fabric.host import HostFabric
from mokbench.measure.columns import DURATION, START
from mokbench.workload import Regime

Step = Callable[[], object]


class Timer(Protocol):
    """Times passes on one rank; every method but ``graphed`` is collective over the ranks.

    A block is float64 [samples, 3 or 4], see measure.columns.
    """

    def l2_state(self, regime: Regime) -> str | None:
        """What a pass finds in the GPU's L2: ``flushed`` or ``warm``; None without a GPU."""

    def isolated(self, step: Step, iterations: int) -> Tensor:
        """One sample a pass; each starts aligned, so a late rank cannot hide in the one before."""

    def steady(self, step: Step, iterations: int) -> Tensor:
        """One sample a block: the period of ``iterations`` back-to-back passes."""

    def phases(self, dispatch: Step, compute: Step, combine: Step, iterations: int) -> Tensor:
        """Dispatch and combine alone, each from an aligned start: float64 [iterations, 2] in us.

        Without the second alignment combine would inherit the skew with which ranks leave compute.
        """

    def graphed(self, step: Step) -> Step:
        """``step`` captured in a CUDA graph; raises MokbenchError where that cannot be.

        It runs once before: what other ranks of it need must be able to run there too.
        """


def block(timer: Timer, regime: Regime, step: Step, iterations: int) -> Tensor:
    """One block of a regime: [iterations, columns] isolated, [1, columns] steady."""
    time_block = timer.isolated if regime is Regime.ISOLATED else timer.steady
    return time_block(step, iterations)


class HostTimer:
    """Timer of the host fabric: the process's own monotonic clock."""

    def __init__(self, fabric: HostFabric) -> None:
        self._fabric = fabric

    def l2_state(self, regime: Regime) -> None:
        """No GPU here."""

    def isolated(self, step: Step, iterations: int) -> Tensor:
        """See Timer."""
        samples = torch.full((iterations, 3), math.nan, dtype=torch.float64)
        for i in range(iterations):
            self._fabric.align()
            start = time.perf_counter_ns()
            step()
            stop = time.perf_counter_ns()
            samples[i, START], samples[i, DURATION] = start / 1e3, (stop - start) / 1e3
        return samples

    def steady(self, step: Step, iterations: int) -> Tensor:
        """See Timer."""
        self._fabric.align()
        start = time.perf_counter_ns()
        for _ in range(iterations):
            step()
        stop = time.perf_counter_ns()
        sample = [start / 1e3, (stop - start) / 1e3 / iterations, math.nan]
        return torch.tensor([sample], dtype=torch.float64)

    def phases(self, dispatch: Step, compute: Step, combine: Step, iterations: int) -> Tensor:
        """See Timer."""
        samples = torch.empty(iterations, 2, dtype=torch.float64)
        for i in range(iterations):
            self._fabric.align()
            start = time.perf_counter_ns()
            dispatch()
            samples[i, 0] = (time.perf_counter_ns() - start) / 1e3
            compute()
            self._fabric.align()
            start = time.perf_counter_ns()
            combine()
            samples[i, 1] = (time.perf_counter_ns() - start) / 1e3
        return samples

    def graphed(self, step: Step) -> Step:
        """Cells with a graph are refused on the host before they get here."""
        raise AssertionError("the host fabric has no CUDA graphs")
