"""MoK against each system it may be compared with: which pairs, and their ratio."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mokbench.record import Record
from mokbench.report.rows import Row, Rows
from mokbench.stats import Ratio, paired_ratio, separate_ratio

# On the host fabric only these two share both the matmul and the way to a peer's memory. Their
# threads differ (mok's roles run at once, push has one), so their rows may be oversubscribed apart.
HOST_SYSTEMS = ("mok", "push")


@dataclass(frozen=True)
class Comparison:
    """Step time of ``mok`` over that of ``other``: below 1, mok took less time.

    Where systems are held against DeepEP, any of them stands in the place of ``mok``.

    ``basis``: ``turn`` when their blocks ran in turn (the ratio is the median over block pairs),
    ``separate`` when two medians are divided, whose interval is wide and leaves drift out.
    """

    mok: Row
    other: Row
    ratio: Ratio
    basis: Literal["turn", "separate"]

    @property
    def clock_ratio(self) -> float | None:
        """SM clock of ``mok`` over that of ``other``; None where one is not known."""
        a, b = self.mok.record.sm_clock_mhz, self.other.record.sm_clock_mhz
        return a / b if a and b else None

    @property
    def cycle_ratio(self) -> float | None:
        """The ratio in SM cycles, time x clock; it has no interval of its own."""
        clock = self.clock_ratio
        return None if clock is None else self.ratio.value * clock

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "id": self.mok.record.id,
            "other_id": self.other.record.id,
            "run": self.mok.run,
            "other_run": self.other.run,
            "basis": self.basis,
            "ratio": asdict(self.ratio),
            "clock_ratio": self.clock_ratio,
            "cycle_ratio": self.cycle_ratio,
        }


def comparisons(rows: Rows) -> Iterator[Comparison]:
    """Every MoK variant against every other system, workload by workload."""
    for group in rows.by_workload().values():
        for mok in group:
            if mok.record.system == "mok":
                yield from against_others(mok, group)


def against_others(mok: Row, group: Sequence[Row]) -> Iterator[Comparison]:
    """``mok`` against each other system of its workload, regime and graph mode."""
    for other in group:
        if other.record.system != "mok" and _is_partner(mok, other, group):
            found = compare(mok, other)
            if found is not None:
                yield found


def compare(mok: Row, other: Row) -> Comparison | None:
    """Ratio of two rows; null where they may not be compared or have no step time."""
    a, b = mok.record, other.record
    if a.step_time_us is None or b.step_time_us is None or not may_compare(a, b):
        return None
    if mok.turn is not None and mok.turn == other.turn and a.block_us and b.block_us:
        return Comparison(mok, other, paired_ratio(a.block_us, b.block_us), "turn")
    return Comparison(mok, other, separate_ratio(a.step_time_us, b.step_time_us), "separate")


def may_compare(a: Record, b: Record) -> bool:
    """Whether two rows of one workload measured the same thing on the same kind of link."""
    if (a.regime, a.graph, a.ranks_per_gpu) != (b.regime, b.graph, b.ranks_per_gpu):
        return False
    if a.routing_digest and b.routing_digest and a.routing_digest != b.routing_digest:
        return False
    return a.fabric != "host" or (a.system in HOST_SYSTEMS and b.system in HOST_SYSTEMS)


def reference(group: Sequence[Row], like: Row, system: str = "mok") -> Row | None:
    """The row of ``system`` to show ``like`` against: of its run if one is, defaults first."""
    candidates = [
        row
        for row in group
        if row.record.system == system
        and row.record.step_time_us is not None
        and may_compare(row.record, like.record)
    ]
    ranked = sorted(candidates, key=lambda row: (row.run != like.run, row.record.variant != ""))
    return ranked[0] if ranked else None


def _is_partner(mok: Row, other: Row, group: Sequence[Row]) -> bool:
    """Rows of another run only stand in for a system that the own run did not measure."""
    if other.run == mok.run:
        return True
    own = [row.record for row in group if row.run == mok.run and row.record.step_time_us]
    return not any(
        record.name == other.record.name and may_compare(mok.record, record) for record in own
    )
