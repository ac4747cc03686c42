"""Phases inside of a fused kernel, rank by rank, of rows whose system stamped them."""

from mokbench.figures import PhaseName, RankPhases
from mokbench.record import Record
from mokbench.report import units, wording
from mokbench.report.rows import Row, Rows, Workload
from mokbench.report.tables import Column, Table

# In the order of a pass, as people read them.
TITLES: dict[PhaseName, str] = {
    "stage": "stage",
    "entry": "entry",
    "schedule": "schedule",
    "dispatch": "dispatch",
    "gemm1": "GEMM 1",
    "gemm2": "GEMM 2",
    "combine": "combine",
    "sum": "sum",
}
ONE_PASS = "The last pass of the row, no typical one, and stamping itself takes time"
_MAX_RANKS = 16


def stamped(rows: Rows) -> list[Row]:
    """Measured rows that have phases, in the order of the report."""
    return [row for row in rows.with_status("ok") if row.record.kernel_phases]


def phase_tables(rows: Rows) -> list[Table]:
    """One table a row: begin and end of each phase of each rank, and what its CTAs waited."""
    return [_table(row, rows) for row in stamped(rows)]


def title(row: Row, rows: Rows) -> str:
    """Name the row: system, regime, workload, and its run where there are several."""
    record = row.record
    work = wording.workload(Workload.of(record), [record.link])
    return f"{record.name}, {wording.regime(record)}: {work}" + (
        f", run {row.run}" if len(rows.runs) > 1 else ""
    )


def zero(record: Record) -> str:
    """What the times of a row's ranks count from, and which of them may be held together."""
    clocks = {found.clock for found in record.kernel_phases}
    if record.ranks == 1:
        return "us from the begin of its first CTA"
    if len(clocks) == 1:
        return "us from the begin of the first CTA of all ranks, which share one GPU's clock"
    if len(clocks) == record.ranks:
        return (
            "us from the begin of each rank's own first CTA: GPUs share no clock, so no time of "
            "one rank is before or after another's"
        )
    return (
        "us from the begin of the first CTA of all ranks of a GPU: GPUs share no clock, so only "
        "ranks of one GPU can be held against one another"
    )


def waited(found: RankPhases) -> str:
    """Median and largest wait of a rank's CTAs: ``3.10 / 12.0``."""
    return f"{units.number(found.waited_us_median)} / {units.number(found.waited_us_max)}"


def _table(row: Row, rows: Rows) -> Table:
    record = row.record
    several = len({found.clock for found in record.kernel_phases}) not in (1, record.ranks)
    columns = (
        Column("rank", right=False),
        *(Column("GPU", right=False) for _ in range(several)),
        *(Column(title) for title in TITLES.values()),
        Column("waited"),
    )
    shown = record.kernel_phases[:_MAX_RANKS]
    more = record.ranks - len(shown)
    return Table(
        title(row, rows),
        columns,
        tuple(_cells(found, several) for found in shown),
        (
            f"begin-end, {zero(record)}. {ONE_PASS}.",
            *wording.marks([record], rows.machine),
        ),
        (f"{units.count(more, 'more rank')}: --format json has them all.",) * (more > 0),
        alike=True,
    ).without_empty_columns()


def _cells(found: RankPhases, with_clock: bool) -> tuple[str, ...]:
    spans = {
        span.name: f"{units.number(span.begin_us)}-{units.number(span.end_us)}"
        for span in found.spans
    }
    names = (str(found.rank), *[str(found.clock)] * with_clock)
    return (*names, *(spans.get(name, units.NOTHING) for name in TITLES), waited(found))
