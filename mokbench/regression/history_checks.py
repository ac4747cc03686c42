"""What a history must be before it is a base: one that is broken must not pass for a new one."""

import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from mokbench import moment
from mokbench.durable import as_results_error
from mokbench.errors import ResultsError
from mokbench.regression.launch import Launch
from mokbench.regression.levels import Level
from mokbench.regression.verdict import Limits

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


def refuse_lost_levels(path: Path, levels: Iterable[Level], recorded: Collection[str]) -> None:
    """Raise ResultsError where an accepted level rests on launches that are no longer there."""
    for level in levels:
        lost = sorted(set(level.launches).difference(recorded))
        if lost:
            raise ResultsError(
                f"{path}: has lost {len(lost)} of the {len(level.launches)} launches of the level "
                f"accepted on {level.when} ({level.reason}), for example {lost[0]}: {_RESTORE}"
            )


def refuse_reordered(path: Path, launches: Sequence[Launch], levels: Iterable[Level]) -> None:
    """Raise ResultsError where launches from before an accepted level stand behind it, or reverse.

    A level counts from its first line on. Other configs may be measured at the same time.
    """
    place = {launch.launch: i for i, launch in enumerate(launches)}
    times = [moment.read(launch.created) for launch in launches]
    for level in levels:
        own = {place[name] for name in level.launches if name in place}
        if not own:
            continue
        first, when = min(own), min(times[i] for i in own)
        for i, (launch, time) in enumerate(zip(launches, times, strict=True)):
            if i in own or launch.config != launches[first].config:
                continue
            if (time < when) if i > first else (time > when):
                side = "behind" if i > first else "before"
                raise ResultsError(
                    f"{path}: launch {launch.run} of {launch.created} stands {side} the level "
                    f"accepted on {level.when}, whose launches began at {when.isoformat()}: lines "
                    f"must be in the order of time; {_RESTORE}, or leave that run out"
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
