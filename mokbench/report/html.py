"""A report as one HTML file: no network, no other file, readable on paper and on a phone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import jinja2

from mokbench import __version__
from mokbench.machine import Machine
from mokbench.report import (
    cells_table,
    charts,
    clock_words,
    cpu_bound,
    glossary,
    units,
    winners,
    wording,
)
from mokbench.report.cells_table import Cell, Grid, Heading
from mokbench.report.charts import KINDS
from mokbench.report.document import Section, sections
from mokbench.report.phases import phase_tables
from mokbench.report.rows import Rows, gather
from mokbench.results import RunFolder
from mokbench.run_checks import older_method
from mokbench.shown_text import visible

TITLES = {
    "step_time": "Step time by system",
    "speedup": "Step time over that of one system, by tokens and imbalance",
    "signaling": "Signaling against the number of ranks",
    "link": "Link utilisation against the measured peak",
    "imbalance": "Expert imbalance",
    "roofline": "Step time over the roofline",
    "timeline": "One pass, rank by rank",
}
# Why a kind of chart is not there, where no row has its figures.
ABSENT = {
    "link": "No row has a link of its own to use: one rank, ranks that share a GPU, or the host "
    "fabric. Such rows have no link utilisation, rather than one of 0.",
    "speedup": "No two systems were measured on one workload.",
    "signaling": "Signaling was not measured.",
    "roofline": "No row has a roofline: rates are measured on the cuda fabric only.",
    "timeline": "No row of several ranks kept its samples, and none has phase stamps.",
    "step_time": "No row was measured.",
    "imbalance": "No row has its routing's counts.",
}
_METHOD = (
    "Every row's output was checked against an FP32 oracle before it was timed. Rows of one "
    "workload were measured in turn, block by block; ratios without ~ are medians over pairs of "
    "neighbouring blocks.",
    "A step time is the maximum over ranks of each pass, then the median over passes, with the "
    "95 % interval of that median over blocks: how well this run knows it, not how another day or "
    "machine would differ.",
)

_MOST_TABLES = 60


@dataclass(frozen=True)
class Drawing:
    """A chart in the page: its SVG, a name for those who cannot see it."""

    name: str
    svg: str


def html(runs: Sequence[RunFolder]) -> str:
    """Build the page. Raises ResultsError for runs that may not stand in one report."""
    from mokbench.report.charts.style import inline

    rows = gather(runs)
    drawings: dict[str, list[Drawing]] = {kind: [] for kind in KINDS}
    lost: list[str] = []
    for number, (kind, stem, figure) in enumerate(charts.figures(rows, runs, lost)):
        title = " ".join(figure.texts[0].get_text().split()) if figure.texts else stem
        drawings[kind].append(Drawing(title, inline(figure, f"c{number}-")))
    records = [row.record for row in rows.rows]
    won = winners.wins(rows)
    fastest, cells = _wins(won), cells_table.measured(rows)
    titles = [heading.title for grid in (fastest, cells) if grid.lines for heading in grid.headings]
    titles += [column.title for table in phase_tables(rows) for column in table.columns]
    return page(
        "report.html.j2",
        title=", ".join(dict.fromkeys(meta.name for _, meta in rows.runs)),
        runs=wording.runs(rows),
        marks=[
            *filter(None, [older_method(rows.method_version)]),
            *wording.marks([r for r in records if r.status == "ok"], rows.machine),
        ],
        unsettled=wording.unsettled(rows.rows),
        verdict=[*winners.sentences(rows, won), *cpu_bound.page_lines(rows.rows)],
        wins=fastest,
        charts=drawings,
        titles=TITLES,
        absent=ABSENT,
        lost={"timeline": lost},
        reading=glossary.CHARTS,
        glossary=glossary.explained(titles),
        cells=cells,
        missing=cells_table.not_measured(rows),
        sections=_sections(rows),
        environment=[*environment(rows.machine), *_code(rows)],
        configs=[(name, meta) for name, meta in rows.runs],
        method=(f"Method version {rows.method_version}.", *_METHOD, *_conditions(rows)),
    )


def page(template: str, **values: Any) -> str:
    """Render a template of ``mokbench/report/page`` with its style and script inside."""
    folder = resources.files("mokbench.report") / "page"
    return visible(
        _environment()
        .get_template(template)
        .render(
            style=(folder / "style.css").read_text(encoding="utf-8"),
            script=(folder / "page.js").read_text(encoding="utf-8"),
            version=__version__,
            meaning=glossary.COLUMNS,
            **values,
        )
    )


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("mokbench.report", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def environment(machine: Machine) -> list[tuple[str, str]]:
    """Name and value of all that is known about the machine; what is not there is left out."""
    told = machine.model_dump()
    for name in ("memory_bytes", "gpu_memory_bytes"):
        told[name] = units.size(told[name]) if told[name] else None
    return [
        (name.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value))
        for name, value in told.items()
        if value not in (None, "", [])
    ]


def _code(rows: Rows) -> list[tuple[str, str]]:
    """Which mokbench measured, run by run where they differ."""
    told = {name: wording.code(meta) for name, meta in rows.runs}
    if len(set(told.values())) == 1:
        return [("measured by", next(iter(told.values())))]
    return [(f"measured by, {name}", text) for name, text in told.items()]


def _sections(rows: Rows) -> list[Section]:
    """What the other formats say too and the page has no table of its own for."""
    own = ("", "Step time", "Not measured")
    return [_short(section) for section in sections(rows) if section.title not in own]


def _short(section: Section) -> Section:
    """As many tables as anyone scrolls through; what is left out is said."""
    more = len(section.tables) - _MOST_TABLES
    if more <= 0:
        return section
    said = f"{units.count(more, 'more table')} of this kind: --format json has their figures."
    return replace(section, tables=section.tables[:_MOST_TABLES], lines=(*section.lines, said))


def _wins(won: Sequence[winners.Win]) -> Grid:
    """Who is fastest in each workload, and how far behind the others are."""
    headings = (
        Heading("workload", False),
        Heading("regime", False, True),
        Heading("least step time", False, True),
        Heading("step us (95 % CI)"),
        Heading("verdict", False, True),
        Heading("others: times as long (95 % CI)", False),
        Heading("why", False),
    )
    lines = []
    for win in won:
        record = win.fastest.record
        behind = "; ".join(
            f"{pair.mok.record.name} {'~' * (pair.basis == 'separate')}{units.ratio(pair.ratio)}"
            + (f" [{clock}]" if (clock := clock_words.beside(pair)) else "")
            for pair in win.behind
        )
        time = record.step_time_us
        mark = cells_table.marks(record)
        lines.append(
            (
                Cell(wording.workload(win.work, [record.link]) + (f" [{mark}]" if mark else "")),
                Cell(wording.regime(record)),
                Cell(record.name),
                Cell(units.step(time), None if time is None else time.median),
                Cell({"faster": "fastest", "open": "not settled", "alone": "alone"}[win.outcome]),
                Cell(behind or units.NOTHING),
                Cell(win.why),
            )
        )
    return Grid(headings, tuple(lines))


def _conditions(rows: Rows) -> list[str]:
    """State of caches and how rows stopped, which a reader of figures asks first."""
    measured = [row.record for row in rows.with_status("ok")]
    states = sorted({record.l2_state for record in measured if record.l2_state})
    stops = sorted({record.stop_reason for record in measured if record.stop_reason})
    said = [f"L2 before a pass: {', '.join(states)}."] if states else []
    return said + ([f"Rows stopped at: {', '.join(stops)}."] if stops else [])
