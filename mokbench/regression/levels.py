"""Accepted levels of a machine's history, and what its flags say since them."""

from collections.abc import Iterable, Sequence

from mokbench import moment
from mokbench.figures import Figures
from mokbench.moment import Moment
from mokbench.regression.launch import HISTORY_VERSION, Launch

Series = tuple[str, str]


class Level(Figures):
    """A person's word that the level from ``launches`` on is the new normal of ``series``."""

    history_version: int = HISTORY_VERSION
    when: Moment
    reason: str
    launches: list[str]
    series: list[Series]


def new_level(reason: str, launches: Sequence[Launch], series: Sequence[Series]) -> Level:
    """Make the level that ``--accept`` records, as of now."""
    return Level(
        when=moment.now(),
        reason=reason,
        launches=[launch.launch for launch in launches],
        series=list(series),
    )


def newest_levels(levels: Iterable[Level]) -> dict[Series, Level]:
    """Newest level of each series."""
    return {(cell, metric): level for level in levels for cell, metric in level.series}


def counting(levels: Iterable[Level]) -> list[Level]:
    """Levels that still count for some series."""
    return list({id(level): level for level in newest_levels(levels).values()}.values())


def first_of(level: Level, position: dict[str, int]) -> int:
    """Position of the level's first launch; one that is not in the file counts as oldest."""
    return min((position.get(launch, -1) for launch in level.launches), default=-1)


def good_commit(launches: Sequence[Launch], levels: Sequence[Level]) -> str | None:
    """Newest commit none of whose launches is flagged, FASTER and accepted ones aside."""
    newest = newest_levels(levels)
    bad = {launch.commit for launch in launches if _slow_flags(launch, newest)}
    found = [x.commit for x in launches if x.commit and x.commit not in bad]
    return found[-1] if found else None


def open_faster(launches: Iterable[Launch], levels: Sequence[Level]) -> set[Series]:
    """Series whose newest launch is flagged FASTER and in no newer accepted level."""
    newest = newest_levels(levels)
    found: set[Series] = set()
    for launch in launches:
        found = {series for series in found if not launch.has(*series)}
        found |= {
            (cell, metric)
            for metric, cells in launch.flags.items()
            for cell, verdict in cells.items()
            if verdict == "FASTER" and not _accepted(launch, (cell, metric), newest)
        }
    return found


def was_good(
    commit: str | None, series: Series, launches: Sequence[Launch], levels: Sequence[Level]
) -> bool:
    """Whether the launches of ``commit`` are base of ``series``: its level, none flagged."""
    newest = newest_levels(levels)
    position = {launch.launch: i for i, launch in enumerate(launches)}
    since = first_of(newest[series], position) if series in newest else -1
    at = [x for i, x in enumerate(launches) if x.commit == commit and i >= since]
    at = [x for x in at if x.has(*series)]
    return bool(commit and at) and not any(series in _slow_flags(x, newest) for x in at)


def _slow_flags(launch: Launch, levels: dict[Series, Level]) -> set[Series]:
    """Series that were called anything but FASTER in a launch and not accepted since."""
    return {
        (cell, metric)
        for metric, cells in launch.flags.items()
        for cell, verdict in cells.items()
        if verdict != "FASTER" and not _accepted(launch, (cell, metric), levels)
    }


def _accepted(launch: Launch, series: Series, levels: dict[Series, Level]) -> bool:
    return series in levels and launch.launch in levels[series].launches
