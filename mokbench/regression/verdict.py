"""From shifts to verdicts: what is called slower, what is called the same, and what is not known.

One number, ``alpha``, is the price of a false alarm: of a single series, and, through
Benjamini-Hochberg, of all series of a report together.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit
from scipy.stats import false_discovery_control

from mokbench.regression.shift import Floats, Shifts, median_variance
from mokbench.stats import EFFECT_FLOOR

LEAST_BASE = 5
LEAST_CANDIDATE = 3
_MOST_FURTHER = 30


class Verdict(StrEnum):
    """What a series' candidate is, against its base. Ordered from worst to best."""

    SLOWER = "SLOWER"
    FAILED = "FAILED"
    CLOCK = "CLOCK"
    UNSUPPORTED = "UNSUPPORTED"
    MISSING = "MISSING"
    AMBIGUOUS = "AMBIGUOUS"
    INSUFFICIENT = "INSUFFICIENT"
    FASTER = "FASTER"
    SAME = "SAME"


ORDER = list(Verdict)
UNSETTLED = (
    Verdict.CLOCK,
    Verdict.UNSUPPORTED,
    Verdict.MISSING,
    Verdict.AMBIGUOUS,
    Verdict.INSUFFICIENT,
)


@dataclass(frozen=True)
class Limits:
    """When a change counts. ``floor``: smallest relative change that is ever called.

    ``alpha``: one-sided false-alarm probability, of one series and (Benjamini-Hochberg) of all;
    ``confidence``: of the interval that has to lie within twice the floor for SAME.
    """

    floor: float = EFFECT_FLOOR
    alpha: float = 0.01
    confidence: float = 0.95
    least_base: int = LEAST_BASE
    least_candidate: int = LEAST_CANDIDATE

    @property
    def margin(self) -> float:
        """Relative change that SAME excludes."""
        return 2 * self.floor


@dataclass(frozen=True)
class Call:
    """Verdict on one series with what it rests on; figures are null where there are too few runs.

    ``ratio``: candidate over base with its 95 % interval; ``p`` is one-sided in the direction
    of the shift and ``adjusted`` the same after Benjamini-Hochberg; ``spread`` of one launch;
    ``cycles``: the ratio of time x SM clock, where the clock is known.
    """

    verdict: Verdict
    why: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    adjusted: float | None = None
    spread: float | None = None
    cycles: float | None = None
    base_n: int = 0
    candidate_n: int = 0

    @property
    def moved(self) -> bool:
        """Whether the candidate must not become part of the base."""
        return self.verdict in (Verdict.SLOWER, Verdict.FASTER, Verdict.CLOCK)


def decide(
    shifts: Shifts, cycles: Shifts | None, limits: Limits, *, together: bool = True
) -> list[Call]:
    """Verdict of each series; ``cycles`` are the shifts of time x SM clock, NaN where unknown.

    ``together``: all series are one report's. False judges each as if it were alone, for
    simulations of many reports at once.
    """
    known = (shifts.base_n >= limits.least_base) & (shifts.candidate_n >= limits.least_candidate)
    known &= np.isfinite(shifts.error) & (shifts.df > 0)
    slower, faster = shifts.p_above(), shifts.p_below()
    adjusted_slower = _adjusted(slower, known) if together else slower
    adjusted_faster = _adjusted(faster, known) if together else faster
    low, high = shifts.interval(limits.confidence)
    unmoved = _unmoved(shifts, cycles, limits)
    calls = []
    for i in range(len(shifts.log_ratio)):
        up = shifts.log_ratio[i] > 0
        call = Call(
            Verdict.SAME,
            "",
            ratio=_number(shifts.ratio[i]),
            low=_number(low[i]),
            high=_number(high[i]),
            p=_number((slower if up else faster)[i]),
            adjusted=_number((adjusted_slower if up else adjusted_faster)[i]),
            spread=_number(shifts.spread[i]),
            cycles=None if cycles is None else _number(cycles.ratio[i]),
            base_n=int(shifts.base_n[i]),
            candidate_n=int(shifts.candidate_n[i]),
        )
        chance = float(shifts.by_chance[i])
        verdict, why = _judge(call, bool(known[i]), bool(unmoved[i]), chance, limits)
        calls.append(replace(call, verdict=verdict, why=why))
    return calls


def _judge(
    call: Call, known: bool, still: bool, chance: float, limits: Limits
) -> tuple[Verdict, str]:
    if not known:
        return Verdict.INSUFFICIENT, _too_few(call, limits)
    ratio, p, adjusted = call.ratio or 1.0, call.p or 0.0, call.adjusted or 0.0
    low, high = call.low or 0.0, call.high or np.inf
    percent = f"{100 * (ratio - 1):+.1f} %"
    if ratio >= 1 + limits.floor or ratio <= 1 / (1 + limits.floor):
        if p > limits.alpha:
            return Verdict.AMBIGUOUS, (
                f"{percent}, but launches differ by {100 * (call.spread or 0):.1f} % anyway "
                f"(p {p:.2g}, needs {limits.alpha:g}); {_further(call, limits)}"
            )
        if adjusted > limits.alpha:
            return Verdict.AMBIGUOUS, (
                f"{percent}: p {p:.2g} would do for one series, among all that are looked at it "
                f"is {adjusted:.2g} (needs {limits.alpha:g}); more launches or --confirm decide"
            )
        if still:
            return Verdict.CLOCK, (
                f"{percent} in time, {100 * ((call.cycles or 1) - 1):+.1f} % in SM cycles: the "
                "clock moved, not the work"
            )
        if chance > limits.alpha:
            return Verdict.AMBIGUOUS, (
                f"{percent}, but base launches were there too: by chance the median of "
                f"{call.candidate_n} is, in {100 * chance:.2g} % of checks (needs "
                f"{100 * limits.alpha:g} %); more launches or --confirm decide"
            )
        verdict = Verdict.SLOWER if ratio > 1 else Verdict.FASTER
        return verdict, f"{percent}, p {p:.2g}"
    if 1 / (1 + limits.margin) < low and high < 1 + limits.margin:
        return Verdict.SAME, f"{percent}; {100 * limits.margin:g} % is excluded"
    return Verdict.AMBIGUOUS, (
        f"{percent}, but the interval ({low:.3f}-{high:.3f}) does not exclude "
        f"{100 * limits.margin:g} %: launches differ by {100 * (call.spread or 0):.1f} %"
    )


def _too_few(call: Call, limits: Limits) -> str:
    return (
        f"{call.base_n} base and {call.candidate_n} candidate launches; "
        f"needs {limits.least_base} and {limits.least_candidate}"
    )


def _further(call: Call, limits: Limits) -> str:
    """How many more candidate launches would settle a shift of this size, if it stays."""
    shift, spread = abs(np.log(call.ratio or 1.0)), call.spread or np.nan
    t = float(stdtrit(max(call.base_n - 1, 1), 1 - limits.alpha))
    for more in range(1, _MOST_FURTHER + 1):
        error = spread * np.sqrt(
            float(median_variance(call.candidate_n + more)) + 1 / max(call.base_n, 1)
        )
        if t * error <= shift:
            return f"needs about {more} more candidate launches"
    return "more candidate launches alone would not settle it: the base is too noisy or too short"


def _unmoved(shifts: Shifts, cycles: Shifts | None, limits: Limits) -> NDArray[np.bool_]:
    """Where the cycles are known and did not move the way the time did.

    A clock that is read with noise makes cycles uncertain, which is no word for the clock: they
    must also have moved by less than half of what the time did.
    """
    if cycles is None:
        return np.zeros(len(shifts.log_ratio), dtype=np.bool_)
    known = np.isfinite(cycles.ratio) & np.isfinite(cycles.error) & (cycles.df > 0)
    known &= cycles.base_n >= limits.least_base
    known &= cycles.candidate_n >= limits.least_candidate
    up = shifts.log_ratio > 0
    p = np.where(up, cycles.p_above(), cycles.p_below())
    far = np.where(up, cycles.ratio, 1 / cycles.ratio) >= 1 + limits.floor
    mostly_clock = np.where(up, 1, -1) * cycles.log_ratio < 0.5 * np.abs(shifts.log_ratio)
    return np.asarray(known & mostly_clock & ~(far & (p <= limits.alpha)))


def _adjusted(p: Floats, known: NDArray[np.bool_]) -> Floats:
    """Benjamini-Hochberg over the series that have enough launches; NaN for the others."""
    found = np.full(len(p), np.nan)
    if known.any():
        found[known] = false_discovery_control(np.clip(p[known], 0.0, 1.0))
    return found


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
