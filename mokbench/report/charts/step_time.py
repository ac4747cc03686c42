"""Step time by system and imbalance: one figure per shape and regime, one panel per token count."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mokbench.record import Record
from mokbench.report import units, wording
from mokbench.report.charts.names import stems
from mokbench.report.charts.style import (
    by_imbalance,
    fold,
    from_zero_or_log,
    imbalance_tick,
    most_figures,
    notes_of,
    panels,
    spans_decades,
    spread,
    system_looks,
)
from mokbench.report.comparison import HOST_SYSTEMS
from mokbench.report.rows import Row, Rows, Workload

MAX_FIGURES = 12
MAX_PANELS = 6
MAX_ROUTINGS = 8
MAX_SYSTEMS = 6
_LABEL_CHARS = 14


def figures(rows: Rows) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure) for each shape, regime and run."""
    most = most_figures(rows, MAX_FIGURES)
    groups: dict[tuple[Workload, str, str], list[Record]] = {}
    for row in rows.with_status("ok"):
        if row.record.step_time_us is not None:
            groups.setdefault(_figure_key(row), []).append(row.record)
    several = len(rows.runs) > 1
    names = stems(
        "step_time", [(work, [work.dtype, how] + [run] * several) for work, how, run in groups]
    )
    more = len(groups) - most
    notes = [f"{units.count(more, 'more chart')} of this kind not drawn."] if more > 0 else []
    for stem, ((work, regime, run), records) in list(zip(names, groups.items(), strict=True))[
        :most
    ]:
        title = wording.shape(work, regime) + f", run {run}" * several
        yield stem, _figure(title, work, records, rows, notes)


def _figure_key(row: Row) -> tuple[Workload, str, str]:
    work = Workload.of(row.record)._replace(tokens_per_rank=0, routing="")
    return work, wording.regime(row.record), row.run


def _figure(
    title: str, work: Workload, records: list[Record], rows: Rows, notes: list[str]
) -> Figure:
    systems, left_out = _choose_systems(work, records)
    routings = by_imbalance(records)
    tokens = sorted({record.tokens_per_rank for record in records})
    for what, found, most in (
        ("routings", routings, MAX_ROUTINGS),
        ("token counts", tokens, MAX_PANELS),
    ):
        if len(found) > most:
            left_out.append(f"Left out: {len(found) - most} of {len(found)} {what}.")
    routings, tokens = spread(routings, MAX_ROUTINGS), spread(tokens, MAX_PANELS)
    marks = notes_of(records, rows)
    shown = {
        count: [r for r in records if (r.tokens_per_rank, r.name in systems) == (count, True)]
        for count in tokens
    }
    looks = system_looks(systems)
    values = {count: _values(own) for count, own in shown.items()}
    every = [value for found in values.values() for value in found]
    shared = not spans_decades(every)
    caption = "Points: median; bars: 95 % interval, where there is one."
    if len(tokens) > 1:
        caption += f" {'All panels have one scale.' if shared else 'Each panel has its own scale.'}"
    longest = max(len(line) for name in routings for line in fold(name, _LABEL_CHARS).split("\n"))
    figure, axes = panels(
        len(tokens),
        title=f"Step time by system and imbalance: {title}",
        notes=[caption, *marks, *left_out, *notes],
        legend=looks,
        size=(max(3.2, 0.8 + (0.2 + 0.065 * max(longest, 11)) * len(routings)), 3.1),
    )
    for panel, count in zip(axes, tokens, strict=True):
        _panel(panel, shown[count], looks, routings)
        panel.set_title(wording.tokens(count), fontsize=10)
        from_zero_or_log(panel, every if shared else values[count])
    if shared:
        top = max(panel.get_ylim()[1] for panel in axes)
        for panel in axes:
            panel.set_ylim(0, top)
    return figure


def _values(records: Sequence[Record]) -> list[float]:
    times = [record.step_time_us for record in records if record.step_time_us is not None]
    return [
        bound
        for time in times
        for bound in (time.ci_low or time.median, time.ci_high or time.median)
    ]


def _panel(
    panel: Axes, records: list[Record], looks: dict[str, tuple[str, str]], routings: list[str]
) -> None:
    for place, (system, (colour, marker)) in enumerate(looks.items()):
        found = [_find(records, system, routing) for routing in routings]
        shown = [(i, r.step_time_us) for i, r in enumerate(found) if r and r.step_time_us]
        if not shown:
            continue
        shift = 0.5 * (place - (len(looks) - 1) / 2) / len(looks)
        medians = np.array([time.median for _, time in shown])
        low = np.array([time.ci_low or time.median for _, time in shown])
        high = np.array([time.ci_high or time.median for _, time in shown])
        panel.errorbar(
            [i + shift for i, _ in shown],
            medians,
            yerr=[medians - low, high - medians],
            color=colour,
            marker=marker,
            markersize=5,
            linestyle="none",
            elinewidth=1.4,
            capsize=2.5,
            label=system,
        )
    ticks = [imbalance_tick(records, routing, _LABEL_CHARS) for routing in routings]
    panel.set_xticks(range(len(routings)), ticks, fontsize=8)
    panel.set_xlim(-0.6, len(routings) - 0.4)
    panel.grid(visible=False, axis="x")
    panel.set_ylabel("step time (us)")


def _choose_systems(work: Workload, records: Sequence[Record]) -> tuple[list[str], list[str]]:
    """Systems to draw, MoK first, and what is said of the others."""
    notes = []
    if work.fabric == "host" and any(record.system in HOST_SYSTEMS for record in records):
        others = sorted({r.system for r in records if r.system not in HOST_SYSTEMS})
        records = [record for record in records if record.system in HOST_SYSTEMS]
        if others:
            notes.append(f"Not drawn, since only mok and push compare: {', '.join(others)}.")
    names = list(dict.fromkeys(record.name for record in records))
    names.sort(key=lambda name: not name.startswith("mok"))
    if len(names) > MAX_SYSTEMS:
        notes.append(f"Systems left out: {', '.join(names[MAX_SYSTEMS:])}.")
    return names[:MAX_SYSTEMS], notes


def _find(records: Sequence[Record], system: str, routing: str) -> Record | None:
    return next((r for r in records if r.name == system and r.routing == routing), None)
