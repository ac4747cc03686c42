"""Signaling against the number of ranks, with the fitted line where one holds."""

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mokbench.figures import SHARED_GPU, Quantity
from mokbench.report import units, wording
from mokbench.report.charts.style import from_zero_or_log, panels
from mokbench.report.rows import Rows
from mokbench.report.signaling import LEAST_COUNTS, LEAST_R2, Series, formula, series

# Pull is MoK's way and push the baseline's, so each keeps its system's colour.
_LOOK = {
    "signal_hop_us": ("#000000", "v"),
    "local_hop_us": ("#666666", "^"),
    "signal_entry_us": ("#009E73", "D"),
    "signal_ready_us.pull": ("#0072B2", "o"),
    "signal_ready_us.push": ("#D55E00", "s"),
    "signal_after_arrival_us.pull": ("#56B4E9", "P"),
    "signal_after_arrival_us.push": ("#E69F00", "X"),
}


def figures(rows: Rows) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure) for each run, fabric and link."""
    groups: dict[tuple[str, str, str], list[Series]] = {}
    for found in series(rows):
        groups.setdefault((found.run, found.fabric, found.link), []).append(found)
    for (run, fabric, link), members in groups.items():
        where = f"{fabric} ({link})" + (f", run {run}" if len(rows.runs) > 1 else "")
        stem = "-".join(["signaling", fabric, link] + [run] * (len(rows.runs) > 1))
        yield stem, _figure(where, members, rows)


def _figure(where: str, members: list[Series], rows: Rows) -> Figure:
    fabric, link = members[0].fabric, members[0].link
    notes = ["Points: median; thick bars: its 95 % interval; thin lines up to p99."]
    if any(bound is not None for found in members for bound in found.bounds):
        notes.append(
            "Pale bars: how wrong the offset between two SMs' clocks may have been, at most. "
            "Protocols whose pale bars meet are not told apart."
        )
    fitted = any(found.fit() for found in members)
    if fitted:
        notes.append(
            "Lines: alpha + beta N through the medians; dotted where only the fit goes on."
        )
    if not all(found.fit() for found in members):
        notes.append(
            f"{'Points without a line' if fitted else 'No line'}: a fit needs at least "
            f"{LEAST_COUNTS} rank counts, none oversubscribed, and r2 of at least {LEAST_R2}."
        )
    if any(found.oversubscribed for found in members):
        cores = units.count(rows.machine.usable_cores, "core")
        notes.append(
            f"Hollow: oversubscribed, more threads than the {cores}; they wait for a turn."
        )
    if fabric == "host":
        notes.append(wording.HOST)
    if link == "hbm":
        notes.append(f"{SHARED_GPU[0].upper()}{SHARED_GPU[1:]}.")
    figure, axes = panels(
        1, title=f"Signaling against the number of ranks: {where}", notes=notes, size=(7.6, 4.2)
    )
    names = list(dict.fromkeys(found.name for found in members))
    counts = sorted({n for found in members for n, _ in found.points})
    shown: set[str] = set()
    for found in members:
        place = names.index(found.name) - (len(names) - 1) / 2
        # Series share their rank counts; a small shift keeps their bars apart.
        shift = 0.02 * place * max(counts[-1] - counts[0], 1) / 2
        _draw(axes[0], found, shift, hidden=found.name in shown and found.fit() is None)
        shown.add(found.name)
    medians = [q.median for found in members for _, q in found.points]
    p99 = [q.p99 for found in members for _, q in found.points]
    ends = [
        q.median + side * bound
        for found in members
        for (_, q), bound in zip(found.points, found.bounds, strict=True)
        for side in (-1, 1)
        if bound is not None and q.median > bound
    ]
    _axes(axes[0], counts, medians + p99 + ends, fitted)
    return figure


def _draw(panel: Axes, found: Series, shift: float, hidden: bool) -> None:
    colour, marker = _LOOK.get(found.name, ("#CC79A7", "*"))
    counts = np.array([float(n) for n, _ in found.points])
    median = np.array([quantity.median for _, quantity in found.points])
    p99 = np.array([quantity.p99 for _, quantity in found.points])
    fit, label = found.fit(), found.label
    if fit is not None:
        label += f": {formula(fit)}"
        inside = np.linspace(counts.min(), counts.max(), 50)
        beyond = np.linspace(counts.max(), 2 * counts.max(), 50)
        panel.plot(inside, fit.alpha + fit.beta * inside, color=colour, linewidth=1)
        panel.plot(beyond, fit.alpha + fit.beta * beyond, color=colour, linewidth=1, linestyle=":")
    panel.errorbar(
        counts + shift,
        median,
        yerr=[np.zeros_like(median), np.maximum(p99 - median, 0)],
        color=colour,
        marker=marker,
        markerfacecolor="white" if found.oversubscribed else colour,
        markersize=5.5,
        linestyle="none",
        elinewidth=0.7,
        label=None if hidden else label,
    )
    low = np.array([median if q.ci_low is None else q.ci_low for median, q in _pairs(found)])
    high = np.array([median if q.ci_high is None else q.ci_high for median, q in _pairs(found)])
    bound = np.array([0.0 if us is None else us for us in found.bounds])
    for below, above, width, alpha in (
        (median - low, high - median, 2.2, 1.0),
        (bound, bound, 6.0, 0.25),
    ):
        panel.errorbar(
            counts + shift,
            median,
            yerr=[np.maximum(below, 0), np.maximum(above, 0)],
            color=colour,
            linestyle="none",
            elinewidth=width,
            alpha=alpha,
        )


def _pairs(found: Series) -> list[tuple[float, Quantity]]:
    return [(quantity.median, quantity) for _, quantity in found.points]


def _axes(panel: Axes, counts: list[int], values: list[float], fitted: bool) -> None:
    from_zero_or_log(panel, values)
    ends = [2 * counts[-1]] if fitted else []
    panel.set_xticks(counts + ends, [*map(str, counts), *(f"{n}\n(fit only)" for n in ends)])
    spare = 0.5 + 0.05 * (counts[-1] - counts[0])
    panel.set_xlim(counts[0] - spare, (ends or counts)[-1] + spare)
    panel.set_xlabel("ranks N")
    panel.set_ylabel("latency (us)")
    panel.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
