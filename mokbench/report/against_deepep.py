"""Every system against DeepEP, workload by workload: ratio, minimal step, and what differs most.

The cause of a difference is the phase that differs most in its direction, by more than the two
intervals leave open. Phases are timed on isolated rows, each from an aligned start; what a step
takes beyond dispatch and combine is its expert GEMMs and whatever its ranks wait for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mokbench.record import Record
from mokbench.report import clock_words, units, wording
from mokbench.report.comparison import Comparison, compare, reference
from mokbench.report.rows import Row, Rows, Workload
from mokbench.report.tables import Column, Table

NOT_RESOLVED = "not resolved"
PHASES = ("dispatch", "combine", "experts and waits")
AGAINST = "row us / deepep us (95 % CI)"
LEGEND = (
    "row us / deepep us: step time of a row divided by that of deepep (below 1: the row took less "
    "time). largest cause: the phase that differs most in that direction, row less deepep in us "
    "with the interval that both rows' 95 % intervals leave; experts and waits is the step without "
    f"dispatch and combine; {NOT_RESOLVED} where no phase differs by more than its interval, or "
    "the steps themselves do not, or a row has no phases apart (steady rows never have), or the "
    f"two rows' SM clocks are more than {clock_words.FLOOR} apart."
)


@dataclass(frozen=True)
class Cause:
    """``phase`` takes ``difference_us`` more than DeepEP's, between ``low_us`` and ``high_us``."""

    phase: str
    difference_us: float
    low_us: float
    high_us: float

    @property
    def is_resolved(self) -> bool:
        """Whether the interval is on one side of no difference."""
        return self.low_us > 0 or self.high_us < 0

    def __str__(self) -> str:
        low, high = units.number(self.low_us), units.number(self.high_us)
        sign = "+" if self.difference_us > 0 else ""
        return f"{self.phase}: {sign}{units.number(self.difference_us)} us ({low} to {high})"


@dataclass(frozen=True)
class AgainstDeepep:
    """A row and DeepEP's; ``cause`` is None where it is not resolved."""

    found: Comparison
    cause: Cause | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        cause = None if self.cause is None else asdict(self.cause)
        return {**self.found.to_dict(), "cause": cause}


def against_deepep(rows: Rows) -> Iterator[AgainstDeepep]:
    """Every measured row beside the DeepEP row that it may be compared with."""
    for group in rows.by_workload().values():
        for row in group:
            if pair := _pair(row, group):
                yield pair


def deepep_tables(rows: Rows) -> list[Table]:
    """One table a workload in which DeepEP and another row were measured."""
    tables = (_table(work, group, rows) for work, group in rows.by_workload().items())
    return [table for table in tables if table is not None]


def largest_cause(row: Record, deepep: Record, found: Comparison) -> Cause | None:
    """The phase that explains most of what ``found`` shows; None where none can be named."""
    if not found.ratio.excludes_one or clock_words.differ(found):
        return None
    slower = found.ratio.value > 1.0
    own, its = _phases(row), _phases(deepep)
    causes = [
        Cause(phase, mine[0] - other[0], mine[1] - other[2], mine[2] - other[1])
        for phase, mine, other in zip(PHASES, own, its, strict=True)
        if mine is not None and other is not None
    ]
    resolved = [each for each in causes if each.is_resolved and (each.difference_us > 0) is slower]
    return max(resolved, key=lambda each: abs(each.difference_us), default=None)


Interval = tuple[float, float, float]


def _phases(record: Record) -> list[Interval | None]:
    """(median, low, high) in us of each of ``PHASES``; None where it is not known."""
    parts: list[Interval | None] = []
    for name in ("dispatch_us", "combine_us"):
        known = record.signal_detail.get(name)
        if known is None or known.ci_low is None or known.ci_high is None:
            parts.append(None)
        else:
            parts.append((known.median, known.ci_low, known.ci_high))
    step, (dispatch, combine) = record.step_time_us, parts
    if step is None or step.ci_low is None or step.ci_high is None or not (dispatch and combine):
        return [*parts, None]
    rest = (
        step.median - dispatch[0] - combine[0],
        step.ci_low - dispatch[2] - combine[2],
        step.ci_high - dispatch[1] - combine[1],
    )
    return [*parts, rest]


def _pair(row: Row, group: Sequence[Row]) -> AgainstDeepep | None:
    deepep = reference(group, row, "deepep")
    if deepep is None or deepep == row:
        return None
    found = compare(row, deepep)
    if found is None:
        return None
    return AgainstDeepep(found, largest_cause(row.record, deepep.record, found))


def _table(work: Workload, group: Sequence[Row], rows: Rows) -> Table | None:
    measured = [row for row in group if row.record.step_time_us is not None]
    measured.sort(key=lambda row: (row.record.graph, row.record.regime))
    pairs = {id(row): _pair(row, group) for row in measured}
    if not any(pairs.values()):
        return None
    references = dict.fromkeys(
        pair.found.other.record.name for pair in pairs.values() if pair is not None
    )
    about = [f"deepep is {' or '.join(references)}"] if list(references) != ["deepep"] else []
    about += _sm_counts(measured)
    records = [row.record for row in measured]
    table = Table(
        wording.workload(work, [record.link for record in records]),
        (
            Column("system", right=False),
            Column("regime", right=False),
            Column("step us (95 % CI)"),
            Column(AGAINST),
            Column("min step us"),
            Column("dispatch us", expendable=5),
            Column("combine us", expendable=5),
            Column("largest cause", right=False),
        ),
        tuple(_cells(row.record, pairs[id(row)], list(references)) for row in measured),
        (*about, *wording.marks(records, rows.machine)),
    )
    return table.without_empty_columns()


def _cells(record: Record, pair: AgainstDeepep | None, references: list[str]) -> tuple[str, ...]:
    is_reference = pair is None and record.name in references
    ratio, cause = ("1" if is_reference else units.NOTHING), units.NOTHING
    if pair is not None:
        ratio = ("~" if pair.found.basis == "separate" else "") + units.ratio(pair.found.ratio)
        clock = clock_words.beside(pair.found)
        cause = NOT_RESOLVED if pair.cause is None else str(pair.cause)
        cause += f" [{clock}]" if clock else ""
    return (
        record.name,
        wording.regime(record),
        units.step(record.step_time_us),
        ratio,
        units.number(record.min_step_us),
        units.number(record.dispatch_us),
        units.number(record.combine_us),
        cause,
    )


def _sm_counts(measured: Sequence[Row]) -> list[str]:
    """What the sweep of each DeepEP variant found, once."""
    found: dict[str, None] = {}
    for row in measured:
        if row.record.system == "deepep":
            notes = [note for note in row.record.notes if note.startswith("num_sms ")]
            found |= dict.fromkeys(f"{row.record.name}: {note}" for note in notes)
    return list(found)
