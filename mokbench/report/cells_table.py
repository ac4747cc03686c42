"""Every row of a report as one table that a page can sort and filter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mokbench.record import Record
from mokbench.report import places, units, wording
from mokbench.report.rows import Row, Rows

# Characters of a cell from which on a column may wrap.
_LONG = 24


@dataclass(frozen=True)
class Cell:
    """Text as shown, and the number by which it sorts; null sorts as text or last."""

    text: str
    sort: float | None = None

    @property
    def key(self) -> str | None:
        """``sort`` in six digits; null where the text is, or begins with, that very number.

        Ten thousand rows of a dozen figures are megabytes, and most texts sort by themselves.
        """
        if self.sort is None:
            return None
        key = f"{self.sort:.6g}"
        first = self.text.split(" (")[0]
        try:
            return None if float(first) == float(key) else key
        except ValueError:  # a unit behind it, which the number alone would not sort by
            return key


@dataclass(frozen=True)
class Heading:
    """A column: its title, whether it holds figures, whether a page offers a filter on it."""

    title: str
    figure: bool = True
    filter: bool = False


@dataclass(frozen=True)
class Grid:
    """Headings and cells; columns in which no row has anything are left out."""

    headings: tuple[Heading, ...]
    lines: tuple[tuple[Cell, ...], ...]

    @property
    def look(self) -> str:
        """Classes that say it once a table and not in each cell: nI of figures, lI of long text.

        I counts columns from 1.
        """
        figures = [f"n{i}" for i, heading in enumerate(self.headings, 1) if heading.figure]
        long = [
            f"l{i}"
            for i, heading in enumerate(self.headings, 1)
            if not heading.figure and any(len(line[i - 1].text) > _LONG for line in self.lines)
        ]
        return " ".join(figures + long)


def marks(record: Record) -> str:
    """What must be known of a row before its figures are read: twin, shared GPU, oversubscribed."""
    found = ["twin"] * (record.fabric == "host")
    found += ["shared GPU"] * wording.shares_gpu(record)
    return ", ".join(found + ["oversubscribed"] * record.oversubscribed)


def _number(value: float | None, write: Callable[[float | None], str] = units.number) -> Cell:
    return Cell(write(value), value)


def _step(record: Record) -> Cell:
    time = record.step_time_us
    return Cell(units.step(time), None if time is None else time.median)


def _nodes(record: Record) -> Cell:
    """Nothing for one node, which leaves the column out where there is no other."""
    return _number(record.nodes if record.nodes > 1 else None, _whole)


def _placement(record: Record) -> str:
    """Nothing for the default, which leaves the column out where there is no other."""
    return "" if record.placement == "contiguous" else record.placement


def _words(text: str) -> Cell:
    return Cell(text)


def _of_peak(record: Record) -> Cell:
    if record.tflops_per_gpu is None or not record.peak_tflops:
        return Cell(units.NOTHING)
    return _number(record.tflops_per_gpu / record.peak_tflops, units.quotient)


COLUMNS: tuple[tuple[Heading, Callable[[Row], Cell]], ...] = (
    (Heading("model", False, True), lambda row: _words(row.record.model)),
    (Heading("system", False, True), lambda row: _words(row.record.name)),
    (Heading("ranks", True, True), lambda row: _number(row.record.ranks, _whole)),
    (Heading("nodes", True, True), lambda row: _nodes(row.record)),
    (Heading("tokens", True, True), lambda row: _number(row.record.tokens_per_rank, _whole)),
    (Heading("routing", False, True), lambda row: _words(row.record.routing)),
    (Heading("placement", False, True), lambda row: _words(_placement(row.record))),
    (Heading("dtype", False, True), lambda row: _words(row.record.dtype)),
    (Heading("regime", False, True), lambda row: _words(wording.regime(row.record))),
    (Heading("run", False, True), lambda row: _words(row.run)),
    (Heading("mark", False, True), lambda row: _words(marks(row.record))),
    (Heading("step us (95 % CI)"), lambda row: _step(row.record)),
    (Heading("TFLOP/s/GPU"), lambda row: _number(row.record.tflops_per_gpu)),
    (Heading("of peak"), lambda row: _of_peak(row.record)),
    (Heading("of roofline"), lambda row: _number(row.record.roofline_ratio, units.quotient)),
    (Heading("link use"), lambda row: _number(row.record.link_utilization, units.quotient)),
    (Heading("wire"), lambda row: _number(row.record.wire_bytes, units.size)),
    (Heading(places.SAME_DOMAIN), lambda row: _number(places.same_domain(row.record), units.size)),
    (
        Heading(places.CROSS_DOMAIN),
        lambda row: _number(places.cross_domain(row.record), units.size),
    ),
    (Heading(places.CROSS_NODE), lambda row: _number(places.cross_node(row.record), units.size)),
    (Heading("redundancy"), lambda row: _number(row.record.redundancy, units.quotient)),
    (Heading("dispatch us"), lambda row: _number(row.record.dispatch_us)),
    (Heading("combine us"), lambda row: _number(row.record.combine_us)),
    (Heading("spread us"), lambda row: _number(row.record.rank_spread_us)),
    (Heading("min step us"), lambda row: _number(row.record.min_step_us)),
    (Heading("SM MHz"), lambda row: _number(row.record.sm_clock_mhz)),
    (Heading("MMA use"), lambda row: _number(row.record.mma_utilization, units.quotient)),
    (Heading("hold expired"), lambda row: _number(row.record.hold_expired_share, units.quotient)),
    (Heading("rel error"), lambda row: _number(row.record.rel_error, units.error)),
)


def _whole(value: float | None) -> str:
    return units.NOTHING if value is None else str(int(value))


def measured(rows: Rows) -> Grid:
    """Every measured row, in the report's order."""
    return _grid([row for row in rows.rows if row.record.status == "ok"], rows)


def not_measured(rows: Rows) -> Grid:
    """Every failed and every unsupported row with its whole reason, failed ones first."""
    found = [*rows.with_status("failed"), *rows.with_status("unsupported")]
    headings = (
        Heading("status", False, True),
        Heading("system", False, True),
        Heading("cell", False),
        Heading("reason", False),
    )
    lines = (
        tuple(
            map(
                _words,
                (row.record.status, row.record.system, row.record.id, row.record.reason or ""),
            )
        )
        for row in found
    )
    return Grid(headings, tuple(lines))


def _grid(shown: Sequence[Row], rows: Rows) -> Grid:
    lines = [tuple(cell(row) for _, cell in COLUMNS) for row in shown]
    several = len(rows.runs) > 1
    keep = [
        i
        for i, (heading, _) in enumerate(COLUMNS)
        if any(line[i].text not in ("", units.NOTHING) for line in lines)
        and (heading.title != "run" or several)
    ]
    return Grid(
        tuple(COLUMNS[i][0] for i in keep), tuple(tuple(line[i] for i in keep) for line in lines)
    )
