"""Charts of a report as PNG and SVG. matplotlib is imported when charts are drawn, not before."""

from collections.abc import Sequence
from pathlib import Path

from mokbench.durable import as_results_error
from mokbench.report.rows import gather
from mokbench.results import RunFolder

__all__ = ["write"]


def write(runs: Sequence[RunFolder], folder: str | Path) -> list[Path]:
    """Draw every chart the runs have data for; returns the files, PNG before SVG.

    step_time-*: step time by system and imbalance; signaling-*: signaling against ranks;
    imbalance-*: rows per expert. Raises ResultsError when the folder cannot be written.
    """
    from mokbench.report.charts import imbalance, signaling, step_time
    from mokbench.report.charts.style import save

    rows = gather(runs)
    folder = Path(folder)
    written: dict[Path, None] = {}
    with as_results_error(folder, "writing charts", "name a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for module in (step_time, signaling, imbalance):
            for stem, figure in module.figures(rows):
                written.update(dict.fromkeys(save(figure, folder, stem, taken=written)))
    return list(written)
