"""One figure of each row as a point, over tokens and routings: link utilisation, roofline ratio."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mokbench.record import Record
from mokbench.report import units, wording
from mokbench.report.charts.names import stems
from mokbench.report.charts.style import (
    by_imbalance,
    fold,
    from_zero_or_log,
    most_figures,
    notes_of,
    panels,
    spread,
    system_looks,
)
from mokbench.report.rows import Rows, Workload

MAX_FIGURES = 6
MAX_PLACES = 16
MAX_SYSTEMS = 8

Value = Callable[[Record], float | None]


@dataclass(frozen=True)
class Dots:
    """What is drawn: ``values`` by label, the first with filled points, others with hollow ones.

    ``line``: a height worth a line, and what it is.
    """

    stem: str
    title: str
    ylabel: str
    values: dict[str, Value]
    line: tuple[float, str]
    notes: tuple[str, ...] = ()


def figures(rows: Rows, dots: Dots) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure) for each shape and regime with a value to draw."""
    most = most_figures(rows, MAX_FIGURES)
    groups: dict[tuple[Workload, str, str], list[Record]] = {}
    for row in rows.with_status("ok"):
        if any(value(row.record) is not None for value in dots.values.values()):
            work = Workload.of(row.record)._replace(tokens_per_rank=0, routing="")
            key = (work, wording.regime(row.record), row.run)
            groups.setdefault(key, []).append(row.record)
    several = len(rows.runs) > 1
    names = stems(dots.stem, [(w, [w.dtype, how] + [run] * several) for w, how, run in groups])
    more = len(groups) - most
    notes = [f"{units.count(more, 'more chart')} of this kind not drawn."] if more > 0 else []
    for stem, ((work, how, run), records) in list(zip(names, groups.items(), strict=True))[:most]:
        title = wording.shape(work, how) + f", run {run}" * several
        yield stem, _figure(title, records, dots, [*notes_of(records, rows), *notes])


def _figure(title: str, records: Sequence[Record], dots: Dots, notes: Sequence[str]) -> Figure:
    systems = list(dict.fromkeys(record.name for record in records))
    order = by_imbalance(records)
    places = sorted(
        {(record.tokens_per_rank, record.routing) for record in records},
        key=lambda place: (place[0], order.index(place[1])),
    )
    told = [*dots.notes, *notes]
    for what, found, most in (("systems", systems, MAX_SYSTEMS), ("points", places, MAX_PLACES)):
        if len(found) > most:
            told.append(f"Left out: {len(found) - most} of {len(found)} {what}.")
    looks = system_looks(systems[:MAX_SYSTEMS])
    shown = spread(places, MAX_PLACES)
    figure, (panel,) = panels(
        1,
        title=f"{dots.title}: {title}",
        notes=told,
        size=(max(6.0, 1.2 + 0.85 * len(shown)), 3.2),
        legend=looks,
    )
    _panel(panel, records, looks, shown, dots)
    return figure


def _panel(
    panel: Axes,
    records: Sequence[Record],
    looks: dict[str, tuple[str, str]],
    places: Sequence[tuple[int, str]],
    dots: Dots,
) -> None:
    at = {(r.name, r.tokens_per_rank, r.routing): r for r in reversed(records)}
    every = [dots.line[0]]
    for number, (system, (colour, marker)) in enumerate(looks.items()):
        shift = 0.5 * (number - (len(looks) - 1) / 2) / len(looks)
        for filled, value in zip((True, *(False,) * 9), dots.values.values(), strict=False):
            points = [
                (x + shift, found)
                for x, place in enumerate(places)
                if (record := at.get((system, *place))) is not None
                and (found := value(record)) is not None
            ]
            every += [y for _, y in points]
            panel.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=colour,
                marker=marker,
                markerfacecolor=colour if filled else "white",
                markersize=6,
                linestyle="none",
            )
    panel.axhline(dots.line[0], color="#666666", linewidth=1, linestyle="--")
    panel.set_xticks(
        range(len(places)), [f"{fold(name, 12)}\nT {count}" for count, name in places], fontsize=8
    )
    panel.set_xlim(-0.6, len(places) - 0.4)
    panel.grid(visible=False, axis="x")
    panel.set_ylabel(dots.ylabel)
    from_zero_or_log(panel, every)
