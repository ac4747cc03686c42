"""What the report command does: stored runs, or a history, in the form asked for."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from mokbench import report
from mokbench.errors import ResultsError
from mokbench.output_console import OutputConsole
from mokbench.results import RunFolder, open_runs
from mokbench.say import say

_MOST_LINES = 40


def report_command(
    runs: tuple[str, ...], format_: str, charts: Path | None, no_charts: bool
) -> None:
    """Print a report of stored runs."""
    folders = open_runs(runs)
    if format_ == "json":
        click.echo(json.dumps(report.json_report(folders), indent=1))
    elif format_ == "markdown":
        click.echo(report.markdown(folders))
    elif format_ == "html":
        click.echo(report.html_report(folders))
    else:
        OutputConsole().print(report.table(folders))
        if charts is None and not no_charts:
            draw(folders, folders[0].path / "charts")
    if charts is not None:
        _write_charts(folders, charts)


def history_command(root: Path, format_: str, charts: Path | None) -> None:
    """Print a report of a history: every series, its change points, levels and verdicts."""
    from mokbench.report import history
    from mokbench.report.terminal import TerminalTables

    machines = history.read(root)
    if format_ == "json":
        click.echo(json.dumps(history.as_json(machines), indent=1))
    elif format_ == "markdown":
        click.echo(history.markdown(machines))
    elif format_ == "html":
        click.echo(history.html(machines))
    else:
        OutputConsole().print(TerminalTables([machine.table for machine in machines], _MOST_LINES))
    if charts is not None:
        paths = history.write_charts(machines, charts)
        say(f"charts: {charts} ({len(paths)} files)")


def draw(folders: Sequence[RunFolder], where: Path) -> None:
    """Write charts that nobody asked for by name into ``where``, or say why there are none."""
    try:
        _write_charts(folders, where)
    except (OSError, ResultsError) as error:
        say(f"no charts: {error}")


def _write_charts(folders: Sequence[RunFolder], where: Path) -> None:
    from mokbench.report import charts

    if paths := charts.write(folders, where):
        say(f"charts: {where} ({len(paths)} files)")
