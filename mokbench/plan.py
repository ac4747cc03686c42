"""What a sweep will cost before it runs: time and memory of each cell and of the whole."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mokbench.workload import Cell, Workload

if TYPE_CHECKING:
    from mokbench.config import Suite

# Starting the ranks of one rank count: interpreter, torch import, rendezvous.
STARTUP_S = 6.0
# Per row: building the system, the oracle check, storing; the harness promises at most 0.3 s.
OVERHEAD_S = 0.3
# Passes beside warm-up and blocks: the oracle check and its bitwise repeat.
CHECK_PASSES = 2
# Deliberately low rates: a core of a laptop in BF16, and half of a busy H200.
HOST_FLOPS_PER_CORE = 10e9
CUDA_FLOPS = 300e12


@dataclass(frozen=True)
class PlannedCell:
    """One row before it runs. Bytes are sums over all ranks; times include the harness.

    ``likely_s`` takes half of the measuring time, since rows stop once their noise is low;
    ``bound_s`` takes all of it and is never above the deadline, at which a row is killed.
    """

    cell: Cell
    weights_bytes: int
    inputs_bytes: int
    workspace_bytes: int
    likely_s: float
    bound_s: float

    @property
    def memory_bytes(self) -> int:
        """Weights, inputs and workspace of all ranks together."""
        return self.weights_bytes + self.inputs_bytes + self.workspace_bytes

    @property
    def rank_bytes(self) -> int:
        """The part of one rank, rounded up: what one GPU must hold."""
        return -(-self.memory_bytes // self.cell.workload.ranks)


@dataclass(frozen=True)
class Plan:
    """A whole sweep before it runs; ``startup_s`` is the time to start ranks, once a rank count."""

    cells: tuple[PlannedCell, ...]
    startup_s: float

    @property
    def likely_s(self) -> float:
        """Likely time of all rows and starts, seconds."""
        return self.startup_s + sum(each.likely_s for each in self.cells)

    @property
    def bound_s(self) -> float:
        """Time that should not be exceeded while no row fails, seconds."""
        return self.startup_s + sum(each.bound_s for each in self.cells)

    @property
    def peak_bytes(self) -> int:
        """Largest cell: cells run one after another."""
        return max((each.memory_bytes for each in self.cells), default=0)

    @property
    def peak_rank_bytes(self) -> int:
        """Largest part of one rank."""
        return max((each.rank_bytes for each in self.cells), default=0)


def plan(
    suite: "Suite",
    cells: Iterable[Cell],
    workspace_bytes: Callable[[Cell], int],
    flops_per_s: float | None = None,
) -> Plan:
    """Estimate every cell.

    ``workspace_bytes`` gives a cell's communication workspace, all ranks together, 0 where the
    cell is unsupported. ``flops_per_s`` is the rate of all ranks together, by default a low guess.
    """
    planned = tuple(
        _planned(suite, cell, workspace_bytes(cell), flops_per_s or _default_rate(cell))
        for cell in cells
    )
    num_starts = len({each.cell.workload.ranks for each in planned})
    return Plan(planned, STARTUP_S * num_starts)


def weights_bytes(workload: Workload) -> int:
    """W13 and W2 of all experts: experts * 3 * hidden * intermediate elements."""
    model = workload.model
    return model.experts * 3 * model.hidden * model.intermediate * workload.dtype.num_bytes


def inputs_bytes(workload: Workload) -> int:
    """All ranks' x and y [T, hidden], topk_idx int32 and topk_weights float32 [T, top_k]."""
    model = workload.model
    token_bytes = 2 * model.hidden * workload.dtype.num_bytes + 8 * model.top_k
    return workload.ranks * workload.tokens_per_rank * token_bytes


def pass_flops(workload: Workload) -> int:
    """Floating-point operations of one pass over all ranks, no route masked: 6 * M * H * I."""
    model = workload.model
    num_rows = workload.ranks * workload.tokens_per_rank * model.top_k
    return 6 * num_rows * model.hidden * model.intermediate


def _planned(suite: "Suite", cell: Cell, workspace: int, flops_per_s: float) -> PlannedCell:
    measure = suite.measure
    num_passes = measure.warmup + CHECK_PASSES + measure.blocks
    fixed_s = OVERHEAD_S + num_passes * pass_flops(cell.workload) / flops_per_s
    return PlannedCell(
        cell,
        weights_bytes(cell.workload),
        inputs_bytes(cell.workload),
        workspace,
        likely_s=min(measure.deadline_s, fixed_s + measure.max_time_s / 2),
        bound_s=min(measure.deadline_s, fixed_s + measure.max_time_s),
    )


def _default_rate(cell: Cell) -> float:
    if cell.fabric == "host":
        return HOST_FLOPS_PER_CORE * (os.cpu_count() or 1)
    return CUDA_FLOPS
