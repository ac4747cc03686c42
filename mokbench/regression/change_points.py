"""Where the level of a series changed: a piecewise constant fit by least absolute deviations.

The fit minimises sum |x - median of its segment| plus a penalty for each segment (the Potts
functional with an L1 cost, as asv uses it), exactly, by dynamic programming. Absolute deviations
and segments of at least three launches leave single spikes alone, which a squared cost follows.
"""

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mokbench.regression.shift import LEAST_SPREAD, MAD_SCALE

LEAST_SEGMENT = 3
# Penalty of a segment in units of the noise, times log n: the least at which
# scripts/regression_power.py finds a change in at most 1 % of series that have none, at 1 % noise.
PENALTY = 1.9
# Changes smaller than this are merged, as the gate's floor does.
LEAST_CHANGE = 0.02


def find(values: ArrayLike) -> list[int]:
    """Positions at which a new level begins, ascending; ``values`` in order of time, positive.

    Shape [launches]. Empty for fewer than twice ``LEAST_SEGMENT`` values. ValueError for values
    that are not positive and finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or np.any(~np.isfinite(array)) or np.any(array <= 0):
        raise ValueError("change points need a list of positive, finite values")
    if len(array) < 2 * LEAST_SEGMENT:
        return []
    logs = np.log(array)
    return _merged(logs, _segments(logs / _noise(logs)))


def levels(values: ArrayLike, changes: list[int]) -> list[float]:
    """Median of each segment between ``changes``."""
    array = np.asarray(values, dtype=np.float64)
    edges = [0, *changes, len(array)]
    return [float(np.median(array[a:b])) for a, b in itertools.pairwise(edges) if b > a]


def _noise(logs: NDArray[np.float64]) -> float:
    """Deviation of one launch, from differences of neighbours, which a few steps do not widen."""
    steps = np.abs(np.diff(logs))
    return max(MAD_SCALE * float(np.median(steps)) / math.sqrt(2.0), LEAST_SPREAD)


def _segments(x: NDArray[np.float64]) -> list[int]:
    n = len(x)
    costs = np.full((n, n + 1), np.inf)
    steps = np.arange(n)
    for length in range(LEAST_SEGMENT, n + 1):
        starts = steps[: n - length + 1]
        ordered = x[starts[:, None] + steps[:length]]
        ordered.sort(axis=1)
        # Deviations from the median: upper half less lower half, far cheaper than np.median.
        half = length // 2
        cost = ordered[:, length - half :].sum(axis=1) - ordered[:, :half].sum(axis=1)
        costs[starts, starts + length] = cost
    penalty = PENALTY * np.log(n)
    best, last = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=np.int64)
    best[0] = -penalty
    for end in range(LEAST_SEGMENT, n + 1):
        total = best[:end] + costs[:end, end] + penalty
        last[end] = int(np.argmin(total))
        best[end] = total[last[end]]
    found = []
    end = n
    while last[end] > 0:
        end = int(last[end])
        found.append(end)
    return found[::-1]


def _merged(logs: NDArray[np.float64], changes: list[int]) -> list[int]:
    """Leave out changes below ``LEAST_CHANGE``, the smallest first."""
    while changes:
        middles = np.log(levels(np.exp(logs), changes))
        steps = np.abs(np.diff(middles))
        smallest = int(np.argmin(steps))
        if steps[smallest] >= np.log1p(LEAST_CHANGE):
            break
        changes = changes[:smallest] + changes[smallest + 1 :]
    return changes
