"""Speed-up heat map: how many times as long each other system takes, over tokens x imbalance."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from mokbench.report import units, wording
from mokbench.report.charts.names import stems
from mokbench.report.charts.style import by_imbalance, fold, most_figures, notes_of, panels, spread
from mokbench.report.comparison import Comparison, compare, may_compare
from mokbench.report.rows import Row, Rows, Workload

MAX_FIGURES = 6
MAX_PANELS = 6
MAX_TOKENS = 10
MAX_ROUTINGS = 10
_LEAST_SPAN = np.log2(1.25)


def figures(rows: Rows) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure) for each shape, regime and run in which systems compare."""
    most = most_figures(rows, MAX_FIGURES)
    groups: dict[tuple[Workload, str, str], list[Row]] = {}
    for row in rows.with_status("ok"):
        if row.record.step_time_us is not None:
            work = Workload.of(row.record)._replace(tokens_per_rank=0, routing="")
            groups.setdefault((work, wording.regime(row.record), row.run), []).append(row)
    # Comparing takes a while; shapes that are not drawn are only asked whether they could be.
    able = {key: members for key, members in groups.items() if _compares(members)}
    drawn = {key: _pairs(members) for key, members in list(able.items())[:most]}
    several = len(rows.runs) > 1
    names = stems("speedup", [(w, [w.dtype, how] + [run] * several) for w, how, run in drawn])
    more = len(able) - most
    notes = [f"{units.count(more, 'more chart')} of this kind not drawn."] if more > 0 else []
    for stem, ((work, how, run), found) in zip(names, drawn.items(), strict=True):
        title = wording.shape(work, how) + f", run {run}" * several
        marks = notes_of([row.record for row in groups[work, how, run]], rows)
        yield stem, _figure(title, work.fabric, *found, [*marks, *notes])


def subject(rows: Sequence[Row]) -> str | None:
    """System that the others are held against: mok, else push, else the first one there is."""
    names = list(dict.fromkeys(row.record.name for row in rows))
    return next(
        (name for own in ("mok", "push") for name in names if name.split(" ")[0] == own),
        names[0] if names else None,
    )


def _compares(rows: Sequence[Row]) -> bool:
    """Whether any other system may be held against the subject on one workload."""
    own = subject(rows)
    mine = {(r.record.tokens_per_rank, r.record.routing): r for r in rows if r.record.name == own}
    return any(
        (base := mine.get((row.record.tokens_per_rank, row.record.routing))) is not None
        and may_compare(base.record, row.record)
        for row in rows
        if row.record.name != own
    )


def _pairs(rows: Sequence[Row]) -> tuple[str, dict[str, list[Comparison]]]:
    """Comparisons of every other system with the subject."""
    own = subject(rows)
    found: dict[str, list[Comparison]] = {}
    mine = {(r.record.tokens_per_rank, r.record.routing): r for r in rows if r.record.name == own}
    for other in rows:
        base = mine.get((other.record.tokens_per_rank, other.record.routing))
        if other.record.name == own or base is None or not may_compare(base.record, other.record):
            continue
        pair = compare(other, base)
        if pair is not None:
            found.setdefault(other.record.name, []).append(pair)
    return str(own), found


def _figure(
    title: str, fabric: str, own: str, found: dict[str, list[Comparison]], notes: Sequence[str]
) -> Figure:
    records = [pair.mok.record for pairs in found.values() for pair in pairs]
    routings = spread(by_imbalance(records), MAX_ROUTINGS)
    tokens = spread(sorted({record.tokens_per_rank for record in records}), MAX_TOKENS)
    caption = [
        f"Step time of the named system over that of {own}: above 1 (purple), {own} takes less "
        "time. ?: the 95 % interval holds 1 or there is none; ~: not measured in turn.",
        *notes,
    ]
    if len(found) > MAX_PANELS:
        caption.append(f"Systems left out: {', '.join(list(found)[MAX_PANELS:])}.")
    shown = dict(list(found.items())[:MAX_PANELS])
    what = f"Speed-up of {own}"
    if fabric == "host":
        what = f"Step time relative to {own} ({wording.NO_VERDICT})"
    figure, axes = panels(
        len(shown),
        title=f"{what} over tokens and imbalance: {title}",
        notes=caption,
        size=(max(3.4, 1.6 + 0.75 * len(tokens)), 1.3 + 0.42 * len(routings)),
    )
    span = max(
        _LEAST_SPAN,
        *(abs(np.log2(pair.ratio.value)) for pairs in shown.values() for pair in pairs),
    )
    for panel, (name, pairs) in zip(axes, shown.items(), strict=True):
        _panel(panel, name, pairs, tokens, routings, float(span))
    return figure


def _panel(
    panel: Axes,
    name: str,
    pairs: Sequence[Comparison],
    tokens: Sequence[int],
    routings: Sequence[str],
    span: float,
) -> None:
    at = {(p.mok.record.tokens_per_rank, p.mok.record.routing): p for p in pairs}
    values = np.full((len(routings), len(tokens)), np.nan)
    norm, colours = TwoSlopeNorm(0.0, -span, span), colormaps["PuOr"]
    for y, routing in enumerate(routings):
        for x, count in enumerate(tokens):
            pair = at.get((count, routing))
            if pair is None:
                continue
            values[y, x] = np.log2(pair.ratio.value)
            ink = "#fffffe" if abs(values[y, x]) > 0.6 * span else "#111111"
            look: Any = {"ha": "center", "va": "center", "fontsize": 8, "color": ink}
            panel.text(x + 0.5, y + 0.5, _label(pair), **look)
    panel.pcolormesh(values, cmap=colours, norm=norm, edgecolors="#dddddd", linewidth=0.6)
    panel.set_xticks(np.arange(len(tokens)) + 0.5, [str(count) for count in tokens])
    panel.set_yticks(np.arange(len(routings)) + 0.5, [fold(name, 16) for name in routings])
    panel.invert_yaxis()
    panel.grid(visible=False)
    panel.set_xlabel("tokens per rank")
    panel.set_title(f"{fold(name, 36)} over it", fontsize=9)


def _label(pair: Comparison) -> str:
    low, high = pair.ratio.low, pair.ratio.high
    open_ = low is None or high is None or low <= 1.0 <= high
    return (
        ("~" if pair.basis == "separate" else "")
        + units.quotient(pair.ratio.value)
        + ("?" if open_ else "")
    )
