"""Rows per expert, one panel per routing: which experts and ranks are hot."""

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mokbench.record import Record
from mokbench.report import units, wording
from mokbench.report.charts.names import stems
from mokbench.report.charts.style import SHADES, fold, most_figures, notes_of, panels
from mokbench.report.rows import Rows, Workload

MAX_FIGURES = 8
MAX_PANELS = 9
_MOST_BARS = 40


def figures(rows: Rows) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure) for each shape, from the rows with its largest token count."""
    most = most_figures(rows, MAX_FIGURES)
    groups: dict[Workload, dict[tuple[int, str], Record]] = {}
    for row in rows.rows:
        record = row.record
        if record.expert_counts:
            shape = Workload.of(record)._replace(
                fabric="", dtype="", pass_="forward", tokens_per_rank=0, routing=""
            )
            groups.setdefault(shape, {}).setdefault(
                (record.tokens_per_rank, record.routing), record
            )
    names = stems("imbalance", [(work, []) for work in groups])
    more = len(groups) - most
    notes = [f"{units.count(more, 'more chart')} of this kind not drawn."] if more > 0 else []
    for stem, (work, found) in list(zip(names, groups.items(), strict=True))[:most]:
        yield stem, _figure(work, found, rows, notes)


def _figure(
    work: Workload, found: dict[tuple[int, str], Record], rows: Rows, notes: list[str]
) -> Figure:
    tokens = max(count for count, _ in found)
    records = [record for (count, _), record in found.items() if count == tokens]
    others = sorted({count for count, _ in found} - {tokens})
    notes = [
        "Routed row: one (token, k). Line: mean. Shades: experts of one rank, then of the next.",
        "The routing alone, whatever the fabric and the system.",
        *notes_of(records, rows),
        *notes,
    ]
    if others:
        notes.append(f"Left out, same generators: {', '.join(map(wording.tokens, others))}.")
    if len(records) > MAX_PANELS:
        notes.append(f"Left out: {units.count(len(records) - MAX_PANELS, 'more routing')}.")
    records = records[:MAX_PANELS]
    ranks, experts = units.count(work.ranks, "rank"), units.count(work.experts, "expert")
    title = ", ".join(
        [f"{work.model}, {experts}, top {work.top_k}, {ranks}", *wording.unusual(work)]
    )
    figure, axes = panels(
        len(records),
        title=f"Rows per expert: {title}, {wording.tokens(tokens)}",
        notes=notes,
        size=(3.6, 2.5),
    )
    highest = max(max(record.expert_counts) for record in records)
    for panel, record in zip(axes, records, strict=True):
        _panel(panel, record)
        panel.set_ylim(0, 1.05 * max(highest, 1))
    return figure


def _panel(panel: Axes, record: Record) -> None:
    counts = np.array(record.expert_counts)
    experts = np.arange(len(counts))
    rank = experts * record.ranks // max(len(counts), 1)
    if len(counts) > _MOST_BARS:
        # One outline a shade: hundreds of bars a panel would make a page of megabytes.
        edges = np.repeat(np.arange(len(counts) + 1) - 0.5, 2)[1:-1]
        for shade, colour in enumerate(SHADES):
            heights = np.repeat(np.where(rank % 2 == shade, counts, 0), 2)
            panel.fill_between(edges, heights, color=colour, linewidth=0)
    else:
        panel.bar(experts, counts, width=0.85, color=[SHADES[owner % 2] for owner in rank])
    mean = float(counts.mean())
    panel.axhline(mean, color="#D55E00", linewidth=1)
    worst = units.quotient(counts.max() / mean) if mean else units.NOTHING
    empty = 100 * np.count_nonzero(counts == 0) / len(counts)
    panel.set_title(
        f"{fold(record.routing, 36)}\nmax/mean {worst}, {empty:.0f} % empty", fontsize=9
    )
    panel.set_xlabel("expert")
    panel.set_ylabel("routed rows")
    panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    panel.margins(x=0.02)
    panel.grid(visible=False, axis="x")
