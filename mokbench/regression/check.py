"""The CI gate: candidates judged against a history, confirmed, recorded; and its exit code."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mokbench.errors import ConfigError
from mokbench.machine import Machine
from mokbench.regression.confirm import Confirmation, confirm, refuse_unusable, suspects
from mokbench.regression.history import History
from mokbench.regression.history_checks import candidates_of
from mokbench.regression.judge import Judged, judge_history
from mokbench.regression.launch import METRICS, Launch, one_kind, refuse_copies
from mokbench.regression.levels import Marked, Series, new_level, open_faster
from mokbench.regression.verdict import ORDER, UNSETTLED, Limits, Verdict
from mokbench.results import RunFolder
from mokbench.run_checks import (
    refuse_future,
    refuse_stale_key,
    refuse_torn,
    refuse_unfinished,
    refuse_unknown_method,
)

REGRESSION, FAILED, UNDECIDED, DONE = 1, 3, 4, 0


@dataclass(frozen=True)
class Checked:
    """What a check found. ``judged`` is worst first; ``commits`` is "last base..candidate"."""

    judged: list[Judged]
    history: History
    machine: Machine
    launches: list[Launch]
    limits: Limits
    commits: str | None = None
    confirmed: bool = False
    recorded: int = 0
    accepted: list[str] = field(default_factory=list)
    # Launches that the accepted level lacks to be a base: until then nothing of it is judged.
    level_lacks: int = 0
    # Series that are or last were FASTER and nobody accepted: a slowdown from there is SAME.
    open_levels: int = 0

    def exit_code(self, strict: bool) -> int:
        """1 a regression, 3 a failed cell, 4 (strict) something is not settled, else 0."""
        gating = {one.call.verdict for one in self.judged if one.gates}
        if Verdict.SLOWER in gating and not self.accepted:
            return REGRESSION
        if Verdict.FAILED in gating or any(one.failed for one in self.judged):
            return FAILED
        if strict and (not gating or gating.intersection(UNSETTLED)):
            return UNDECIDED
        return DONE

    def tally(self) -> dict[Verdict, int]:
        """Series of each verdict that gate, worst first, none left out that occurs."""
        counts = Counter(one.call.verdict for one in self.judged if one.gates)
        return {verdict: counts[verdict] for verdict in ORDER if counts[verdict]}


def check(
    runs: Sequence[RunFolder],
    root: Path,
    *,
    metrics: Sequence[str] = METRICS[:1],
    limits: Limits | None = None,
    commit: str | None = None,
    confirmation: Confirmation | None = None,
) -> Checked:
    """Judge finished runs of one machine and method version against the history in ``root``.

    Raises ResultsError for runs or histories that are broken, unfinished or of several machines,
    ConfigError for a confirmation that could not be made, suspects or not.
    """
    limits = limits or Limits()
    if confirmation is not None:
        refuse_unusable(confirmation)
    launches = _launches(runs, commit)
    history = History.of_machine(root, runs[0].meta.machine)
    given = [launch.launch for launch in launches]
    version = launches[0].method_version
    others = [x for x in history.launches if x.launch not in given and x.method_version == version]
    launches = candidates_of(launches, history.recorded, len(others), limits)
    judging = {launch.launch for launch in launches}
    _warn_of_mixed_code([run for run, name in zip(runs, given, strict=True) if name in judging])
    before = [launch for launch in history.launches if launch.launch not in judging]
    faster = open_faster(before, history.levels)
    judged = [_advised(one, faster) for one in judge_history(history, launches, metrics, limits)]
    if confirmation is not None:
        judged = confirm(judged, confirmation, limits, metrics, history, launches)
    last = history.last_commit(judging)
    return Checked(
        judged=judged,
        history=history,
        machine=runs[0].meta.machine,
        launches=launches,
        limits=limits,
        commits=f"{last or '(none recorded)'}..{commit}" if commit else None,
        confirmed=confirmation is not None,
        open_levels=sum(
            one.gates and (one.call.verdict is Verdict.FASTER or (*one.series, one.mark) in faster)
            for one in judged
        ),
    )


def _launches(runs: Sequence[RunFolder], commit: str | None) -> list[Launch]:
    """Launches of whole runs, no two of which are one. ResultsError for others."""
    for run in runs:
        refuse_unknown_method(run)
        refuse_unfinished(run)
        refuse_torn(run)
        refuse_future(run)
        refuse_stale_key(run.path / "run.json", run.meta.machine)
    # A folder keeps the rows it has read, and three times 10 000 of them are half a GiB.
    launches = [Launch.of(RunFolder.open(run.path), commit) for run in runs]
    one_kind(launches)
    refuse_copies(launches)
    return launches


def _warn_of_mixed_code(runs: Sequence[RunFolder]) -> None:
    """The median over launches of two commits is neither's, and may hide the slower one."""
    found = dict.fromkeys("; then ".join(map(str, run.meta.code)) for run in runs if run.meta.code)
    if len(found) > 1:
        warnings.warn(
            f"one verdict is made of runs of {len(found)} states of the code "
            f"({', '.join(found)}): check those of each apart",
            stacklevel=3,
        )


def _advised(one: Judged, faster: set[Marked]) -> Judged:
    """Say what a level that nobody accepted leaves open."""
    if one.call.verdict is Verdict.FASTER:
        note = "--accept it, or a slowdown back from here passes"
    elif (*one.series, one.mark) in faster:
        note = "the last launches were FASTER and not accepted: it may be slower than they were"
    else:
        return one
    return replace(one, call=replace(one.call, why=f"{one.call.why}; {note}"))


def record(checked: Checked) -> Checked:
    """Append the runs to the history, flagged where a series moved: flagged values are no base.

    Nor are suspects that no confirmation cleared: as base they would hide, from the next check on,
    the slowdown that only needed more launches or another base.
    """
    launches = _flagged(checked)
    _warn_of_lost_flags(launches, checked.history)
    return replace(checked, recorded=checked.history.record(launches, checked.machine))


def _flagged(checked: Checked) -> list[Launch]:
    open_ = suspects(checked.judged, checked.limits)
    moved = {
        one.series: str(one.call.verdict)
        for one in [*(one for one in checked.judged if _no_base(one)), *open_]
    }
    return [
        launch.model_copy(update={"flags": _flags(moved, launch)}) for launch in checked.launches
    ]


def _warn_of_lost_flags(launches: Sequence[Launch], history: History) -> None:
    """A line is never rewritten: what an earlier check did not call stays base."""
    there = {launch.launch: launch.flags for launch in history.launches}
    lost = sorted(
        {
            f"{cell} {metric}"
            for launch in launches
            if launch.launch in there
            for metric, cells in launch.flags.items()
            for cell in set(cells).difference(there[launch.launch].get(metric, ()))
        }
    )
    if lost:
        warnings.warn(
            f"{history.folder}: the runs were recorded before, and {len(lost)} series that moved "
            f"stay base in them, for example {lost[0]}: give every --metric to one check",
            stacklevel=3,
        )


def _no_base(one: Judged) -> bool:
    """A cell that failed in one launch may have been broken in the next one too."""
    return one.call.moved or one.call.verdict is Verdict.FAILED


def accept(checked: Checked, reason: str) -> Checked:
    """Record the runs and make their level the new normal of every series that moved.

    ConfigError without a reason, or where nothing moved.
    """
    moved = [one for one in checked.judged if one.call.moved]
    if not reason.strip():
        raise ConfigError(["--accept: needs a reason, which the charts then show"])
    if not moved:
        raise ConfigError(["--accept: no series is SLOWER, FASTER or CLOCK: nothing to accept"])
    # Flags that come too late are no loss here: a new level begins with these launches.
    recorded = checked.history.record(_flagged(checked), checked.machine)
    checked = replace(checked, recorded=recorded)
    checked.history.accept(new_level(reason, checked.launches, [one.series for one in moved]))
    fewest = min(one.call.candidate_n for one in moved)
    return replace(
        checked,
        accepted=[one.name for one in moved],
        level_lacks=max(0, checked.limits.least_base - fewest),
    )


def _flags(moved: dict[Series, str], launch: Launch) -> dict[str, dict[str, str]]:
    """Verdicts of the moved series that this launch has a value of, by metric and cell."""
    flags: dict[str, dict[str, str]] = {}
    for metric, column in launch.values.items():
        for cell, value in zip(launch.ids, column, strict=True):
            if value is not None and (cell, metric) in moved:
                flags.setdefault(metric, {})[cell] = moved[cell, metric]
    return flags
