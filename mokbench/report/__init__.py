"""Reports of one or several runs: a terminal table, markdown, HTML, the JSON contract, charts.

All take run folders (``results.open_runs``) of one machine and one method version and raise
ResultsError for others. matplotlib is imported by ``charts.write`` alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mokbench.report import charts, document
from mokbench.report.contract import contract
from mokbench.report.rows import gather
from mokbench.report.terminal import TerminalReport
from mokbench.results import RunFolder

__all__ = ["charts", "html_report", "json_report", "markdown", "table"]


def table(runs: Sequence[RunFolder], max_tables: int = 20) -> TerminalReport:
    """Build the terminal report, a rich renderable that adapts to the console's width."""
    return TerminalReport(gather(runs), max_tables)


def markdown(runs: Sequence[RunFolder], charts: Sequence[Path] = ()) -> str:
    """Build the markdown report; ``charts`` are paths of images to show, relative to its file."""
    return document.markdown(gather(runs), charts)


def html_report(runs: Sequence[RunFolder]) -> str:
    """Build the report as one self-contained HTML file, charts inside."""
    from mokbench.report.html import html

    return html(runs)


def json_report(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Build the machine-readable report, ready for json.dumps(..., allow_nan=False)."""
    return contract(gather(runs))
