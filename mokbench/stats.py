"""Medians, intervals that assume no distribution, paired ratios, fits and the stop rule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr

from mokbench.figures import Quantity, StepTime

CONFIDENCE = 0.95
# nvbench's idea: stop once the noise estimate itself moves less than this over a window.
STABLE_WINDOW = 8
STABLE_SPREAD = 0.05
# Smallest relative difference of step times that is called one: what a neighbour on the machine
# or a line of code's place in memory moves is below it.
EFFECT_FLOOR = 0.02


@dataclass(frozen=True)
class Ratio:
    """Median ratio a / b with its 95 % interval over ``n`` pairs; no interval for few pairs."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def excludes_one(self) -> bool:
        """Whether there is an interval and it lies on one side of 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    @property
    def is_resolved(self) -> bool:
        """Whether the interval excludes 1 and the ratio is at least the effect floor from it."""
        far = not 1 / (1 + EFFECT_FLOOR) < self.value < 1 + EFFECT_FLOOR
        return self.excludes_one and far


@dataclass(frozen=True)
class Fit:
    """Least squares y = alpha + beta * n; ``r2`` is null where it would say nothing."""

    alpha: float
    beta: float
    r2: float | None

    def at(self, n: float) -> float:
        """Return the fitted value at ``n``."""
        return self.alpha + self.beta * n


@lru_cache(maxsize=1024)
def interval_ranks(n: int, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """Order statistics (1-based) that enclose the median of ``n`` samples with ``confidence``.

    The number of samples below the median is Binomial(n, 1/2), so [X(d), X(n+1-d)] misses it with
    probability 2 P(B < d); the largest d that keeps this below 1 - confidence is taken. Null
    where even [min, max] does not reach it (n < 6 for 95 %).
    """
    tails = 2.0 * bdtr(np.arange(n // 2, dtype=np.float64), n, 0.5)
    d = int(np.count_nonzero(tails <= 1.0 - confidence))
    return (d, n + 1 - d) if d else None


def median_interval(
    values: ArrayLike, confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Interval of the median that holds for any distribution of independent samples, or null."""
    ordered = np.sort(_checked(values))
    ranks = interval_ranks(len(ordered), confidence)
    return None if ranks is None else (float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1]))


def percentile(values: ArrayLike, share: float) -> float:
    """Nearest-rank percentile: the smallest sample that ``share`` of all do not exceed."""
    return float(np.quantile(_checked(values), share, method="inverted_cdf"))


def noise(values: ArrayLike) -> float | None:
    """Half width of the median's interval over the median; null without an interval."""
    interval = median_interval(values)
    middle = float(np.median(_checked(values)))
    if interval is None or middle <= 0.0:
        return None
    return (interval[1] - interval[0]) / 2.0 / middle


def block_medians(samples_us: ArrayLike, block: ArrayLike) -> list[float]:
    """Median of the samples of each block, in order of block index."""
    samples, index = _checked(samples_us), np.asarray(block)
    if samples.shape != index.shape:
        raise ValueError(f"{len(samples)} samples but {index.size} block indices")
    return [float(np.median(samples[index == i])) for i in np.unique(index)]


def summarize(samples_us: ArrayLike, block: ArrayLike | None = None) -> StepTime:
    """Step time of per-iteration maxima over ranks, in us, shape [iterations].

    With ``block`` (each iteration's block index) the interval is that of the block medians: the
    iterations of a block drift together, so their number overstates what is known. The interval
    is widened to hold the median of all iterations.
    """
    samples = _checked(samples_us)
    middle = float(np.median(samples))
    interval = median_interval(samples if block is None else block_medians(samples, block))
    return StepTime(
        median=middle,
        p95=percentile(samples, 0.95),
        min=float(samples.min()),
        ci_low=None if interval is None else min(interval[0], middle),
        ci_high=None if interval is None else max(interval[1], middle),
        n=len(samples),
    )


def quantity(rounds_us: ArrayLike) -> Quantity:
    """Median, p99 and interval of a signaling figure's rounds, in us."""
    rounds = _checked(rounds_us)
    interval = median_interval(rounds) or (None, None)
    return Quantity(
        median=float(np.median(rounds)),
        p99=percentile(rounds, 0.99),
        ci_low=interval[0],
        ci_high=interval[1],
        n=len(rounds),
    )


def paired_ratio(block_us_a: ArrayLike, block_us_b: ArrayLike) -> Ratio:
    """Ratio a / b of two rows measured in turn: block i of one ran next to block i of the other.

    What both blocks of a pair suffer (clock, neighbours) cancels; the value is the median of the
    per-pair ratios. Blocks that only one row has are left out. ValueError without a pair.
    """
    a, b = _checked(block_us_a), _checked(block_us_b)
    pairs = min(len(a), len(b))
    if b[:pairs].min() <= 0.0:
        raise ValueError("a block took no time at all")
    ratios = a[:pairs] / b[:pairs]
    interval = median_interval(ratios) or (None, None)
    return Ratio(float(np.median(ratios)), interval[0], interval[1], pairs)


def separate_ratio(a: StepTime, b: StepTime) -> Ratio:
    """Ratio of two medians that were not measured in turn.

    The interval takes both intervals at their worst, so it is wider than a paired one; drift
    between the two rows is not in it.
    """
    value = a.median / b.median
    if a.ci_low is None or a.ci_high is None or b.ci_low is None or b.ci_high is None:
        return Ratio(value, None, None, min(a.n, b.n))
    return Ratio(value, a.ci_low / b.ci_high, a.ci_high / b.ci_low, min(a.n, b.n))


def linear_fit(n: Sequence[float], y: Sequence[float]) -> Fit:
    """Least squares line through (n, y); ``r2`` needs three different n and a y that varies."""
    x, values = _checked(n), _checked(y)
    if len(x) != len(values):
        raise ValueError(f"{len(x)} values of n but {len(values)} of y")
    different = len(np.unique(x))
    if different < 2:
        raise ValueError(f"a line needs two different n, got {different}")
    slope = float(np.sum((x - x.mean()) * (values - values.mean())) / np.sum((x - x.mean()) ** 2))
    fit = Fit(float(values.mean()) - slope * float(x.mean()), slope, None)
    total = float(np.sum((values - values.mean()) ** 2))
    if different < 3 or total == 0.0:
        return fit
    left = float(np.sum((values - fit.alpha - fit.beta * x) ** 2))
    return Fit(fit.alpha, fit.beta, 1.0 - left / total)


@dataclass(frozen=True)
class StopRule:
    """When a row has enough blocks. Pure: the same arguments give every rank the same answer.

    ``noise`` is the target for the relative half width of the median's interval; ``min_blocks``
    the least number of blocks before the row may stop; ``max_time_s`` then ends it, and twice that
    ends it in any case.
    """

    noise: float
    min_blocks: int
    max_time_s: float

    def decide(self, block_us: Sequence[float], elapsed_s: float) -> str | None:
        """Why to stop now (``noise``, ``stable`` or ``time``), or null to measure another block.

        ``stable``: the spread of the blocks is known well, and at that spread the target is out
        of reach by the time limit (the interval shrinks with the root of the number of blocks).
        """
        if len(block_us) >= max(self.min_blocks, 1):
            now = noise(block_us)
            if now is not None and now <= self.noise:
                return "noise"
            if now is not None and self._is_stable(block_us):
                at_the_end = now * math.sqrt(min(1.0, elapsed_s / self.max_time_s))
                if at_the_end > self.noise:
                    return "stable"
        # A row whose blocks turned out slower than its warm-up may take twice the time before it
        # has to go without an interval.
        enough = len(block_us) >= self.min_blocks or elapsed_s >= 2 * self.max_time_s
        return "time" if elapsed_s >= self.max_time_s and enough else None

    @staticmethod
    def _is_stable(block_us: Sequence[float]) -> bool:
        n = len(block_us)
        if n < 2 * STABLE_WINDOW:
            return False
        values = np.asarray(block_us, dtype=np.float64)
        spreads = np.array(
            [np.std(values[:k]) / np.mean(values[:k]) for k in range(n - STABLE_WINDOW + 1, n + 1)]
        )
        return bool(np.std(spreads) < STABLE_SPREAD * np.mean(spreads))


def _checked(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"needs a list of at least one number, got shape {array.shape}")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise ValueError(f"sample {bad[0]} is {array[bad[0]]}: every sample must be finite")
    return array
