"""Roofline ratio: step time over the least time that measured rates of the machine allow."""

from collections.abc import Iterator

from matplotlib.figure import Figure

from mokbench.report.charts.dots import Dots
from mokbench.report.charts.dots import figures as dot_figures
from mokbench.report.rows import Rows

_DOTS = Dots(
    stem="roofline",
    title="Step time over the roofline",
    ylabel="step time / roofline",
    values={"ratio": lambda record: record.roofline_ratio},
    line=(1.0, "roofline"),
    notes=(
        "Dashed: the roofline, the longest of matmuls, memory and link at rates measured in the "
        "same run. T: tokens per rank.",
    ),
)


def figures(rows: Rows) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure); rows without measured rates have none."""
    return dot_figures(rows, _DOTS)
