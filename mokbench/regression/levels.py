"""Accepted levels of a machine's history, and what its flags say since them."""

import hashlib
from collections.abc import Iterable, Sequence

from pydantic import Field, field_validator

from mokbench import moment
from mokbench.figures import Figures
from mokbench.moment import Moment
from mokbench.record import METHOD_VERSION
from mokbench.regression.launch import HISTORY_VERSION, Launch, Mark

Series = tuple[str, str]
# A series and the mark of its values: a level of shared rows says nothing of those that gate.
Marked = tuple[str, str, Mark]


class Level(Figures):
    """A person's word that the level from ``launches`` on is the new normal of ``series``.

    ``lines`` launches were in the file when it was accepted, in the order that ``order`` hashes:
    which of them are from before the level is a matter of their time.
    """

    history_version: int = HISTORY_VERSION
    when: Moment
    reason: str
    launches: list[str] = Field(min_length=1)
    series: list[Marked] = Field(min_length=1)
    lines: int = Field(0, ge=0)
    order: str = ""

    @field_validator("reason")
    @classmethod
    def _says_something(cls, reason: str) -> str:
        if not reason.strip():
            raise ValueError("is empty: why the level was accepted must be said")
        return reason


def new_level(reason: str, launches: Sequence[Launch], series: Sequence[Series]) -> Level:
    """Make the level that ``--accept`` records, as of now."""
    return Level(
        when=moment.now(),
        reason=reason,
        launches=[launch.launch for launch in launches],
        series=[(*one, _mark(launches, one)) for one in series],
    )


def _mark(launches: Sequence[Launch], series: Series) -> Mark:
    return next(launch.mark_of(series[0]) for launch in launches if launch.has(*series))


def order_of(lines: Sequence[str]) -> str:
    """Hash of the names of launches in the order of their lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def newest_levels(levels: Iterable[Level]) -> dict[Marked, Level]:
    """Newest level of each series."""
    return {marked: level for level in levels for marked in level.series}


def counting(levels: Iterable[Level]) -> list[Level]:
    """Levels that still count for some series."""
    return list({id(level): level for level in newest_levels(levels).values()}.values())


def first_of(level: Level, position: dict[str, int]) -> int:
    """Position of the level's first launch; one that is not in the file counts as oldest."""
    return min((position.get(launch, -1) for launch in level.launches), default=-1)


def good_commit(launches: Sequence[Launch], levels: Sequence[Level]) -> str | None:
    """Newest commit none of whose launches is flagged, FASTER and accepted ones aside.

    Of this method version: another one's mokbench cannot be the base of a confirmation.
    """
    newest = newest_levels(levels)
    bad = {launch.commit for launch in launches if _slow_flags(launch, newest)}
    own = [x for x in launches if x.method_version == METHOD_VERSION]
    found = [x.commit for x in own if x.commit and x.commit not in bad]
    return found[-1] if found else None


def open_faster(launches: Iterable[Launch], levels: Sequence[Level]) -> set[Marked]:
    """Series whose newest launch is flagged FASTER and in no newer accepted level."""
    newest = newest_levels(levels)
    found: set[Marked] = set()
    for launch in launches:
        found = {marked for marked in found if not launch.has(*marked)}
        found |= {
            marked
            for marked, verdict in _flags(launch)
            if verdict == "FASTER" and not _accepted(launch, marked, newest)
        }
    return found


def was_good(
    commit: str | None,
    series: Series,
    launches: Sequence[Launch],
    levels: Sequence[Level],
    mark: Mark = "",
) -> bool:
    """Whether the launches of ``commit`` are base of ``series``: its level, none flagged."""
    marked = (*series, mark)
    newest = newest_levels(levels)
    position = {launch.launch: i for i, launch in enumerate(launches)}
    since = first_of(newest[marked], position) if marked in newest else -1
    at = [x for i, x in enumerate(launches) if x.commit == commit and i >= since]
    at = [x for x in at if x.has(*marked)]
    return bool(commit and at) and not any(marked in _slow_flags(x, newest) for x in at)


def _flags(launch: Launch) -> list[tuple[Marked, str]]:
    return [
        ((cell, metric, launch.mark_of(cell)), verdict)
        for metric, cells in launch.flags.items()
        for cell, verdict in cells.items()
    ]


def _slow_flags(launch: Launch, levels: dict[Marked, Level]) -> set[Marked]:
    """Series that were called anything but FASTER in a launch and not accepted since."""
    return {
        marked
        for marked, verdict in _flags(launch)
        if verdict != "FASTER" and not _accepted(launch, marked, levels)
    }


def _accepted(launch: Launch, marked: Marked, levels: dict[Marked, Level]) -> bool:
    return marked in levels and launch.launch in levels[marked].launches
