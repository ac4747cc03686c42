"""A history's series as reports show them: values, change points, accepted levels, verdicts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mokbench.regression import change_points
from mokbench.regression.history import History
from mokbench.regression.history_folders import machine_name
from mokbench.regression.launch import MARKS, METRICS, Launch, Measured
from mokbench.regression.levels import Series
from mokbench.report import units
from mokbench.report.tables import Column, Table

# A longer table is for machines: --format json has all series.
MAX_TABLE = 500


@dataclass(frozen=True)
class Change:
    """A new level: at which point of the series it begins, and by which factor."""

    at: int
    ratio: float
    when: str
    commits: str | None


@dataclass(frozen=True)
class Accepted:
    """Where a person accepted a new level, and why."""

    at: int
    reason: str


@dataclass(frozen=True)
class Trend:
    """One series: a point a launch, oldest first.

    ``verdicts[i]`` is what a check called the point, empty for one that did not move;
    ``levels`` are the medians between ``changes``.
    """

    series: Series
    mark: str
    created: tuple[str, ...]
    commits: tuple[str | None, ...]
    values: tuple[float, ...]
    verdicts: tuple[str, ...]
    changes: tuple[Change, ...]
    levels: tuple[float, ...]
    accepted: tuple[Accepted, ...]

    @property
    def unit(self) -> str:
        """``us``, or ``bytes``, from the metric's name."""
        return self.series[1].rpartition("_")[2]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**asdict(self), "series": list(self.series), "mark": MARKS.get(self.mark)}


def trends(history: History, metrics: Sequence[str] = METRICS) -> list[Trend]:
    """All series of the newest method version, those with a late change or verdict first.

    A series goes back as far as its cell measured the same: other options, another routing or
    another mark under the same id are another series and left out.
    """
    if not history.launches:
        return []
    version = history.launches[-1].method_version
    launches = [one for one in history.launches if one.method_version == version]
    newest: dict[str, Measured] = {}
    for launch in launches:
        newest |= launch.measured()
    points: dict[Series, list[tuple[Launch, int]]] = {}
    for launch in launches:
        for i, cell in enumerate(launch.ids):
            if (launch.digests[i], launch.marks[i]) != newest.get(cell):
                continue
            for metric in metrics:
                column = launch.values.get(metric)
                if column is not None and column[i] is not None:
                    points.setdefault((cell, metric), []).append((launch, i))
    found = [_trend(series, own, history) for series, own in points.items()]
    return sorted(found, key=_urgency)


def _trend(series: Series, points: Sequence[tuple[Launch, int]], history: History) -> Trend:
    cell, metric = series
    values = [value for launch, i in points if (value := launch.values[metric][i]) is not None]
    at = change_points.find(values)
    levels = change_points.levels(values, at)
    launches = [launch for launch, _ in points]
    place = {launch.launch: i for i, launch in enumerate(launches)}
    changes = [
        Change(
            point,
            levels[i + 1] / levels[i],
            launches[point].created,
            _commits(launches[point - 1], launches[point]),
        )
        for i, point in enumerate(at)
    ]
    mark = points[-1][0].mark_of(cell)
    accepted = [
        Accepted(min(known), level.reason)
        for level in history.levels
        if (*series, mark) in level.series
        and (known := [place[x] for x in level.launches if x in place])
    ]
    return Trend(
        series=series,
        mark=mark,
        created=tuple(launch.created for launch in launches),
        commits=tuple(launch.commit for launch in launches),
        values=tuple(values),
        verdicts=tuple(launch.flags.get(metric, {}).get(cell, "") for launch in launches),
        changes=tuple(changes),
        levels=tuple(levels),
        accepted=tuple(accepted),
    )


def _commits(before: Launch, after: Launch) -> str | None:
    if before.commit is None or after.commit is None:
        return None
    return f"{before.commit[:10]}..{after.commit[:10]}"


def _urgency(trend: Trend) -> tuple[object, ...]:
    """Slower ones before faster ones, later changes before earlier ones, quiet ones last."""
    last = trend.changes[-1] if trend.changes else None
    flagged = trend.verdicts[-1] if trend.verdicts else ""
    return (
        flagged != "SLOWER",
        last is None,
        last is not None and last.ratio < 1,
        -(last.at if last else 0),
        not any(trend.verdicts),
        trend.series,
    )


def table(trends_: Sequence[Trend], title: str) -> Table:
    """Build the table of a machine's series, as long as people read."""
    columns = (
        Column("cell", right=False),
        Column("metric", right=False),
        Column("launches"),
        Column("last"),
        Column("level"),
        Column("last change"),
        Column("since", right=False),
        Column("verdict", right=False),
        Column("accepted", right=False, expendable=1),
        Column("mark", right=False, expendable=1),
    )
    more = len(trends_) - MAX_TABLE
    return Table(
        title,
        columns,
        tuple(map(_line, trends_[:MAX_TABLE])),
        sentences=(f"{more} more series: --format json has them.",) * (more > 0)
        + ("No launch has a value.",) * (not trends_),
    )


def _line(trend: Trend) -> tuple[str, ...]:
    write = units.size if trend.unit == "bytes" else units.number
    last = trend.changes[-1] if trend.changes else None
    since = units.NOTHING
    if last is not None:
        since = last.when + (f" ({last.commits})" if last.commits else "")
    return (
        *trend.series,
        str(len(trend.values)),
        write(trend.values[-1]),
        write(trend.levels[-1] if trend.levels else None),
        f"{100 * (last.ratio - 1):+.1f} %" if last else units.NOTHING,
        since,
        trend.verdicts[-1] or units.NOTHING,
        trend.accepted[-1].reason if trend.accepted else units.NOTHING,
        MARKS.get(trend.mark, ""),
    )


def heading(history: History) -> str:
    """Machine, number of launches and their span."""
    launches = history.launches
    span = f", {launches[0].created} to {launches[-1].created}" if launches else ""
    return f"{machine_name(history.folder)}: {len(launches)} launches{span}"
