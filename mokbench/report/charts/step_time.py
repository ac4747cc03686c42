"""Step time by system and imbalance: one figure per shape and regime, one panel per token count."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mokbench.record import Record
from mokbench.report import units, wording
from mokbench.report.charts.style import from_zero_or_log, panels, system_look
from mokbench.report.comparison import HOST_SYSTEMS
from mokbench.report.rows import Row, Rows, Workload

_Item = TypeVar("_Item")

MAX_FIGURES = 12
MAX_PANELS = 6
MAX_ROUTINGS = 8
MAX_SYSTEMS = 6


def figures(rows: Rows) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure) for each shape, regime and run."""
    groups: dict[tuple[Workload, str, str], list[Record]] = {}
    for row in rows.with_status("ok"):
        if row.record.step_time_us is not None:
            groups.setdefault(_figure_key(row), []).append(row.record)
    for place, ((work, regime, run), records) in enumerate(groups.items()):
        if place == MAX_FIGURES:
            return
        notes = []
        if len(groups) > MAX_FIGURES:
            notes.append(f"{len(groups) - MAX_FIGURES} more shapes and regimes have no chart.")
        if len(rows.runs) > 1:
            notes.append(f"Run {run}.")
        stem = f"step_time-{work.model}-r{work.ranks}-{work.dtype}-{regime}"
        yield stem, _figure(work, regime, records, rows, notes)


def _figure_key(row: Row) -> tuple[Workload, str, str]:
    work = Workload.of(row.record)._replace(tokens_per_rank=0, routing="")
    return work, wording.regime(row.record), row.run


def _figure(
    work: Workload, regime: str, records: list[Record], rows: Rows, notes: list[str]
) -> Figure:
    systems, left_out = _choose_systems(work, records)
    routings = _by_imbalance(records)
    tokens = sorted({record.tokens_per_rank for record in records})
    for what, found, most in (
        ("routings", routings, MAX_ROUTINGS),
        ("token counts", tokens, MAX_PANELS),
    ):
        if len(found) > most:
            left_out.append(f"{len(found) - most} of {len(found)} {what} left out.")
    routings, tokens = _spread(routings, MAX_ROUTINGS), _spread(tokens, MAX_PANELS)
    marks = wording.marks(records, rows.machine)
    marks = [f"{text[0].upper()}{text[1:]}." for text in marks]
    host = [wording.HOST] if work.fabric == "host" else []
    title = (
        f"{work.model}, {units.count(work.ranks, 'rank')}, {work.dtype}, {regime}, {work.fabric}"
    )
    caption = "Points: median; bars: 95 % interval, where there is one."
    figure, axes = panels(
        len(tokens),
        title=f"Step time by system and imbalance: {title}",
        notes=[caption, *host, *marks, *left_out, *notes],
        size=(max(3.2, 1.0 + 0.8 * len(routings)), 3.1),
    )
    for panel, count in zip(axes, tokens, strict=True):
        own = [record for record in records if record.tokens_per_rank == count]
        _panel(panel, own, systems, routings)
        panel.set_title(wording.tokens(count), fontsize=10)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _panel(panel: Axes, records: list[Record], systems: list[str], routings: list[str]) -> None:
    drawn = []
    for place, system in enumerate(systems):
        found = [_find(records, system, routing) for routing in routings]
        shown = [(i, r.step_time_us) for i, r in enumerate(found) if r and r.step_time_us]
        if not shown:
            continue
        shift = 0.5 * (place - (len(systems) - 1) / 2) / len(systems)
        medians = np.array([time.median for _, time in shown])
        low = np.array([time.ci_low or time.median for _, time in shown])
        high = np.array([time.ci_high or time.median for _, time in shown])
        colour, marker = system_look(system.split(" ")[0], place)
        panel.errorbar(
            [i + shift for i, _ in shown],
            medians,
            yerr=[medians - low, high - medians],
            color=colour,
            marker=marker,
            markerfacecolor="white" if " " in system else colour,
            markersize=5,
            linewidth=0.8,
            elinewidth=1.4,
            capsize=2.5,
            label=system,
        )
        drawn += [*low, *high]
    ticks = [_tick(records, routing) for routing in routings]
    panel.set_xticks(range(len(routings)), ticks, fontsize=8)
    panel.set_xlim(-0.6, len(routings) - 0.4)
    panel.grid(visible=False, axis="x")
    panel.set_ylabel("step time (us)")
    from_zero_or_log(panel, drawn)


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


def _by_imbalance(records: Sequence[Record]) -> list[str]:
    """Routings from even to uneven."""
    worst: dict[str, float] = {}
    for record in records:
        found = record.imbalance.expert_max_over_mean if record.imbalance else None
        worst[record.routing] = max(worst.get(record.routing, 0.0), found or 0.0)
    return sorted(worst, key=lambda name: (name != "balanced", worst[name]))


def _spread(items: list[_Item], most: int) -> list[_Item]:
    """At most ``most`` items, first and last kept, the others evenly spread."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _find(records: Sequence[Record], system: str, routing: str) -> Record | None:
    return next((r for r in records if r.name == system and r.routing == routing), None)


def _tick(records: Sequence[Record], routing: str) -> str:
    """Routing with how uneven it is for experts and for ranks."""
    found = next((r.imbalance for r in records if r.routing == routing and r.imbalance), None)
    label = routing if len(routing) <= 14 else routing[:13] + "~"
    if found is None:
        return label
    expert = units.quotient(found.expert_max_over_mean)
    return f"{label}\nexpert {expert}\nrank {units.quotient(found.rank_max_over_mean)}"
