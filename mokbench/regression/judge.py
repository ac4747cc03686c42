"""Every series of some candidate launches judged against a history, or two sides against another.

Gating series and the others (shared GPU, oversubscribed) are families of their own: what cannot
fail a build must not make it harder for the rest to be seen.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mokbench.regression.history import History, base_of
from mokbench.regression.history_lines import WINDOW
from mokbench.regression.launch import (
    MARKS,
    NO_GATE,
    Launch,
    Readings,
    not_comparable,
)
from mokbench.regression.levels import Series
from mokbench.regression.shift import Floats, against_history, between
from mokbench.regression.verdict import ORDER, Call, Limits, Verdict, decide


@dataclass(frozen=True)
class Judged:
    """One series with its call. ``gates``: whether it may fail a build; ``mark`` says why not.

    ``base_value`` and ``value`` are medians over the launches, in the metric's unit. ``again``: a
    suspect that was measured again; ``cleared``: and is the same as a base that was good.
    """

    series: Series
    call: Call
    mark: str = ""
    base_value: float | None = None
    value: float | None = None
    again: bool = False
    cleared: bool = False

    @property
    def gates(self) -> bool:
        """Whether the series may fail a build: a cell that fails does, wherever it ran."""
        return self.mark not in NO_GATE or self.call.verdict is Verdict.FAILED

    @property
    def name(self) -> str:
        """Cell and metric, as people read it."""
        return f"{self.series[0]} {self.series[1]}"

    @property
    def words(self) -> str:
        """Why, and the mark that every mention of such a row carries."""
        return self.call.why + (f" [{MARKS[self.mark]}]" if self.mark else "")


def judge_history(
    history: History, candidates: Sequence[Launch], metrics: Sequence[str], limits: Limits
) -> list[Judged]:
    """Judge candidates (one machine and method version) against a history, worst first."""
    series, digests, marks = _series(candidates, metrics)
    base = base_of(
        history,
        series,
        digests,
        method_version=candidates[0].method_version,
        leave_out=[launch.launch for launch in candidates],
    )
    found = _side(candidates, series, digests)
    calls = _calls(base, found, marks, limits, two_sided=False, launch_noise=None)
    judged = [
        Judged(one, call, mark, _median(base.values[i]), _median(found.values[i]))
        for i, (one, call, mark) in enumerate(zip(series, calls, marks, strict=True))
    ]
    seen = _seen(history.launches)
    known = {cell for launch in history.launches for cell in launch.ids}
    judged = [_new(one, digest, seen, known) for one, digest in zip(judged, digests, strict=True)]
    failed = Counter(
        cell
        for one in candidates
        for cell, how in zip(one.ids, one.status, strict=True)
        if how == "failed"
    )
    judged = [_failing(one, failed[one.series[0]], len(candidates)) for one in judged]
    return worst_first(judged + _lost(history, candidates, metrics, set(series)))


def judge_sides(
    a: Sequence[Launch],
    b: Sequence[Launch],
    metrics: Sequence[str],
    limits: Limits,
    launch_noise: float | None = None,
) -> list[Judged]:
    """Judge side B against side A, cell by cell, worst first; both sides may be few launches."""
    series, digests, marks = _series(b, metrics)
    base, found = _side(a, series, digests), _side(b, series, digests)
    calls = _calls(base, found, marks, limits, two_sided=True, launch_noise=launch_noise)
    judged = [
        Judged(one, call, mark, _median(base.values[i]), _median(found.values[i]))
        for i, (one, call, mark) in enumerate(zip(series, calls, marks, strict=True))
    ]
    seen = _seen(a)
    judged = [
        _with_why(one, why)
        if one.call.base_n == 0
        and (why := not_comparable(digest, seen.get(one.series[0], set()), "A"))
        else one
        for one, digest in zip(judged, digests, strict=True)
        if one.call.base_n or one.series[0] in seen
    ]
    return worst_first(judged)


def worst_first(judged: Sequence[Judged]) -> list[Judged]:
    """Order by verdict, those that gate first, then by the size of the change."""
    return sorted(
        judged,
        key=lambda one: (
            ORDER.index(one.call.verdict),
            not one.gates,
            -(one.call.ratio or 0.0),
            one.series,
        ),
    )


def _calls(
    base: Readings,
    found: Readings,
    marks: Sequence[str],
    limits: Limits,
    *,
    two_sided: bool,
    launch_noise: float | None,
) -> list[Call]:
    calls: list[Call | None] = [None] * len(marks)
    gating = np.array([mark not in NO_GATE for mark in marks], dtype=np.bool_)
    for family in (gating, ~gating):
        at = np.flatnonzero(family)
        if not at.size:
            continue
        a, b = base.values[at], found.values[at]
        cycles_a, cycles_b = a * base.clock_mhz[at], b * found.clock_mhz[at]
        if two_sided:
            shifts = between(a, b, launch_noise)
            moved = between(cycles_a, cycles_b, launch_noise)
        else:
            shifts, moved = against_history(a, b), against_history(cycles_a, cycles_b)
        for i, call in zip(at, decide(shifts, moved, limits), strict=True):
            calls[i] = call
    return [call for call in calls if call is not None]


def _series(
    launches: Sequence[Launch], metrics: Sequence[str]
) -> tuple[list[Series], list[str], list[str]]:
    """Series that some launch has a value of, each with what it measured and its mark."""
    found: dict[Series, tuple[str, str]] = {}
    for launch in launches:
        for metric in metrics:
            for i, value in enumerate(launch.values.get(metric, [])):
                if value is not None:
                    told = (launch.digests[i], launch.marks[i])
                    found.setdefault((launch.ids[i], metric), told)
    return list(found), [digest for digest, _ in found.values()], [m for _, m in found.values()]


def _side(launches: Sequence[Launch], series: Sequence[Series], digests: Sequence[str]) -> Readings:
    found = Readings.empty(len(series), len(launches))
    for j, launch in enumerate(launches):
        for i, (cell, metric) in enumerate(series):
            reading = launch.reading(cell, metric, digests[i])
            if reading is not None:
                found.put(i, j, reading)
    return found


def _seen(launches: Sequence[Launch]) -> dict[str, set[str]]:
    """What each id was in these launches, where it was measured."""
    found: dict[str, set[str]] = {}
    for launch in launches:
        for cell, digest, status in zip(launch.ids, launch.digests, launch.status, strict=True):
            if status == "ok":
                found.setdefault(cell, set()).add(digest)
    return found


def _new(one: Judged, digest: str, seen: dict[str, set[str]], known: set[str]) -> Judged:
    """Say why there is no base: a new id, one that only failed, or another thing under it."""
    if one.call.base_n or one.call.verdict is not Verdict.INSUFFICIENT:
        return one
    cell = one.series[0]
    if cell not in known:
        why = "new in the history"
    elif cell not in seen:
        why = "failed or unsupported whenever the history has it"
    elif other := not_comparable(digest, seen[cell], "the history"):
        why = other
    else:
        why = "the history has no unflagged value of it since its level"
    return _with_why(one, f"{one.call.why} ({why})")


def _failing(one: Judged, failed: int, launches: int) -> Judged:
    """Call a cell that failed in a candidate FAILED; slower in the others is worse and stays."""
    if not failed or (one.call.verdict is Verdict.SLOWER and one.gates):
        return one
    why = f"failed in {failed} of {launches} candidates; the others: {one.call.why}"
    return replace(one, call=replace(one.call, verdict=Verdict.FAILED, why=why))


def _lost(
    history: History, candidates: Sequence[Launch], metrics: Sequence[str], judged: set[Series]
) -> list[Judged]:
    """Series that the config's last ``WINDOW`` launches measured and no candidate did.

    One launch is too few to look at: the first that is recorded without a cell would forget it.
    """
    own = {launch.launch for launch in candidates}
    version = candidates[0].method_version
    configs = {launch.config for launch in candidates}
    before = [
        launch
        for launch in history.launches
        if launch.launch not in own
        and launch.method_version == version
        and launch.config in configs
    ][-WINDOW:]
    marks = {
        (cell, metric): launch.marks[i]
        for launch in before
        for metric, column in launch.values.items()
        if metric in metrics
        for i, cell in enumerate(launch.ids)
        if column[i] is not None
    }
    status = _worst_status(candidates)
    lost = {
        series: _gone(series, mark, status.get(series[0]))
        for series, mark in marks.items()
        if series not in judged
    }
    told = {cell for cell, _ in [*judged, *lost]}
    for cell, how in status.items():
        if how == "failed" and cell not in told:
            lost[cell, metrics[0]] = _gone((cell, metrics[0]), "", how)
    return list(lost.values())


def _worst_status(launches: Sequence[Launch]) -> dict[str, str]:
    """How each cell ended that was not ok everywhere: failed wherever it failed once."""
    found: dict[str, str] = {}
    for launch in launches:
        for cell, how in zip(launch.ids, launch.status, strict=True):
            if how != "ok" and found.get(cell) != "failed":
                found[cell] = how
    return found


def _gone(series: Series, mark: str, status: str | None) -> Judged:
    kinds = {"failed": Verdict.FAILED, "unsupported": Verdict.UNSUPPORTED}
    verdict = kinds.get(status or "", Verdict.MISSING)
    why = {
        Verdict.FAILED: "failed; mokbench report has the reason",
        Verdict.UNSUPPORTED: "was measured before and is now unsupported",
        Verdict.MISSING: "was measured before and is in no candidate run",
    }[verdict]
    return Judged(series, Call(verdict, why), mark)


def _with_why(one: Judged, why: str) -> Judged:
    return replace(one, call=replace(one.call, why=why))


def _median(values: Floats) -> float | None:
    there = values[~np.isnan(values)]
    return float(np.median(there)) if there.size else None
