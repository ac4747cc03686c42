"""Systems measured in turn, A B C A B C, so that a machine that drifts drifts for all of them.

The ratio of two systems is then taken block by block, and most of the drift cancels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from mokbench.fabric.host import HostFabric
from mokbench.measure.timing import TIME_BLOCK, Step, isolated_block
from mokbench.stats import StopRule
from mokbench.workload import Cell, Regime

# Long enough that alignment and gathering are small beside it, short enough for many turns.
_BLOCK_S = 0.1
_MAX_ITERATIONS = 500
# A chain of fewer passes is mostly its first and last one.
_MIN_CHAIN = 4


@dataclass
class Lane:
    """One row being measured; a block is float64 [ranks, samples, 2] (start_us, duration_us).

    ``measured_s`` is the time inside blocks, ``warmup_s`` that of the passes before the first.
    """

    cell: Cell
    step: Step
    iterations: int = 1
    blocks: list[np.ndarray] = field(default_factory=list)
    block_us: list[float] = field(default_factory=list)
    measured_s: float = 0.0
    warmup_s: float = 0.0
    stop_reason: str | None = None


def measure_in_turn(
    fabric: HostFabric,
    lanes: list[Lane],
    rule: StopRule,
    warmup: int,
    on_block: Callable[[Cell], None],
) -> None:
    """Fill every lane until its stop rule says why it may stop. Collective over all ranks.

    All ranks see all samples and decide from the same numbers, so they stop at the same block.
    ``on_block`` is told which lane runs now.
    """
    for lane in lanes:
        on_block(lane.cell)
        lane.iterations = _choose_iterations(fabric, lane, rule, warmup)
    turn = 0
    while running := [lane for lane in lanes if lane.stop_reason is None]:
        # The first of a turn may find a colder machine than the last: each is first in its turn.
        first = turn % len(running)
        for lane in running[first:] + running[:first]:
            on_block(lane.cell)
            _run_block(fabric, lane)
            lane.stop_reason = rule.decide(lane.block_us, lane.measured_s)
        turn += 1


def _choose_iterations(fabric: HostFabric, lane: Lane, rule: StopRule, warmup: int) -> int:
    """Passes per block from the warm-up, the same on all ranks."""
    samples = fabric.gather_samples(isolated_block(fabric, lane.step, max(1, warmup)))
    lane.warmup_s = _span_s(samples.numpy(), passes=1)
    step_s = float(samples[:, :, 1].amax(dim=0).median()) / 1e6
    block_s = min(_BLOCK_S, rule.max_time_s / max(1, rule.min_blocks))
    floor = _MIN_CHAIN if lane.cell.regime is Regime.STEADY else 1
    return min(_MAX_ITERATIONS, max(floor, math.ceil(block_s / max(step_s, 1e-9))))


def _run_block(fabric: HostFabric, lane: Lane) -> None:
    own = TIME_BLOCK[lane.cell.regime](fabric, lane.step, lane.iterations)
    block = fabric.gather_samples(own).numpy()
    lane.blocks.append(block)
    slowest_us = block[:, :, 1].max(axis=0)
    lane.block_us.append(float(np.median(slowest_us)))
    lane.measured_s += _span_s(block, lane.iterations if lane.cell.regime is Regime.STEADY else 1)


def _span_s(block: np.ndarray, passes: int) -> float:
    """Time from the first rank's first start to the last rank's last stop, alignment in between."""
    start, duration = block[:, :, 0], block[:, :, 1] * passes
    return float((start + duration).max() - start.min()) / 1e6


def rank_spread_us(blocks: list[np.ndarray]) -> float:
    """Median over samples of slowest minus fastest rank."""
    spread = [np.ptp(block[:, :, 1], axis=0) for block in blocks]
    return float(np.median(np.concatenate(spread)))


def all_true(fabric: HostFabric, value: bool) -> bool:
    """Whether ``value`` holds on every rank."""
    return bool(fabric.gather_samples(torch.tensor([float(value)])).all())
