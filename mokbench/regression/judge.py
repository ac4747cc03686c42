"""Every series of some candidate launches judged against a history, or two sides against another.

Gating series and the others (shared GPU, oversubscribed) are families of their own: what cannot
fail a build must not make it harder for the rest to be seen.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mokbench.regression.agreement import not_comparable, refuse_disagreeing
from mokbench.regression.history import History, base_of
from mokbench.regression.history_lines import WINDOW
from mokbench.regression.launch import MARKS, NO_GATE, Launch, Mark, Measured, Readings
from mokbench.regression.levels import Series
from mokbench.regression.shift import Floats, against_history, between
from mokbench.regression.verdict import ORDER, Call, Limits, Verdict, decide


@dataclass(frozen=True)
class Judged:
    """One series with its call. ``gates``: whether it may fail a build; ``mark`` says why not.

    ``base_value`` and ``value`` are medians over the launches, in the metric's unit. ``again``: a
    suspect that was measured again; ``cleared``: and is the same as a base that was good.
    ``failed``: the cell failed in a candidate, whatever is found out about the others' times.
    """

    series: Series
    call: Call
    mark: Mark = ""
    base_value: float | None = None
    value: float | None = None
    again: bool = False
    cleared: bool = False
    failed: bool = False

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
    """Judge candidates (one machine and method version) against a history, worst first.

    ResultsError for candidates that did not measure the same.
    """
    series, measured = _series(candidates, metrics)
    base = base_of(
        history,
        series,
        measured,
        method_version=candidates[0].method_version,
        leave_out=[launch.launch for launch in candidates],
    )
    found = _side(candidates, series, measured)
    calls = _calls(base, found, measured, limits, two_sided=False, launch_noise=None)
    judged = _judged(series, calls, measured, base, found)
    seen = _seen(history.launches)
    known = {cell for launch in history.launches for cell in launch.ids}
    judged = [_new(one, what, seen, known) for one, what in zip(judged, measured, strict=True)]
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
    """Judge side B against side A, cell by cell, worst first; both sides may be few launches.

    ResultsError for launches of one side that did not measure the same.
    """
    refuse_disagreeing(a)
    series, measured = _series(b, metrics)
    base, found = _side(a, series, measured), _side(b, series, measured)
    calls = _calls(base, found, measured, limits, two_sided=True, launch_noise=launch_noise)
    judged = _judged(series, calls, measured, base, found)
    seen = _seen(a)
    judged = [
        _with_why(one, why)
        if one.call.base_n == 0
        and (why := not_comparable(what, seen.get(one.series[0], set()), "A"))
        else one
        for one, what in zip(judged, measured, strict=True)
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
    measured: Sequence[Measured],
    limits: Limits,
    *,
    two_sided: bool,
    launch_noise: float | None,
) -> list[Call]:
    calls: list[Call | None] = [None] * len(measured)
    gating = np.array([mark not in NO_GATE for _, mark in measured], dtype=np.bool_)
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


def _judged(
    series: Sequence[Series],
    calls: Sequence[Call],
    measured: Sequence[Measured],
    base: Readings,
    found: Readings,
) -> list[Judged]:
    return [
        Judged(one, call, mark, _median(base.values[i]), _median(found.values[i]))
        for i, (one, call, (_, mark)) in enumerate(zip(series, calls, measured, strict=True))
    ]


def _series(
    launches: Sequence[Launch], metrics: Sequence[str]
) -> tuple[list[Series], list[Measured]]:
    """Series that some launch has a value of, each with what all of them measured."""
    refuse_disagreeing(launches)
    found: dict[Series, Measured] = {}
    for launch in launches:
        for metric in metrics:
            for i, value in enumerate(launch.values.get(metric, [])):
                if value is not None:
                    found[launch.ids[i], metric] = launch.digests[i], launch.marks[i]
    return list(found), list(found.values())


def _side(
    launches: Sequence[Launch], series: Sequence[Series], measured: Sequence[Measured]
) -> Readings:
    found = Readings.empty(len(series), len(launches))
    for j, launch in enumerate(launches):
        for i, (cell, metric) in enumerate(series):
            reading = launch.reading(cell, metric, *measured[i])
            if reading is not None:
                found.put(i, j, reading)
    return found


def _seen(launches: Sequence[Launch]) -> dict[str, set[Measured]]:
    """What each id was in these launches, where it was measured."""
    found: dict[str, set[Measured]] = {}
    for launch in launches:
        for cell, measured in launch.measured().items():
            found.setdefault(cell, set()).add(measured)
    return found


def _new(
    one: Judged, measured: Measured, seen: dict[str, set[Measured]], known: set[str]
) -> Judged:
    """Say why there is no base: a new id, one that only failed, or another thing under it."""
    if one.call.base_n or one.call.verdict is not Verdict.INSUFFICIENT:
        return one
    cell = one.series[0]
    if cell not in known:
        why = "new in the history"
    elif cell not in seen:
        why = "failed or unsupported whenever the history has it"
    elif other := not_comparable(measured, seen[cell], "the history"):
        why = other
    else:
        why = "the history has no unflagged value of it since its level"
    return _with_why(one, f"{one.call.why} ({why})")


def _failing(one: Judged, failed: int, launches: int) -> Judged:
    if not failed:
        return one
    why = f"failed in {failed} of {launches} candidates; the others: {one.call.why}"
    return as_failed(replace(_with_why(one, why), failed=True))


def as_failed(one: Judged) -> Judged:
    """Call a cell that failed in a candidate FAILED; slower in the others is worse and stays."""
    if one.failed and (one.call.verdict is not Verdict.SLOWER or one.mark in NO_GATE):
        return replace(one, call=replace(one.call, verdict=Verdict.FAILED))
    return one


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
    marks: dict[Series, Mark] = {}
    for launch in before:
        for metric in metrics:
            for i, value in enumerate(launch.values.get(metric, [])):
                # One launch on a shared GPU takes no series out of the gate.
                known = marks.get((launch.ids[i], metric), NO_GATE[0])
                if value is not None and known in NO_GATE:
                    marks[launch.ids[i], metric] = launch.marks[i]
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


def _gone(series: Series, mark: Mark, status: str | None) -> Judged:
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
