"""How far run-level values moved, and how well that is known.

The unit of replication is the launch: one run gives one value of a series, and its many iterations
only make that value precise. Tests on pooled iterations see a change in a third to a half of all
unchanged pairs (simulated in docs/regression.md). All functions take
arrays [series, launches] with NaN where a launch has no value, and work on logarithms, so that a
shift is a ratio.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtrc, stdtr, stdtrit

# Spread of a launch below which nothing is believed: clocks and allocators alone move this much.
LEAST_SPREAD = 0.0025
# 1 / the 75 % point of a normal distribution: makes the MAD a standard deviation.
MAD_SCALE = 1.4826
# Base launches farther out than this many robust deviations are a bad day of the machine, not its
# spread. Few good launches are this far out, so the spread of the rest is hardly understated.
OUTLIER = 5.0
# The MAD of fewer launches is too rough to call one of them an outlier.
LEAST_CLIPPED = 8
# More than one outlier and more than this share of the base are a way the machine is, not bad days.
MOST_CLIPPED = 0.1
# A base launch beyond this many robust deviations, and as far along as the candidate's shift within
# this share, shows that the base gets to that level by itself: the machine has two modes.
DISTINCT = 3.0
AS_FAR = 0.75

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shifts:
    """Log of candidate over base per series, its standard error and degrees of freedom.

    All arrays [series]. ``spread`` is the relative standard deviation of one launch. NaN where
    there are too few launches to know one. ``by_chance``: how often so many launches of the base
    would have their median where the candidate's is, judged by the base launches that are there.
    """

    log_ratio: Floats
    error: Floats
    df: Floats
    spread: Floats
    base_n: NDArray[np.int64]
    candidate_n: NDArray[np.int64]
    by_chance: Floats

    @property
    def ratio(self) -> Floats:
        """Candidate over base: above 1, the candidate takes more."""
        return np.asarray(np.exp(self.log_ratio))

    def p_above(self) -> Floats:
        """One-sided p-value against "the candidate takes no more than the base"."""
        return _tail(self.log_ratio, self.error, self.df)

    def p_below(self) -> Floats:
        """One-sided p-value against "the candidate takes no less than the base"."""
        return _tail(-self.log_ratio, self.error, self.df)

    def interval(self, confidence: float) -> tuple[Floats, Floats]:
        """Two-sided interval of the ratio."""
        half = self.error * _quantile(self.df, (1 + confidence) / 2)
        return np.exp(self.log_ratio - half), np.exp(self.log_ratio + half)


def against_history(base: ArrayLike, candidate: ArrayLike) -> Shifts:
    """Median of the candidate launches against a history: a robust t prediction interval.

    Base launches beyond ``OUTLIER`` robust deviations, if they are few, are left out of centre
    and spread; the candidate's value is its median, so that one bad launch of three moves nothing.
    The spread of a candidate launch is taken to be the base's. ValueError for values that are not
    positive.
    """
    x, y = _logs(base), _logs(candidate)
    middle = _nanmedian(x)[:, None]
    scale = np.maximum(MAD_SCALE * _nanmedian(np.abs(x - middle))[:, None], LEAST_SPREAD)
    far = np.where((_count(x) >= LEAST_CLIPPED)[:, None], np.abs(x - middle) / scale, 0.0)
    out = far > OUTLIER
    few = out.sum(axis=1) <= np.maximum(1, MOST_CLIPPED * _count(x))
    kept = np.where(out & few[:, None], np.nan, x)
    n, k = _count(kept), _count(y)
    centre, deviation = _moments(kept)
    spread = np.maximum(deviation, LEAST_SPREAD)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = spread * np.sqrt(median_variance(k) + 1.0 / n)
    log_ratio = _nanmedian(y) - centre
    chance = _by_chance(np.where(far > DISTINCT, x - middle, np.nan), log_ratio, _count(x), k)
    return Shifts(log_ratio, error, np.maximum(n - 1.0, 0.0), spread, _count(x), k, chance)


def between(base: ArrayLike, candidate: ArrayLike, launch_noise: float | None = None) -> Shifts:
    """Means of two groups of launches with one pooled spread: Student's two-sample t.

    ``launch_noise``, a relative standard deviation, stands in where it is larger than the pooled
    spread or there is none (one launch each); it is then taken as known.
    """
    x, y = _logs(base), _logs(candidate)
    n, k = _count(x), _count(y)
    (mean_x, sd_x), (mean_y, sd_y) = _moments(x), _moments(y)
    df = np.maximum(n + k - 2.0, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        squares = np.where(n > 1, sd_x**2 * (n - 1), 0.0) + np.where(k > 1, sd_y**2 * (k - 1), 0.0)
        spread = np.where(df > 0, np.maximum(np.sqrt(squares / df), LEAST_SPREAD), np.nan)
        if launch_noise is not None:
            told = ~(spread > launch_noise)
            spread = np.where(told, launch_noise, spread)
            df = np.where(told, np.where((n > 0) & (k > 0), 1e6, 0.0), df)
        error = spread * np.sqrt(1.0 / n + 1.0 / k)
    return Shifts(mean_y - mean_x, error, df, spread, n, k, np.zeros(len(n)))


def median_variance(k: NDArray[np.int64] | int) -> Floats:
    """Variance of the median of ``k`` standard normal values.

    pi / (2 (k + pi/2 - 1)): exact for 1 and for many, 2 % low at 3 and 5, high for even numbers.
    """
    return np.asarray(np.pi / (2.0 * (np.asarray(k, dtype=np.float64) + np.pi / 2.0 - 1.0)))


def _by_chance(
    outliers: Floats, log_ratio: Floats, n: NDArray[np.int64], k: NDArray[np.int64]
) -> Floats:
    """Chance that half of ``k`` launches are where base outliers and the candidate's median are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        along = outliers / log_ratio[:, None]
    share = ((along >= AS_FAR) & (along <= 1 / AS_FAR)).sum(axis=1) / np.maximum(n, 1)
    return np.asarray(np.where(k > 0, bdtrc((k + 1) // 2 - 1, np.maximum(k, 1), share), 0.0))


def _tail(shift: Floats, error: Floats, df: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(df > 0, stdtr(np.maximum(df, 1e-9), -shift / error), np.nan))


def _quantile(df: Floats, share: float) -> Floats:
    return np.asarray(np.where(df > 0, stdtrit(np.maximum(df, 1e-9), share), np.nan))


def _logs(values: ArrayLike) -> Floats:
    array = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if np.any(array <= 0) or np.any(np.isinf(array)):
        raise ValueError("a run-level value must be a positive, finite number")
    return np.asarray(np.log(array))


def _count(values: Floats) -> NDArray[np.int64]:
    return np.asarray(np.count_nonzero(~np.isnan(values), axis=1))


def _nanmedian(values: Floats) -> Floats:
    """Median of each row without its NaN; NaN for a row of nothing else (NaN sorts last)."""
    ordered, n = np.sort(values, axis=1), _count(values)
    if ordered.shape[1] == 0:
        return np.full(len(ordered), np.nan)
    rows, last = np.arange(len(ordered)), ordered.shape[1] - 1
    low = ordered[rows, np.clip((n - 1) // 2, 0, last)]
    return np.asarray((low + ordered[rows, np.clip(n // 2, 0, last)]) / 2.0)


def _moments(values: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation (ddof 1) of each row without its NaN; NaN where undefined."""
    n = _count(values).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(n > 0, np.nansum(values, axis=1) / n, np.nan)
        squares = np.nansum((values - mean[:, None]) ** 2, axis=1)
        return mean, np.where(n > 1, np.sqrt(squares / (n - 1)), np.nan)
