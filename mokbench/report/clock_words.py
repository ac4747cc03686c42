"""What a comparison says of its rows' SM clocks: a difference of clocks is none of systems."""

from collections.abc import Sequence

from mokbench.clocks import CLOCK_FLOOR, apart
from mokbench.record import Record
from mokbench.report import units
from mokbench.report.comparison import Comparison, compare
from mokbench.report.rows import Row

FLOOR = f"{100 * CLOCK_FLOOR:.0f} %"


def differ(pair: Comparison) -> bool:
    """Whether the two rows' clocks are known and more than ``FLOOR`` apart."""
    return apart(pair.mok.record.sm_clock_mhz, pair.other.record.sm_clock_mhz)


def beside(pair: Comparison) -> str:
    """Both clocks and the ratio in SM cycles, where the clocks differ; else empty."""
    if not differ(pair):
        return ""
    own, other = pair.mok.record.sm_clock_mhz, pair.other.record.sm_clock_mhz
    return f"SM {own:.0f} against {other:.0f} MHz; in SM cycles {units.quotient(pair.cycle_ratio)}"


def span(pairs: Sequence[Comparison]) -> str:
    """``beside`` for many pairs of the same two systems; empty where no clocks differ."""
    found = [pair for pair in pairs if differ(pair)]
    if not found:
        return ""
    shares = [100 * (pair.clock_ratio - 1) for pair in found if pair.clock_ratio is not None]
    cycles = [pair.cycle_ratio for pair in found if pair.cycle_ratio is not None]
    percent = " to ".join(dict.fromkeys(f"{share:+.0f}" for share in (min(shares), max(shares))))
    ratios = " to ".join(dict.fromkeys(map(units.quotient, (min(cycles), max(cycles)))))
    return (
        f"SM clock {percent} % against it in {len(found)} (in SM cycles {ratios} times), which is "
        "part of the ratio"
    )


def table_lines(shown: Sequence[Row]) -> list[str]:
    """For rows that a table shows together: who ran at another clock than the fastest of them."""
    sets: dict[tuple[object, ...], list[Row]] = {}
    for row in shown:
        record = row.record
        if record.step_time_us is not None and record.sm_clock_mhz:
            key = (row.run, record.regime, record.graph, record.ranks_per_gpu)
            sets.setdefault(key, []).append(row)
    lines = []
    for members in sets.values():
        fastest = min(members, key=lambda row: _median(row.record))
        for row in members:
            pair = compare(row, fastest)
            if pair is not None and differ(pair):
                lines.append(_line(pair))
    return lines


def _line(pair: Comparison) -> str:
    own, fastest = pair.mok.record, pair.other.record
    how = own.regime + ", graph" * own.graph
    return (
        f"{how}: SM clocks differ: {own.name} ran at {own.sm_clock_mhz:.0f} MHz, {fastest.name} at "
        f"{fastest.sm_clock_mhz:.0f}; it takes {units.quotient(pair.ratio.value)} times the step "
        f"time of {fastest.name} and {units.quotient(pair.cycle_ratio)} times its SM cycles"
    )


def _median(record: Record) -> float:
    assert record.step_time_us is not None
    return record.step_time_us.median
