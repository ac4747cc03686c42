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
# Once a rank count: signaling rounds of every quantity and count below, seconds a count.
SIGNALS_S = 2.0
# Once a system and rank count: the minimal step (mokbench/min_step.py).
MIN_STEP_S = 0.8
# Random numbers a core makes a second, for weights and inputs; every rank also makes those of the
# other ranks' experts, one at a time, for the truth.
RANDOM_PER_S = 150e6
# A rank's process with torch loaded, on the host fabric (280 MiB were seen).
PROCESS_BYTES = 280 << 20
# Report and charts at the end.
REPORT_S = 10.0
# Dispatch and combine alone, as a share of max_time; a row that turned slower may take it twice.
PHASE_SHARE, MOST_TIMES = 0.25, 2.0
# Deliberately low rates: a core of a laptop in BF16, and half of a busy H200.
HOST_FLOPS_PER_CORE = 10e9
CUDA_FLOPS = 300e12


@dataclass(frozen=True)
class PlannedCell:
    """One row before it runs. Bytes are sums over all ranks; times include the harness.

    ``likely_s`` takes half of the measuring time, since rows stop once their noise is low;
    ``bound_s`` takes twice ``max_time``, where the stop rule ends, and a quarter more for dispatch
    and combine alone; neither is above the deadline, at which a row is killed. A row that is
    refused costs nothing.
    """

    cell: Cell
    weights_bytes: int
    inputs_bytes: int
    workspace_bytes: int
    likely_s: float
    bound_s: float
    truth_bytes: int = 0
    process_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Weights, inputs, truth, workspace and processes of all ranks together."""
        held = self.weights_bytes + self.inputs_bytes + self.workspace_bytes
        return held + self.truth_bytes + self.process_bytes

    @property
    def rank_bytes(self) -> int:
        """The part of one rank, rounded up: what one GPU must hold."""
        return -(-self.memory_bytes // self.cell.workload.ranks)


@dataclass(frozen=True)
class Plan:
    """A whole sweep before it runs.

    ``startup_s`` is what comes once: ranks of each count started, their signaling, each system's
    minimal step, weights and truth of each workload, and the report.
    """

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
    workspace_bytes: Callable[[Cell], int | None],
    flops_per_s: float | None = None,
) -> Plan:
    """Estimate every cell.

    ``workspace_bytes`` gives a cell's communication workspace, all ranks together, None where the
    cell is unsupported. ``flops_per_s`` is the rate of all ranks together, by default a low guess.
    """
    planned, able = [], []
    for cell in cells:
        workspace = workspace_bytes(cell)
        if workspace is None:
            planned.append(PlannedCell(cell, 0, 0, 0, 0.0, 0.0))
            continue
        able.append(cell)
        planned.append(_planned(suite, cell, workspace, flops_per_s or _default_rate(cell)))
    return Plan(tuple(planned), _once_s(suite, able))


def _once_s(suite: "Suite", cells: list[Cell]) -> float:
    """Seconds that are not any single row's."""
    if not cells:
        return 0.0
    ranks = {cell.workload.ranks for cell in cells}
    seconds = REPORT_S + STARTUP_S * len(ranks)
    if suite.measure.signals:
        seconds += SIGNALS_S * sum(max(1, min(count, 8) - 1) for count in ranks)
    if suite.measure.min_step:
        steps = {(cell.system, cell.options, cell.workload.ranks) for cell in cells}
        seconds += MIN_STEP_S * len(steps)
    for work in {cell.workload for cell in cells if cell.fabric == "host"}:
        numbers = weights_bytes(work) / work.dtype.num_bytes * (1 + work.ranks)
        seconds += numbers / RANDOM_PER_S / min(work.ranks, os.cpu_count() or 1)
    return seconds


def truth_bytes(workload: Workload) -> int:
    """All ranks' FP32 x, y and sums of |terms|, and one expert's FP32 weights at a time."""
    model = workload.model
    rows = 3 * workload.tokens_per_rank * model.hidden
    return 4 * workload.ranks * (rows + 3 * model.hidden * model.intermediate)


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
    most = MOST_TIMES + PHASE_SHARE
    num_passes = measure.warmup + CHECK_PASSES + measure.blocks
    fixed_s = OVERHEAD_S + num_passes * pass_flops(cell.workload) / flops_per_s
    return PlannedCell(
        cell,
        weights_bytes(cell.workload),
        inputs_bytes(cell.workload),
        workspace,
        likely_s=min(measure.deadline_s, fixed_s + measure.max_time_s / 2),
        bound_s=min(measure.deadline_s, fixed_s + most * measure.max_time_s),
        truth_bytes=truth_bytes(cell.workload),
        process_bytes=PROCESS_BYTES * cell.workload.ranks if cell.fabric == "host" else 0,
    )


def _default_rate(cell: Cell) -> float:
    if cell.fabric == "host":
        return HOST_FLOPS_PER_CORE * (os.cpu_count() or 1)
    return CUDA_FLOPS
