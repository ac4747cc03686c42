"""The report's tables as text, which the terminal and markdown draw each in its own way."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mokbench.record import Record
from mokbench.report import clock_words, cpu_bound, places, units, wording
from mokbench.report.comparison import (
    HOST_SYSTEMS,
    Comparison,
    against_others,
    compare,
    reference,
)
from mokbench.report.rows import Row, Rows, Workload

# A run whose every row failed with a text of its own still has to be readable.
MAX_REASONS = 30


@dataclass(frozen=True)
class Column:
    """Heading, side, and how early it goes where width is short (0: never)."""

    title: str
    right: bool = True
    expendable: int = 0


@dataclass(frozen=True)
class Table:
    """Title, lines under it, cells as text, and sentences below.

    ``alike``: its figures are one quantity, column by column. Where width is short they go into
    further tables; other tables leave expendable columns out.
    """

    title: str
    columns: tuple[Column, ...]
    cells: tuple[tuple[str, ...], ...]
    about: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    alike: bool = False

    def without_empty_columns(self) -> "Table":
        """Drop columns in which no row has a figure."""
        keep = [
            i
            for i in range(len(self.columns))
            if any(row[i] not in (units.NOTHING, "") for row in self.cells)
        ]
        return self.keeping(keep)

    def keeping(self, keep: Sequence[int]) -> "Table":
        """Return the table with these columns only."""
        return replace(
            self,
            columns=tuple(self.columns[i] for i in keep),
            cells=tuple(tuple(row[i] for i in keep) for row in self.cells),
        )


# Figure of a row by column; order is the order shown.
_FIGURES: tuple[tuple[Column, Callable[[Record], str]], ...] = (
    (Column("TFLOP/s/GPU", expendable=3), lambda r: units.number(r.tflops_per_gpu)),
    (Column("of peak", expendable=7), lambda r: _of_peak(r)),
    (Column("of roofline", expendable=6), lambda r: units.quotient(r.roofline_ratio)),
    (Column("link use", expendable=4), lambda r: units.quotient(r.link_utilization)),
    (Column("wire", expendable=5), lambda r: units.size(r.wire_bytes)),
    (Column(places.SAME_DOMAIN, expendable=9), lambda r: units.size(places.same_domain(r))),
    (Column(places.CROSS_DOMAIN, expendable=5), lambda r: units.size(places.cross_domain(r))),
    (Column(places.CROSS_NODE, expendable=2), lambda r: units.size(places.cross_node(r))),
    (Column("redundancy", expendable=2), lambda r: units.quotient(r.redundancy)),
    (Column("ready us", expendable=6), lambda r: units.number(r.signal_ready_us)),
    (Column("dispatch us", expendable=10), lambda r: units.number(r.dispatch_us)),
    (Column("combine us", expendable=10), lambda r: units.number(r.combine_us)),
    (Column("spread us", expendable=11), lambda r: units.number(r.rank_spread_us)),
    (Column("SM MHz", expendable=4), lambda r: units.number(r.sm_clock_mhz)),
    (Column("MMA use", expendable=8), lambda r: units.quotient(r.mma_utilization)),
    (Column("rel error", expendable=9), lambda r: units.error(r.rel_error)),
    (Column("repeats", expendable=8), lambda r: _yes_no(r.bitwise_repeat)),
)


def workload_tables(rows: Rows) -> list[Table]:
    """One table a workload: each system's step time, its ratio with MoK, bytes, correctness."""
    groups = rows.by_workload()
    return [
        _workload_table(work, group, rows)
        for work, group in groups.items()
        if any(row.record.status != "unsupported" for row in group)
    ]


def _workload_table(work: Workload, group: Sequence[Row], rows: Rows) -> Table:
    shown = [row for row in group if row.record.status != "unsupported"]
    regimes = list(dict.fromkeys(wording.regime(row.record) for row in shown))
    shown.sort(key=lambda row: regimes.index(wording.regime(row.record)))
    records = [row.record for row in shown]
    ratios = [_against_mok(row, group) for row in shown]
    about = [wording.imbalance(records), wording.reference(ratios, shown)]
    sentences = (
        wording.sentence(found, name_runs=len(rows.runs) > 1)
        for row in shown
        if row.record.system == "mok"
        for found in against_others(row, group)
    )
    columns = (
        Column("system", right=False),
        Column("regime", right=False),
        Column("run", right=False),
        Column("step us (95 % CI)"),
        Column(wording.AGAINST_ON_HOST if work.fabric == "host" else wording.AGAINST, expendable=1),
        *(column for column, _ in _FIGURES),
    )
    table = Table(
        wording.workload(work, [record.link for record in records]),
        columns,
        tuple(_cells(row, found) for row, found in zip(shown, ratios, strict=True)),
        (*filter(None, about), *wording.marks(records, rows.machine)),
        (*sentences, *clock_words.table_lines(shown), *cpu_bound.table_lines(shown)),
    )
    if len(rows.runs) == 1:
        table = table.keeping([i for i in range(len(columns)) if columns[i].title != "run"])
    return table.without_empty_columns()


def _against_mok(row: Row, group: Sequence[Row]) -> Comparison | None:
    mok = reference(group, row)
    if mok is None or mok == row or row.record.step_time_us is None:
        return None
    if row.record.fabric == "host" and row.record.system == "mok":
        return None
    return compare(mok, row)


def _cells(row: Row, found: Comparison | None) -> tuple[str, ...]:
    record = row.record
    step = units.step(record.step_time_us) if record.status == "ok" else record.status.upper()
    against = units.NOTHING
    if found is not None:
        against = ("~" if found.basis == "separate" else "") + units.ratio(found.ratio)
    figures = (figure(record) for _, figure in _FIGURES)
    return (record.name, wording.regime(record), row.run, step, against, *figures)


def problem_table(rows: Rows, status: str) -> Table | None:
    """Rows that are unsupported or failed: systems and reasons, how many rows, one of them."""
    found = rows.with_status(status)
    if not found:
        return None
    tally = Counter(row.record.reason or "" for row in found)
    left = len(tally) - MAX_REASONS
    more = (f"{units.count(left, 'more reason')}: --format json has them",) * (left > 0)
    example = {row.record.reason or "": row.record.id for row in reversed(found)}
    systems: dict[str, dict[str, None]] = {}
    for row in found:
        systems.setdefault(row.record.reason or "", {})[row.record.system] = None
    return Table(
        f"{status}: {units.count(len(found), 'row')}",
        (
            Column("system", right=False),
            Column("rows"),
            Column("reason", right=False),
            Column("for example", right=False),
        ),
        tuple(
            (", ".join(systems[reason]), str(number), reason, example[reason])
            for reason, number in tally.most_common(MAX_REASONS)
        ),
        sentences=more,
    )


def note_counts(rows: Rows) -> list[str]:
    """Each note that rows carry, with how many carry it."""
    tally = Counter(note for row in rows.rows for note in dict.fromkeys(row.record.notes))
    return [f"{note} ({units.count(number, 'row')})" for note, number in tally.most_common()]


def uncompared(rows: Rows) -> str | None:
    """Systems on the host fabric that are listed without a ratio, and why."""
    found = [row.record for row in rows.with_status("ok") if row.record.fabric == "host"]
    others = sorted({record.system for record in found}.difference(HOST_SYSTEMS))
    if not others:
        return None
    return f"Listed without a ratio, since they move data by other means: {', '.join(others)}."


def _of_peak(record: Record) -> str:
    if record.tflops_per_gpu is None or not record.peak_tflops:
        return units.NOTHING
    return units.quotient(record.tflops_per_gpu / record.peak_tflops)


def _yes_no(value: bool | None) -> str:
    return units.NOTHING if value is None else "yes" if value else "no"
