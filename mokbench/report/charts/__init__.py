"""Charts of a report as PNG and SVG. matplotlib is imported when charts are drawn, not before."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mokbench.durable import as_results_error
from mokbench.report.rows import Rows, gather
from mokbench.results import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figures", "write"]

# Kinds of charts in the order of a report, by the name that their files begin with.
KINDS = ("step_time", "speedup", "signaling", "link", "imbalance", "roofline", "timeline")


def write(runs: Sequence[RunFolder], folder: str | Path) -> list[Path]:
    """Draw every chart the runs have data for; returns the files, PNG before SVG.

    step_time-*: step time by system and imbalance; speedup-*: heat map over tokens and imbalance;
    signaling-*: signaling against ranks; link-*: link utilisation; imbalance-*: rows per expert;
    roofline-*: step time over the roofline; timeline-*: one pass, rank by rank, for rows with
    phase stamps its phases. Raises ResultsError when the folder cannot be written.
    """
    from mokbench.report.charts.style import save

    rows = gather(runs)
    folder = Path(folder)
    written: dict[Path, None] = {}
    with as_results_error(folder, "writing charts", "name a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for _, stem, figure in figures(rows, runs):
            written.update(dict.fromkeys(save(figure, folder, stem, taken=written)))
    return list(written)


def figures(
    rows: Rows, runs: Sequence[RunFolder], lost: list[str] | None = None
) -> "Iterator[tuple[str, str, Figure]]":
    """Yield (kind, file stem, figure) of every chart, kinds in the order of ``KINDS``.

    ``lost`` takes a sentence for each row whose samples cannot be drawn.
    """
    from mokbench.report.charts import (
        imbalance,
        link,
        phases,
        roofline,
        signaling,
        speedup,
        step_time,
        timeline,
    )

    drawn = {
        "step_time": step_time.figures(rows),
        "speedup": speedup.figures(rows),
        "signaling": signaling.figures(rows),
        "link": link.figures(rows),
        "imbalance": imbalance.figures(rows),
        "roofline": roofline.figures(rows),
        "timeline": itertools.chain(timeline.figures(rows, runs, lost), phases.figures(rows)),
    }
    for kind in KINDS:
        for stem, figure in drawn[kind]:
            yield kind, stem, figure
