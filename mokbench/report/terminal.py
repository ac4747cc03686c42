"""The report in a terminal: as wide as it is, at most some screens long."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from mokbench.report import document
from mokbench.report.document import Section
from mokbench.report.rows import Rows
from mokbench.report.tables import Table

_GAP = 2


class TerminalReport:
    """Rich renderable of a report.

    Columns that do not fit the console are left out, the most expendable first, and after
    ``max_tables`` tables of a section the rest is counted; both are said.
    """

    def __init__(self, rows: Rows, max_tables: int) -> None:
        self._rows = rows
        self._max_tables = max_tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left_out: dict[str, None] = {}
        for section in document.sections(self._rows):
            yield from self._section(section, options.max_width, left_out)
        if left_out:
            yield Text(
                f"Columns left out at this width ({options.max_width}): {', '.join(left_out)}. "
                "--format markdown shows them.",
                style="dim",
            )

    def _section(
        self, section: Section, width: int, left_out: dict[str, None]
    ) -> Iterator[RenderableType]:
        if section.title:
            yield Text(section.title, style="bold underline")
        for line in section.lines:
            yield Text(line)
        for table in section.tables[: self._max_tables]:
            fitting = _fit(table, width, left_out)
            yield Text()
            yield Text(fitting.title, style="bold")
            for line in fitting.about:
                yield Padding(Text(line, style="dim"), (0, 0, 0, 2), expand=False)
            yield _draw(fitting)
            for line in fitting.sentences:
                yield Padding(Text(line), (0, 0, 0, 2), expand=False)
        more = len(section.tables) - self._max_tables
        if more > 0:
            yield Text(f"\n{more} more tables not shown; --format markdown or json has them all.")
        if section.lines or section.tables:
            yield Text()


def _fit(table: Table, width: int, left_out: dict[str, None]) -> Table:
    """Leave out the most expendable columns until the table is no wider than ``width``."""
    while _width(table) > width:
        worst = max(column.expendable for column in table.columns)
        if worst == 0:
            return table
        keep = [i for i, column in enumerate(table.columns) if column.expendable != worst]
        gone = [column.title for column in table.columns if column.expendable == worst]
        left_out.update(dict.fromkeys(gone))
        table = table.keeping(keep)
    return table


def _width(table: Table) -> int:
    widths = (
        max(len(column.title), *(len(row[i]) for row in table.cells))
        for i, column in enumerate(table.columns)
    )
    return sum(widths) + _GAP * (len(table.columns) - 1)


def _draw(table: Table) -> RichTable:
    drawn = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="cyan")
    for column in table.columns:
        # Words may fold; a folded figure would be misread.
        drawn.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=column.right,
            overflow="fold",
        )
    for row in table.cells:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
