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

# Times between two SMs, whose clocks' offset is known within this protocol's bound only.
BOUNDED = {
    "signal_ready_us.pull": "pull",
    "signal_ready_us.push": "push",
    "signal_after_arrival_us.pull": "pull",
}
DIFFERENCE = "ready, push less pull"
LEGEND = (
    "+-: how wrong the offset between two SMs' clocks may have been in that call, at most; it is "
    "in every round alike, so no interval shows it."
)

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
    # Of each point; null on one clock.
    bounds: tuple[float | None, ...] = ()

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
    all_bounds = _bounds(rows)
    keys = sorted(found, key=lambda k: (*k[:3], order.index(k[3]) if k[3] in order else 99, k[3:]))
    made = []
    for run, fabric, link, name, crowded in keys:
        points = tuple(sorted(found[run, fabric, link, name, crowded], key=lambda item: item[0]))
        where = (run, fabric, link, BOUNDED.get(name))
        bounds = tuple(all_bounds.get((*where, count)) for count, _ in points)
        made.append(Series(run, fabric, link, name, crowded, points, bounds))
    return made


def _bounds(rows: Rows) -> dict[tuple[object, ...], float]:
    """clock_offset_bound_us by run, fabric, link, protocol and number of ranks."""
    found: dict[tuple[object, ...], float] = {}
    for run, point in rows.signals:
        for protocol in ("pull", "push"):
            bound = point.quantities.get(f"clock_offset_bound_us.{protocol}")
            if bound is not None:
                found[run, point.fabric, point.link, protocol, point.ranks] = bound.p99
    return found


def difference(push: Series, pull: Series, ranks: int) -> str:
    """Push's median less pull's among ``ranks`` ranks, and whether anything is shown by it.

    Its interval is what both intervals leave, and both calls' offsets may err to either side.
    """
    (own, own_bound), (other, other_bound) = (_point(found, ranks) for found in (push, pull))
    if own is None or other is None:
        return units.NOTHING
    apart, bound = own.median - other.median, (own_bound or 0.0) + (other_bound or 0.0)
    if None in (own.ci_low, own.ci_high, other.ci_low, other.ci_high):
        return f"{units.number(apart)}: not resolved"
    low, high = _less(own.ci_low, other.ci_high), _less(own.ci_high, other.ci_low)
    shown = f"{units.number(apart)} ({units.number(low)} to {units.number(high)})"
    shown += f" +- {units.number(bound)}" if bound else ""
    return shown if low > bound or high < -bound else f"{shown}: not resolved"


def _less(a: float | None, b: float | None) -> float:
    assert a is not None
    assert b is not None
    return a - b


def _point(found: Series, ranks: int) -> tuple[Quantity | None, float | None]:
    for (count, quantity), bound in zip(found.points, found.bounds, strict=True):
        if count == ranks:
            return quantity, bound
    return None, None


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
        tables.append(_table(f"signaling, us: median (95 % CI) / p99, {where}", members))
    return tables


def _table(title: str, members: list[Series]) -> Table:
    counts = sorted({ranks for found in members for ranks, _ in found.points})
    cells: dict[str, dict[int, str]] = {}
    fits: dict[str, str] = {}
    crowded = False
    for found in members:
        crowded |= found.oversubscribed
        for (ranks, quantity), bound in zip(found.points, found.bounds, strict=True):
            text = _text(quantity, bound)
            cells.setdefault(found.label, {})[ranks] = text + "*" * found.oversubscribed
        if fit := found.fit():
            fits[found.label] = formula(fit)
    settled = {found.name: found for found in members if not found.oversubscribed}
    push, pull = (settled.get(f"signal_ready_us.{way}") for way in ("push", "pull"))
    if push is not None and pull is not None:
        cells[DIFFERENCE] = {n: difference(push, pull, n) for n, _ in push.points}
    bounded = any(bound is not None for found in members for bound in found.bounds)
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
        sentences=("*: more threads than cores; one may wait for its turn on a core.",) * crowded
        + (LEGEND,) * bounded,
        alike=True,
    )
    return table.without_empty_columns()


def _text(quantity: Quantity, bound: float | None) -> str:
    """``0.919 (0.915-0.924) / 0.998, +- 0.26``."""
    low, high = (units.number(end) for end in (quantity.ci_low, quantity.ci_high))
    interval = "no CI" if quantity.ci_low is None else f"{low}-{high}"
    off = "" if bound is None else f", +- {units.number(bound)}"
    return f"{units.number(quantity.median)} ({interval}) / {units.number(quantity.p99)}{off}"


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
