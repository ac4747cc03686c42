"""Reports of a history: as a table, markdown, JSON, charts, and a page that a CI can publish."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mokbench.durable import as_results_error
from mokbench.regression.history import History
from mokbench.regression.history_folders import machine_folders
from mokbench.report.cells_table import Cell, Grid, Heading
from mokbench.report.document import table_markdown
from mokbench.report.html import Drawing, page
from mokbench.report.tables import Table
from mokbench.report.trend import Trend, heading, table, trends

_FILTERS = ("metric", "verdict", "mark")


@dataclass(frozen=True)
class MachineHistory:
    """One machine's part of a history report."""

    title: str
    trends: list[Trend]
    history: History = field(repr=False)

    @property
    def table(self) -> Table:
        """Every series, the ones worth a look first."""
        return table(self.trends, self.title)


def read(root: Path) -> list[MachineHistory]:
    """Read every machine of a history. Raises ResultsError for none, or for a broken file."""
    found = []
    for folder in machine_folders(root):
        history = History.read(folder)
        found.append(MachineHistory(heading(history), trends(history), history))
    return found


def markdown(machines: Sequence[MachineHistory]) -> str:
    """Render as GitHub markdown."""
    parts = ["# mokbench: history"]
    for machine in machines:
        parts += table_markdown(machine.table)
    return "\n\n".join(parts) + "\n"


def as_json(machines: Sequence[MachineHistory]) -> list[dict[str, Any]]:
    """JSON-ready form: one object a machine, with every series."""
    return [
        {
            "machine": machine.history.folder.name,
            "title": machine.title,
            "series": [trend.to_dict() for trend in machine.trends],
        }
        for machine in machines
    ]


def html(machines: Sequence[MachineHistory]) -> str:
    """Build one self-contained page."""
    from mokbench.report.charts import history as drawn
    from mokbench.report.charts.style import inline

    parts = []
    for number, machine in enumerate(machines):
        charts = [
            Drawing(stem, inline(figure, f"m{number}-{stem}-"))
            for stem, figure in drawn.figures(machine.trends, machine.title)
        ]
        shown = machine.table
        parts.append(
            {
                "title": machine.title,
                "lines": _summary(machine),
                "charts": charts,
                "grid": _grid(shown),
                "sentences": shown.sentences,
            }
        )
    return page("history.html.j2", title="history", machines=parts)


def write_charts(machines: Sequence[MachineHistory], folder: Path) -> list[Path]:
    """Draw every machine's series as PNG and SVG. Raises ResultsError where that fails."""
    from mokbench.report.charts import history as drawn
    from mokbench.report.charts.style import save

    written: dict[Path, None] = {}
    with as_results_error(folder, "writing charts", "name a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for machine in machines:
            key = machine.history.folder.name
            for stem, figure in drawn.figures(machine.trends, machine.title):
                written |= dict.fromkeys(save(figure, folder, f"{key}-{stem}", taken=written))
    return list(written)


def _summary(machine: MachineHistory) -> list[str]:
    changed = [trend for trend in machine.trends if trend.changes]
    slower = [
        trend for trend in machine.trends if trend.verdicts and trend.verdicts[-1] == "SLOWER"
    ]
    return [
        f"{len(machine.trends)} series, {len(changed)} of them with a change of level; "
        f"{len(slower)} whose last launch was called SLOWER."
    ]


def _grid(shown: Table) -> Grid:
    headings = tuple(
        Heading(column.title, column.right, column.title in _FILTERS) for column in shown.columns
    )
    return Grid(headings, tuple(tuple(map(Cell, line)) for line in shown.cells))
