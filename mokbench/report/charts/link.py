"""Link utilisation: useful and wire bytes per second over the peer copy of the same run."""

from collections.abc import Iterator

from matplotlib.figure import Figure

from mokbench.report.charts.dots import Dots
from mokbench.report.charts.dots import figures as dot_figures
from mokbench.report.rows import Rows

_DOTS = Dots(
    stem="link",
    title="Link utilisation against the measured peak",
    ylabel="share of measured peer copy",
    values={
        "useful": lambda record: record.link_utilization,
        "wire": lambda record: record.wire_utilization,
    },
    line=(1.0, "measured peer copy"),
    notes=(
        "Filled: useful bytes, each (token, rank) once; hollow: wire bytes. Dashed: the rate of a "
        "plain peer copy in the same run.",
    ),
)


def figures(rows: Rows) -> Iterator[tuple[str, Figure]]:
    """Yield (file stem, figure); rows without a link of their own have none."""
    return dot_figures(rows, _DOTS)
