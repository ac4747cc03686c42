"""What a history must be before it is a base: one that is broken must not pass for a new one."""

import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from mokbench import moment
from mokbench.durable import as_results_error
from mokbench.errors import ResultsError
from mokbench.regression.launch import Launch
from mokbench.regression.levels import Level, order_of
from mokbench.regression.verdict import Limits
from mokbench.run_checks import unknown_method

_RESTORE = "restore it from version control"


def refuse_no_folder(path: Path) -> None:
    """Raise ResultsError for a file or a broken link where a folder of histories should be."""
    with as_results_error(path, "reading", "make it readable"):
        is_other = not path.is_dir() and (path.exists() or path.is_symlink())
    if is_other:
        what = "a link that leads nowhere" if path.is_symlink() else "a file"
        raise ResultsError(f"{path}: is {what}, a history is a folder; name that, or {_RESTORE}")


def refuse_no_launches(path: Path, others: Iterable[Path]) -> None:
    """Raise ResultsError where the file of launches is gone from beside the ``others``.

    So does a folder that may not be read: what is in it would pass for nothing.
    """
    if is_there(path):
        return
    beside = [other.name for other in others if is_there(other)]
    if beside:
        raise ResultsError(
            f"{path}: is not there, but {' and '.join(beside)} beside it: {_RESTORE}, or delete "
            "the folder to begin anew"
        )


def refuse_lost_levels(path: Path, levels: Sequence[Level], told: int) -> None:
    """Raise ResultsError where there are fewer accepted levels than were ``told`` at the last."""
    if len(levels) < told:
        raise ResultsError(
            f"{path}: has {len(levels)} accepted levels, {told} were accepted: what they say would "
            f"be judged by what was before them; {_RESTORE}"
        )


def refuse_unfounded(path: Path, levels: Iterable[Level], lines: Sequence[str]) -> None:
    """Raise ResultsError where an accepted level rests on lines that are no longer as they were."""
    recorded = set(lines)
    for level in levels:
        of = f"the level accepted on {level.when} ({level.reason})"
        lost = sorted(set(level.launches).difference(recorded))
        if lost:
            raise ResultsError(
                f"{path}: has lost {len(lost)} of the {len(level.launches)} launches of {of}, for "
                f"example {lost[0]}: {_RESTORE}"
            )
        if level.lines > len(lines) or order_of(lines[: level.lines]) != level.order:
            raise ResultsError(
                f"{path}: its first {level.lines} launches are not those, or not in the order, "
                f"that were there when {of} was: lines are only ever added; {_RESTORE}"
            )


def refuse_unknown_methods(path: Path, launches: Iterable[Launch]) -> None:
    """Raise ResultsError for a launch of a method version of which nobody here knows anything."""
    for launch in launches:
        if unknown := unknown_method(launch.method_version):
            raise ResultsError(f"{path}: launch {launch.run} {unknown}")


def refuse_unknown_series(path: Path, levels: Iterable[Level], launches: Iterable[Launch]) -> None:
    """Raise ResultsError for a level of a series of which its launches have no value."""
    by_name = {launch.launch: launch for launch in launches}
    for level in levels:
        own = [by_name[name] for name in level.launches if name in by_name]
        for cell, metric, mark in level.series:
            if not any(launch.has(cell, metric, mark) for launch in own):
                raise ResultsError(
                    f"{path}: the level accepted on {level.when} ({level.reason}) is of {cell} "
                    f"{metric}, of which its launches have no value: {_RESTORE}"
                )


def refuse_late(
    path: Path, launches: Sequence[Launch], levels: Iterable[Level], lines: Sequence[str]
) -> None:
    """Raise ResultsError for launches from before a level that came after it was accepted.

    ``lines`` are in the order of the file. What was there when a level was accepted may stand in
    any order, as checks end in any. Other configs may be measured at the same time.
    """
    for level in levels:
        own = [launch for launch in launches if launch.launch in level.launches]
        if not own:
            continue
        first = in_order_of_time(own)[0]
        when, there = moment.read(first.created), set(lines[: level.lines])
        for launch in launches:
            if launch.launch in there or launch.config != first.config:
                continue
            if moment.read(launch.created) < when:
                raise ResultsError(
                    f"{path}: launch {launch.run} of {launch.created} stands behind the level "
                    f"accepted on {level.when}, whose launches began at {when.isoformat()}: it is "
                    f"from before them; {_RESTORE}, or leave that run out"
                )


def in_order_of_time(launches: Iterable[Launch]) -> list[Launch]:
    """Sort by when they were made: a glob gives launch-10 before launch-9."""
    return sorted(launches, key=lambda one: moment.read(one.created))


def candidates_of(
    launches: Sequence[Launch],
    recorded: Collection[str],
    others: int,
    limits: Limits,
) -> list[Launch]:
    """Leave out what the history has: a glob finds earlier nights too, and they are its base.

    Where it has all of them, or a few without which the rest are too few to judge (a record that
    was cut short), all are judged, by the ``others``. ResultsError where those are too few because
    of it, or where what it has may be a night of its own, which would outvote what is new.
    """
    new = [launch for launch in launches if launch.launch not in recorded]
    old = len(launches) - len(new)
    if not old:
        return new
    some = f"{old} of the {len(launches)} runs given are"
    have = f"{some if new else f'the runs given ({old}) are all'} in the history already"
    if len(new) >= limits.least_candidate or 0 < len(new) <= len(launches) < limits.least_candidate:
        warnings.warn(f"{have} and count as base; the {len(new)} others are judged", stacklevel=3)
        return new
    if new and old >= limits.least_candidate:
        raise ResultsError(
            f"{have}, and the {len(new)} others are too few to judge, {limits.least_candidate} are "
            "needed; name only the runs of one check, or measure more"
        )
    if others < limits.least_base <= others + old:
        raise ResultsError(
            f"{have}, which has {others} others: too few to judge them by; name the runs that are "
            "new"
        )
    warnings.warn(f"{have}; all are judged, by the {others} others", stacklevel=3)
    return list(launches)


def is_there(path: Path) -> bool:
    """Whether there is anything, a broken link too. ResultsError where that cannot be told."""
    with as_results_error(path, "reading", "make it readable"):
        try:
            path.lstat()
        except FileNotFoundError:
            return False
    return True
