"""Signaling latency against the number of ranks, as series with their fits."""

from dataclasses import dataclass

from mokbench.figures import Quantity
from mokbench.report import units
from mokbench.report.rows import Rows
from mokbench.report.tables import Column, Table
from mokbench.stats import Fit, linear_fit

# A line through fewer rank counts, or one that explains less, would be read as more than it is.
LEAST_COUNTS = 3
LEAST_R2 = 0.9

LABELS = {
    "signal_hop_us": "hop between ranks",
    "local_hop_us": "hop inside a rank",
    "signal_entry_us": "entry: all routing known",
    "signal_ready_us.pull": "ready, pull",
    "signal_ready_us.push": "ready, push",
    "signal_after_arrival_us.pull": "after arrival, pull",
    "signal_after_arrival_us.push": "after arrival, push",
}


@dataclass(frozen=True)
class Series:
    """One quantity over rank counts, all of them oversubscribed or none: they are two regimes."""

    run: str
    fabric: str
    link: str
    name: str
    oversubscribed: bool
    points: tuple[tuple[int, Quantity], ...]

    @property
    def label(self) -> str:
        """Name as people read it."""
        return LABELS.get(self.name, self.name.removesuffix("_us").replace("_", " "))

    def fit(self) -> Fit | None:
        """Line alpha + beta * ranks through the medians, where three counts support one.

        None for an oversubscribed series: its growth is the scheduler's, not the protocol's.
        """
        if self.oversubscribed:
            return None
        counts = [float(ranks) for ranks, _ in self.points]
        if len(set(counts)) < LEAST_COUNTS:
            return None
        found = linear_fit(counts, [quantity.median for _, quantity in self.points])
        return found if found.r2 is not None and found.r2 >= LEAST_R2 else None


def series(rows: Rows) -> list[Series]:
    """All series of a report, quantities in a fixed order; the clocks' bound is none of them."""
    found: dict[tuple[str, str, str, str, bool], list[tuple[int, Quantity]]] = {}
    for run, point in rows.signals:
        for name, quantity in point.quantities.items():
            if name.startswith("clock_offset_bound_us"):
                continue
            crowded = point.oversubscribed or name in point.crowded
            key = (run, point.fabric, point.link, name, crowded)
            found.setdefault(key, []).append((point.ranks, quantity))
    order = list(LABELS)
    keys = sorted(found, key=lambda k: (*k[:3], order.index(k[3]) if k[3] in order else 99, k[3:]))
    return [Series(*key, tuple(sorted(found[key], key=lambda item: item[0]))) for key in keys]


def formula(fit: Fit) -> str:
    """Write a fit in us over N ranks: ``1.05 + 0.551 N``."""
    sign = "-" if fit.beta < 0 else "+"
    return f"{units.number(fit.alpha)} {sign} {units.number(abs(fit.beta))} N"


def signaling_tables(rows: Rows) -> list[Table]:
    """One table per run, fabric and link: median / p99 in us by number of ranks, and the fit."""
    groups: dict[tuple[str, str, str], list[Series]] = {}
    for found in series(rows):
        groups.setdefault((found.run, found.fabric, found.link), []).append(found)
    tables = []
    for (run, fabric, link), members in groups.items():
        where = f"{fabric} ({link})" + (f", run {run}" if len(rows.runs) > 1 else "")
        tables.append(_table(f"signaling, us: median / p99, {where}", members))
    return tables


def _table(title: str, members: list[Series]) -> Table:
    counts = sorted({ranks for found in members for ranks, _ in found.points})
    cells: dict[str, dict[int, str]] = {}
    fits: dict[str, str] = {}
    crowded = False
    for found in members:
        crowded |= found.oversubscribed
        for ranks, quantity in found.points:
            text = f"{units.number(quantity.median)} / {units.number(quantity.p99)}"
            cells.setdefault(found.label, {})[ranks] = text + "*" * found.oversubscribed
        if fit := found.fit():
            fits[found.label] = formula(fit)
    table = Table(
        title,
        (
            Column("quantity", right=False),
            *(Column(f"N = {n}") for n in counts),
            Column("fit"),
        ),
        tuple(
            (
                label,
                *(by_count.get(n, units.NOTHING) for n in counts),
                fits.get(label, units.NOTHING),
            )
            for label, by_count in cells.items()
        ),
        sentences=("*: more threads than cores; one may wait for its turn on a core.",) * crowded,
        alike=True,
    )
    return table.without_empty_columns()


def min_step_table(rows: Rows) -> Table | None:
    """min_step_us of each system: the step of one token per rank, by number of ranks."""
    found: dict[str, dict[int, float]] = {}
    for row in rows.with_status("ok"):
        record = row.record
        if record.min_step_us is not None:
            name = record.name if len(rows.runs) == 1 else f"{record.name}, {row.run}"
            found.setdefault(name, {}).setdefault(record.ranks, record.min_step_us)
    if not found:
        return None
    counts = sorted({ranks for by_count in found.values() for ranks in by_count})
    return Table(
        "min step, us: one token per rank at H 2048, I 256, E 16, k 2",
        (Column("system", right=False), *(Column(f"N = {n}") for n in counts)),
        tuple(
            (name, *(units.number(by_count.get(n)) for n in counts))
            for name, by_count in found.items()
        ),
        alike=True,
    )
