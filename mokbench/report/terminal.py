"""The report in a terminal: as wide as it is, at most some screens long."""

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from mokbench.report import document, units
from mokbench.report.document import Section
from mokbench.report.rows import Rows
from mokbench.report.tables import Column, Table
from mokbench.shown_text import visible

_GAP = 2
# A name folded to fewer columns can no longer be read.
_LEAST_NAME = 10
_MAX_SENTENCES = 24
# Width of a file or a pipe: nothing is folded, so that ids can be searched and copied.
_ENDLESS = 10_000


class TerminalTables:
    """Rich renderable of tables alone, each as wide as the console allows."""

    def __init__(self, tables: Sequence[Table], max_lines: int) -> None:
        self._tables = tables
        self._max_lines = max_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = _ENDLESS
            options = options.update(width=_ENDLESS)
        for table in self._tables:
            shown = replace(table, cells=table.cells[: self._max_lines])
            for part in _table(shown, options.max_width, {}):
                yield from _without_trailing_blanks(console.render(part, options))
            if (more := len(table.cells) - len(shown.cells)) > 0:
                yield Text(f"{more} more series; --format markdown or html has them.")


class TerminalReport:
    """Rich renderable of a report.

    Where width is short, headings fold, then columns are left out, the most expendable first;
    tables of one quantity go on in a further table instead. After ``max_tables`` tables of a
    section the rest is counted. What is left out is said.
    """

    def __init__(self, rows: Rows, max_tables: int) -> None:
        self._rows = rows
        self._max_tables = max_tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal and "COLUMNS" not in os.environ:
            # Rich takes a pipe for a terminal of 80 columns and would cut what is longer.
            console.width = _ENDLESS
            options = options.update(width=_ENDLESS)
        for part in self._parts(options.max_width):
            yield from _without_trailing_blanks(console.render(part, options))

    def _parts(self, width: int) -> Iterator[RenderableType]:
        left_out: dict[str, None] = {}
        for section in document.sections(self._rows):
            yield from self._section(section, width, left_out)
        if left_out:
            yield Text(
                f"Columns left out at this width ({width}): {', '.join(left_out)}. "
                "--format markdown shows them.",
                style="dim",
            )

    def _section(
        self, section: Section, width: int, left_out: dict[str, None]
    ) -> Iterator[RenderableType]:
        if section.title:
            yield _text(section.title, "bold underline")
        for line in section.lines:
            yield _text(line)
        for table in section.tables[: self._max_tables]:
            yield from _table(table, width, left_out)
        more = len(section.tables) - self._max_tables
        if more > 0:
            tables = units.count(more, "more table")
            yield Text(f"\n{tables} not shown; --format markdown or json has them all.")
        if section.lines or section.tables:
            yield Text()


def _table(table: Table, width: int, left_out: dict[str, None]) -> Iterator[RenderableType]:
    yield Text()
    yield _text(table.title, "bold")
    for line in table.about:
        yield _indented(line, "dim")
    for place, part in enumerate(_fit(table, width, left_out) if table.cells else ()):
        if place:
            yield Text()
        yield _draw(part, width)
    for line in table.sentences[:_MAX_SENTENCES]:
        yield _indented(line)
    if (more := len(table.sentences) - _MAX_SENTENCES) > 0:
        yield _indented(f"{more} more; --format markdown has them all.")


def _text(text: str, style: str = "") -> Text:
    """Text of others does nothing to the terminal: rich lets ESC through."""
    return Text(visible(text), style=style)


def _indented(line: str, style: str = "") -> Padding:
    return Padding(_text(line, style), (0, 0, 0, _GAP), expand=False)


def _without_trailing_blanks(segments: Iterable[Segment]) -> Iterator[Segment]:
    for line in Segment.split_lines(segments):
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            yield from line[:-1]
            yield Segment(line[-1].text.rstrip(), line[-1].style)
        yield Segment.line()


def _fit(table: Table, width: int, left_out: dict[str, None]) -> list[Table]:
    """Make the table no wider than ``width``; at least one column of figures stays."""
    if table.alike:
        return list(_chunks(table, width))
    # Names fold only before a figure of the highest rank has to go.
    for rank, least in ((2, False), (1, True)):
        while _width(table, least) > width:
            worst = max(column.expendable for column in table.columns)
            keep = [i for i, column in enumerate(table.columns) if column.expendable != worst]
            if worst < rank or not any(table.columns[i].right for i in keep):
                break
            gone = [column.title for column in table.columns if column.expendable == worst]
            left_out.update(dict.fromkeys(gone))
            table = table.keeping(keep)
    return [table]


def _chunks(table: Table, width: int) -> Iterator[Table]:
    """Cut a table of one quantity into tables that fit, each with all names."""
    names = [i for i, column in enumerate(table.columns) if not column.right]
    figures = [i for i, column in enumerate(table.columns) if column.right]
    chunk: list[int] = []
    for i in figures:
        if chunk and _width(table.keeping(names + chunk + [i])) > width:
            yield table.keeping(names + chunk)
            chunk = []
        chunk.append(i)
    yield table.keeping(names + chunk)


def _width(table: Table, least: bool = False) -> int:
    """Width with headings folded; ``least``: with the names folded too."""
    widths = map(_column_width, table.columns, zip(*table.cells, strict=True))
    return sum(
        min(width, _LEAST_NAME) if least and not column.right else width
        for width, column in zip(widths, table.columns, strict=True)
    ) + _GAP * (len(table.columns) - 1)


def _column_width(column: Column, cells: Sequence[str]) -> int:
    return max(map(len, (*cells, *_glued(column.title).split())))


def _heading(title: str, width: int) -> list[str]:
    return [line.replace("\0", " ") for line in textwrap.wrap(_glued(title), width)]


def _glued(title: str) -> str:
    """``title`` with the one unit in it that must not be broken at its spaces."""
    return title.replace("(95 % CI)", "(95\0%\0CI)")


def _draw(table: Table, width: int) -> RichTable:
    drawn = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="cyan")
    columns = list(zip(table.columns, zip(*table.cells, strict=True), strict=True))
    widths = [_column_width(*column) for column in columns]
    spare = width - sum(widths) - _GAP * (len(widths) - 1)
    for i, (column, _) in enumerate(columns):
        wanted = len(column.title) - widths[i]
        # A heading unfolds where there is room for it.
        if 0 < wanted <= spare:
            widths[i], spare = widths[i] + wanted, spare - wanted
    while spare < 0:
        name = max(range(len(widths)), key=lambda i: 0 if columns[i][0].right else widths[i])
        if columns[name][0].right or widths[name] <= _LEAST_NAME:
            break
        widths[name], spare = widths[name] - 1, spare + 1
    headings = [
        _heading(column.title, width) for (column, _), width in zip(columns, widths, strict=True)
    ]
    height = max(map(len, headings))
    for (column, _), width, lines in zip(columns, widths, headings, strict=True):
        # Words may fold; a folded figure would be misread.
        drawn.add_column(
            _text("\n" * (height - len(lines)) + "\n".join(lines)),
            justify="right" if column.right else "left",
            no_wrap=column.right,
            overflow="fold",
            width=width,
        )
    for row in table.cells:
        drawn.add_row(*map(_text, row))
    return drawn
