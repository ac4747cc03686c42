"""Systems measured in turn, A B C A B C, so that a machine that drifts drifts for all of them.

The ratio of two systems is then taken block by block, and most of the drift cancels.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mokbench.fabric.group import RankGroup
from mokbench.measure.columns import CLOCK, DURATION, EXPIRED, START
from mokbench.measure.timing import Step, Timer, block
from mokbench.stats import StopRule
from mokbench.workload import Regime

# Long enough that alignment and gathering are small beside it, short enough for many turns.
_BLOCK_S = 0.1
# A reference is there for its ratio only.
_REFERENCE_BLOCK_S = 0.02
_MAX_ITERATIONS = 500
# A chain of fewer passes is mostly its first and last one.
_MIN_CHAIN = 4
# Samples below this share of the warm-up's clock are measured again after a rest.
_MIN_CLOCK_SHARE = 0.75
_MAX_REDOS = 3
_REST_S = 0.3


@dataclass
class Lane:
    """One row being measured; a block is float64 [ranks, samples, columns].

    A ``reference`` lane is no row: it runs in every turn until the others have stopped. ``check``
    is called after every block and raises what a kernel recorded. ``blocks`` hold accepted samples
    only, ``rejected`` those whose clock was too low. ``measured_s`` is the time inside blocks,
    ``warmup_s`` that of the passes before the first.
    """

    name: str
    regime: Regime
    step: Step
    check: Callable[[], None] = lambda: None
    reference: bool = False
    iterations: int = 1
    clock_mhz: float = math.nan
    blocks: list[np.ndarray] = field(default_factory=list)
    rejected: list[np.ndarray] = field(default_factory=list)
    block_us: list[float] = field(default_factory=list)
    measured_s: float = 0.0
    warmup_s: float = 0.0
    stop_reason: str | None = None

    @property
    def num_rejected(self) -> int:
        """Samples thrown away because the clock was low."""
        return sum(part.shape[1] for part in self.rejected)

    @property
    def sm_clock_mhz(self) -> float | None:
        """Median SM clock of the accepted samples of all ranks; None where none was read."""
        clocks = np.concatenate([part[:, :, CLOCK].ravel() for part in self.blocks])
        known = clocks[~np.isnan(clocks)]
        return float(np.median(known)) if len(known) else None

    @property
    def hold_expired_share(self) -> float | None:
        """Share of samples that some rank began before its pass was queued; None without holds."""
        holds = [part[:, :, EXPIRED] for part in self.blocks if part.shape[2] > EXPIRED]
        if not holds:
            return None
        return float(np.concatenate([part.max(axis=0) for part in holds]).mean())


def measure_in_turn(
    group: RankGroup,
    timer: Timer,
    lanes: list[Lane],
    rule: StopRule,
    warmup: int,
    on_block: Callable[[str], None],
) -> None:
    """Fill every lane until its stop rule says why it may stop. Collective over all ranks.

    All ranks see all samples and decide from the same numbers, so they stop at the same block.
    ``on_block`` is told the name of the lane that runs now.
    """
    for lane in lanes:
        on_block(lane.name)
        lane.iterations = _choose_iterations(group, timer, lane, rule, warmup)
    turn = 0
    while any(lane.stop_reason is None for lane in lanes if not lane.reference):
        running = [lane for lane in lanes if lane.stop_reason is None]
        # The first of a turn may find a colder machine than the last: each is first in its turn.
        first = turn % len(running)
        for lane in running[first:] + running[:first]:
            on_block(lane.name)
            _run_block(group, timer, lane)
            if not lane.reference:
                lane.stop_reason = rule.decide(lane.block_us, lane.measured_s)
        turn += 1


def _choose_iterations(
    group: RankGroup, timer: Timer, lane: Lane, rule: StopRule, warmup: int
) -> int:
    """Passes per block from the warm-up, the same on all ranks."""
    samples = group.gather_samples(timer.isolated(lane.step, max(1, warmup)))
    lane.check()
    lane.warmup_s = _span_s(samples.numpy(), passes=1)
    lane.clock_mhz = float(samples[:, :, CLOCK].nanmedian())
    step_s = _iteration_s(samples.numpy(), lane.regime)
    wanted_s = _REFERENCE_BLOCK_S if lane.reference else _BLOCK_S
    block_s = min(wanted_s, rule.max_time_s / max(1, rule.min_blocks))
    floor = _MIN_CHAIN if lane.regime is Regime.STEADY else 1
    return min(_MAX_ITERATIONS, max(floor, math.ceil(block_s / max(step_s, 1e-9))))


def _run_block(group: RankGroup, timer: Timer, lane: Lane) -> None:
    """One block; a part of it whose clock was low is thrown away and measured again."""
    parts: list[np.ndarray] = []
    missing = lane.iterations
    for redo in range(_MAX_REDOS + 1):
        own = block(timer, lane.regime, lane.step, missing)
        lane.check()
        samples = group.gather_samples(own).numpy()
        passes = lane.iterations if lane.regime is Regime.STEADY else 1
        # NaN, where no clock was read, is not low.
        good = ~(_lowest_clock(samples, group) < _MIN_CLOCK_SHARE * lane.clock_mhz)
        if redo == _MAX_REDOS and not good.all():
            # Three rests did not bring the clock back: it is the clock of this machine now.
            lane.clock_mhz = float(np.nanmedian(samples[:, :, CLOCK]))
            good[:] = True
        # Time for samples that are thrown away is not taken from the row's.
        lane.measured_s += _span_s(samples, passes) * float(good.mean())
        parts.append(samples[:, good])
        if good.all():
            break
        lane.rejected.append(samples[:, ~good])
        missing = lane.iterations if lane.regime is Regime.STEADY else int((~good).sum())
        time.sleep(_REST_S)
    lane.blocks.append(np.concatenate(parts, axis=1))
    lane.block_us.append(float(np.median(lane.blocks[-1][:, :, DURATION].max(axis=0))))


def _iteration_s(samples: np.ndarray, regime: Regime) -> float:
    """What one more sample of a block will take, with what the timer does around the pass."""
    slowest_s = float(np.median(samples[:, :, DURATION].max(axis=0))) / 1e6
    if regime is Regime.STEADY or samples.shape[1] < 2:
        return slowest_s
    apart_s = float(np.median(np.diff(samples[:, :, START], axis=1))) / 1e6
    return slowest_s if math.isnan(apart_s) else max(slowest_s, apart_s)


def _lowest_clock(samples: np.ndarray, group: RankGroup) -> np.ndarray:
    """Clock of the slowest GPU in each sample; ranks of one GPU have one clock, so their median."""
    clocks, share = samples[:, :, CLOCK], group.ranks_per_gpu
    gpus = [np.median(clocks[i : i + share], axis=0) for i in range(0, len(clocks), share)]
    lowest: np.ndarray = np.min(gpus, axis=0)
    return lowest


def _span_s(samples: np.ndarray, passes: int) -> float:
    """Time from a rank's first start to its last stop, alignment in between; the longest rank's."""
    start, duration = samples[:, :, START], samples[:, :, DURATION] * passes
    return float(((start + duration).max(axis=1) - start.min(axis=1)).max()) / 1e6


def rank_spread_us(blocks: list[np.ndarray]) -> float:
    """Median over samples of slowest minus fastest rank."""
    spread = [np.ptp(samples[:, :, DURATION], axis=0) for samples in blocks]
    return float(np.median(np.concatenate(spread)))
