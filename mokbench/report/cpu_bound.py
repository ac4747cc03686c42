"""Chains without a graph that may be as slow as the CPU queues them, and not as the GPU runs."""

from collections.abc import Iterator, Sequence

from mokbench.clocks import apart
from mokbench.record import Record
from mokbench.report import units, wording
from mokbench.report.rows import Row, Workload

# Above this a chain is said to be slower than what ought to bound it.
FLOOR = 1.05
_MOST_LINES = 8
_MAY = "that queues them may be what holds them up"
_NEITHER = "they are no faster"


def table_lines(shown: Sequence[Row]) -> list[str]:
    """A line for each such chain among the rows of one workload."""
    return [line for row in shown for line in _lines(row, shown)]


def page_lines(rows: Sequence[Row]) -> list[str]:
    """The same for a whole report, each with its workload; what is left out is counted."""
    groups: dict[Workload, list[Row]] = {}
    for row in rows:
        groups.setdefault(Workload.of(row.record), []).append(row)
    lines = [
        f"{wording.workload(work, [members[0].record.link])}: {line}"
        for work, members in groups.items()
        for line in table_lines(members)
    ]
    more = len(lines) - _MOST_LINES
    told = [f"{units.count(more, 'more chain')} like these."] if more > 0 else []
    return lines[:_MOST_LINES] + told


def _lines(row: Row, shown: Sequence[Row]) -> Iterator[str]:
    record = row.record
    if record.fabric != "cuda" or record.regime != "steady" or record.graph:
        return
    alike = [one.record for one in shown if one.run == row.run and one.record.name == record.name]
    graph = next((one for one in alike if (one.regime, one.graph) == ("steady", True)), None)
    single = next((one for one in alike if (one.regime, one.graph) == ("isolated", False)), None)
    # Of the two the graph says more: it differs in nothing but who queues the passes.
    if graph is not None and _is_slower(record, graph):
        yield _line(record, graph, "its steady passes by CUDA graph", f"the CPU {_MAY}")
    elif single is not None and _is_slower(record, single):
        queued = f"the CPU {_MAY}" if graph is None else f"not the CPU: by graph {_NEITHER}"
        yield _line(record, single, "its isolated passes", queued)


def _is_slower(record: Record, other: Record) -> bool:
    own, its = record.step_time_us, other.step_time_us
    return own is not None and its is not None and own.median > FLOOR * its.median


def _line(record: Record, other: Record, what: str, cause: str) -> str:
    own, its = record.step_time_us, other.step_time_us
    assert own is not None
    assert its is not None
    clock = ""
    if apart(record.sm_clock_mhz, other.sm_clock_mhz):
        clock = f", SM {record.sm_clock_mhz:.0f} against {other.sm_clock_mhz:.0f} MHz"
    return (
        f"{record.name}: steady passes without a graph take {units.number(own.median)} us, "
        f"{units.quotient(own.median / its.median)} times {what} ({units.number(its.median)} us"
        f"{clock}): {cause}"
    )
