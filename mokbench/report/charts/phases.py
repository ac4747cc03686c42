"""Timeline of the phases inside of a fused kernel: a lane a rank, its GEMMs below one another."""

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mokbench.figures import PhaseName, RankPhases
from mokbench.report import units, wording
from mokbench.report.charts.names import stems
from mokbench.report.charts.style import most_figures, notes_of, panels
from mokbench.report.phases import ONE_PASS, TITLES, stamped, title, waited, zero
from mokbench.report.rows import Row, Rows, Workload

MAX_FIGURES = 6
MAX_RANKS = 32

# Of Okabe and Ito's palette; waiting for other ranks has the colour of neither work nor paper.
_COLOURS: dict[PhaseName, str] = {
    "stage": "#56B4E9",
    "entry": "#666666",
    "schedule": "#7A3E9D",
    "dispatch": "#0072B2",
    "gemm1": "#D55E00",
    "gemm2": "#E69F00",
    "combine": "#666666",
    "sum": "#009E73",
}
_WAITS: tuple[PhaseName, ...] = ("entry", "combine")
# The GEMMs overlap with dispatch and with one another; all else of a rank is in turn.
_SUB_LANES: dict[PhaseName, int] = {"gemm1": 1, "gemm2": 2}
_NUM_SUB_LANES, _RANK_HEIGHT = 3, 0.85
_INCHES_A_RANK = 0.5


def figures(rows: Rows) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure) for each row that has phases."""
    most = most_figures(rows, MAX_FIGURES)
    found = stamped(rows)
    several = len(rows.runs) > 1
    names = stems("timeline", [_named(row, several) for row in found])
    more = len(found) - most
    notes = [f"{units.count(more, 'more chart')} of this kind not drawn."] if more > 0 else []
    for stem, row in list(zip(names, found, strict=True))[:most]:
        yield stem, _figure(row, rows, notes)


def _named(row: Row, several: bool) -> tuple[Workload, list[str]]:
    record, work = row.record, Workload.of(row.record)
    words = ["phases", record.name, wording.regime(record), work.dtype]
    return work, [*words, f"t{work.tokens_per_rank}", work.routing, *[row.run] * several]


def _figure(row: Row, rows: Rows, notes: list[str]) -> Figure:
    record = row.record
    shown = record.kernel_phases[:MAX_RANKS]
    more = record.ranks - len(shown)
    told = [
        f"Bars: from a phase's first CTA to its last. {ONE_PASS}. Hatched: waiting for other "
        "ranks. Waited: what a CTA's GEMMs waited for rows in all, median / largest over CTAs.",
        f"Times: {zero(record)}.",
        *([f"Left out: {units.count(more, 'rank')}."] if more else []),
        *notes_of([record], rows),
        *notes,
    ]
    there = {span.name for found in shown for span in found.spans}
    figure, (panel,) = panels(
        1,
        title=f"Phases of one pass, rank by rank: {title(row, rows)}",
        notes=told,
        size=(9.0, 0.9 + _INCHES_A_RANK * len(shown)),
        legend={_label(name): (_COLOURS[name], "s") for name in TITLES if name in there},
    )
    _panel(panel, shown, zero(record))
    return figure


def _label(name: PhaseName) -> str:
    return TITLES[name] + " (hatched)" * (name in _WAITS)


def _panel(panel: Axes, shown: list[RankPhases], counted: str) -> None:
    for place, found in enumerate(shown):
        _lane(panel, place, found)
    several = len({found.clock for found in shown}) > 1
    panel.set_yticks(
        range(len(shown)),
        [f"rank {one.rank}" + f", GPU {one.clock}" * several for one in shown],
    )
    panel.set_ylim(len(shown) - 0.5, -0.5)
    last = max((span.end_us for found in shown for span in found.spans), default=0.0)
    panel.set_xlim(0, 1.02 * last or 1.0)
    panel.grid(visible=False, axis="y")
    panel.set_xlabel(counted.partition(":")[0])


def _lane(panel: Axes, place: int, found: RankPhases) -> None:
    """Draw a rank's phases as bars, and what its CTAs waited beside them."""
    height = _RANK_HEIGHT / _NUM_SUB_LANES
    for span in found.spans:
        at = place + (_SUB_LANES.get(span.name, 0) - 1) * height
        colour = _COLOURS[span.name]
        look: dict[str, Any] = {"color": colour, "alpha": 0.75, "linewidth": 0}
        if span.name in _WAITS:
            look = {"facecolor": "none", "edgecolor": colour, "hatch": "////", "linewidth": 0.5}
        width = span.end_us - span.begin_us
        panel.barh(at, width, left=span.begin_us, height=0.9 * height, **look)
    panel.text(
        1.01,
        place,
        f"waited\n{waited(found)} us",
        transform=panel.get_yaxis_transform(),
        fontsize=7,
        va="center",
    )
