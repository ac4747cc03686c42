"""Each series of a history over its launches: levels, change points, accepted levels, verdicts."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mokbench.regression.launch import MARKS
from mokbench.report.charts.style import fold, panels
from mokbench.report.trend import Trend

PANELS = 6
MAX_SERIES = 60
_TICKS = 8
_GIB = float(1 << 30)
# Verdicts differ in marker as well as in colour.
_LOOK = {"SLOWER": ("#D55E00", "X"), "FASTER": ("#009E73", "P"), "CLOCK": ("#CC79A7", "D")}


def figures(trends: Sequence[Trend], title: str) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure), ``PANELS`` series each, in the order given."""
    shown = trends[:MAX_SERIES]
    for start in range(0, len(shown), PANELS):
        part = shown[start : start + PANELS]
        yield f"history-{start // PANELS + 1}", _figure(part, title, len(trends), start)


def _figure(trends: Sequence[Trend], title: str, total: int, start: int) -> Figure:
    notes = [
        "Points: one launch each. Line: median between change points (dashed). Crosses: called "
        "slower (X), faster (+), clock (diamond) by a check. Triangle: level accepted by a person.",
        *dict.fromkeys(MARKS[trend.mark] for trend in trends if trend.mark),
        *dict.fromkeys(
            f"Accepted, {trend.series[0]}: {one.reason}"
            for trend in trends
            for one in trend.accepted
        ),
    ]
    if total > MAX_SERIES:
        notes.append(f"{total - MAX_SERIES} of {total} series not drawn.")
    where = f"{start + 1} to {start + len(trends)} of {total}"
    figure, axes = panels(
        len(trends), title=f"History, series {where}: {title}", notes=notes, size=(4.8, 2.5)
    )
    for panel, trend in zip(axes, trends, strict=True):
        _panel(panel, trend)
    return figure


def _panel(panel: Axes, trend: Trend) -> None:
    scale = _GIB if trend.unit == "bytes" else 1.0
    values = np.array(trend.values) / scale
    x = np.arange(len(values))
    panel.plot(x, values, color="#56B4E9", marker="o", markersize=3, linestyle="none")
    edges = [0, *(change.at for change in trend.changes), len(values)]
    for left, right, level in zip(edges[:-1], edges[1:], trend.levels, strict=False):
        panel.hlines(level / scale, left - 0.5, right - 0.5, color="#0072B2", linewidth=1.4)
    for change in trend.changes:
        panel.axvline(change.at - 0.5, color="#666666", linewidth=1, linestyle="--")
        panel.annotate(
            f"{100 * (change.ratio - 1):+.1f} %",
            (change.at - 0.5, 1.0),
            xycoords=("data", "axes fraction"),
            fontsize=7,
            va="top",
        )
    for verdict, (colour, marker) in _LOOK.items():
        at = [i for i, found in enumerate(trend.verdicts) if found == verdict]
        panel.plot(at, values[at], color=colour, marker=marker, markersize=6, linestyle="none")
    at = [one.at for one in trend.accepted]
    look: Any = {"color": "#000000", "marker": "^", "markersize": 8, "fillstyle": "none"}
    panel.plot(at, values[at], linestyle="none", **look)
    span = max(float(values.max() - values.min()), 0.1 * float(values.mean()))
    middle = float(values.max() + values.min()) / 2
    panel.set_ylim(middle - 0.7 * span, middle + 0.8 * span)
    shown = x[:: max(1, -(-len(x) // _TICKS))]
    panel.set_xticks(shown, [_label(trend, int(i)) for i in shown], fontsize=6, rotation=30)
    panel.set_ylabel(f"{trend.series[1].rpartition('_')[0]} ({'GiB' if scale > 1 else 'us'})")
    mark = f" [{MARKS[trend.mark].partition(':')[0].partition(';')[0]}]" if trend.mark else ""
    panel.set_title(fold(trend.series[0], 56) + mark, fontsize=8)


def _label(trend: Trend, i: int) -> str:
    commit = trend.commits[i]
    return commit[:8] if commit else trend.created[i][:10]
