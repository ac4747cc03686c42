"""Per-rank timeline of a typical pass, from raw samples: who is late, and by how much."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mokbench.errors import ResultsError
from mokbench.record import Record
from mokbench.report import units, wording
from mokbench.report.charts.names import stems
from mokbench.report.charts.style import fold, most_figures, notes_of, panels, system_looks
from mokbench.report.rows import Rows, Workload
from mokbench.results import RunFolder

MAX_FIGURES = 6
MAX_PANELS = 4
MAX_RANKS = 64


def figures(
    rows: Rows, runs: Sequence[RunFolder], lost: list[str] | None = None
) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure) for each shape, graph mode and run with isolated samples.

    A panel a system: the workload in which its ranks differ most. ``lost`` takes a sentence for
    each row whose samples cannot be drawn.
    """
    most = most_figures(rows, MAX_FIGURES)
    folders = dict(zip((name for name, _ in rows.runs), runs, strict=True))
    groups: dict[tuple[Workload, str, str], dict[str, Record]] = {}
    for row in rows.with_status("ok"):
        record = row.record
        if record.ranks < 2 or record.regime != "isolated" or record.samples_file is None:
            continue
        if record.kernel_phases:
            continue  # charts/phases.py shows more of it
        work = Workload.of(record)._replace(tokens_per_rank=0, routing="")
        own = groups.setdefault((work, wording.regime(record), row.run), {})
        best = own.setdefault(record.name, record)
        if (record.rank_spread_us or 0) > (best.rank_spread_us or 0):
            own[record.name] = record
    several = len(rows.runs) > 1
    names = stems("timeline", [(w, [w.dtype, how] + [run] * several) for w, how, run in groups])
    for stem, ((work, how, run), records) in list(zip(names, groups.items(), strict=True))[:most]:
        title = wording.shape(work, how) + f", run {run}" * several
        gone = [] if lost is None else lost
        found = _samples(folders[run], list(records.values())[:MAX_PANELS], gone)
        if found:
            yield stem, _figure(title, found, notes_of([r for r, _ in found], rows))


def _samples(
    run: RunFolder, records: Sequence[Record], lost: list[str]
) -> list[tuple[Record, pd.DataFrame]]:
    """Passes [pass, rank] of rows that still have them; one that is gone leaves its panel out."""
    found = []
    for record in records:
        try:
            samples = run.samples(record)
        except ResultsError as error:
            lost.append(f"Not drawn: {error}.")
            continue
        if samples is None:
            continue
        passes = _passes(samples[samples["accepted"]])
        if passes.empty:
            lost.append(f"Not drawn: the samples of {record.id} hold no accepted pass.")
        else:
            found.append((record, passes))
    return found


def _figure(
    title: str, found: Sequence[tuple[Record, pd.DataFrame]], notes: Sequence[str]
) -> Figure:
    ranks = min(max(record.ranks for record, _ in found), MAX_RANKS)
    told = [
        "Bars: the pass whose slowest rank took the median time; ranks start aligned, each is "
        "timed on its own clock. Lines: 5 to 95 % of all passes of that rank. Chosen: for each "
        "system, the workload in which its ranks differ most.",
        *notes,
    ]
    figure, axes = panels(
        len(found),
        title=f"One pass, rank by rank: {title}",
        notes=told,
        size=(4.6, 1.2 + 0.26 * ranks),
    )
    looks = system_looks([record.name for record, _ in found])
    for panel, (record, passes) in zip(axes, found, strict=True):
        _panel(panel, record, passes, looks[record.name][0])
    return figure


def _passes(samples: pd.DataFrame) -> pd.DataFrame:
    return samples.pivot_table(
        index=["block", "iteration"], columns="rank", values="duration_us"
    ).dropna()


def _panel(panel: Axes, record: Record, passes: pd.DataFrame, colour: str) -> None:
    shown = list(passes.columns[:MAX_RANKS])
    times = passes.to_numpy(dtype=np.float64)
    slowest = times.max(axis=1)
    typical = int(np.argmin(np.abs(slowest - np.median(slowest))))
    durations = times[typical, : len(shown)]
    low, high = np.quantile(times[:, : len(shown)], (0.05, 0.95), axis=0)
    places = np.arange(len(shown))
    panel.barh(places, durations, height=0.7, color=colour, alpha=0.55)
    panel.hlines(places, low, high, color="#000000", linewidth=1.2)
    panel.set_yticks(places, [f"rank {rank}" for rank in shown])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.05 * float(max(high.max(), durations.max())))
    panel.grid(visible=False, axis="y")
    panel.set_xlabel("time from aligned start (us)")
    spread = units.number(float(durations.max() - durations.min()))
    where = f"{wording.tokens(record.tokens_per_rank)}, {record.routing}"
    panel.set_title(f"{fold(record.name, 40)}\n{where}: {spread} us apart", fontsize=9)
