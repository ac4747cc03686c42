"""What figures of a run are divided by, per number of ranks: rates.json of the run's folder."""

from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from mokbench.durable import as_results_error, replace_file
from mokbench.errors import ResultsError
from mokbench.figures import Fabric, Figures, Link, first_problem

_FILE = "rates.json"


class RatePoint(Figures):
    """Rates with ``ranks`` ranks at once, in bytes/s of one rank; docs/metrics.md defines each.

    ``timer_step_us`` is the step of CUDA events' times; folders of an older mokbench have none.
    ``skew_self_test_us`` is what the timer reported for a rank made 200 us late, ``overlap_ms`` how
    long the kernels of ranks that share a GPU were seen to run at the same time.
    """

    ranks: int
    ranks_per_gpu: int
    fabric: Fabric
    link: Link
    copy_bytes_per_s: float
    read_bytes_per_s: float
    peer_bytes_per_s: float | None
    skew_self_test_us: float
    overlap_ms: float | None
    timer_step_us: float | None = None

    @classmethod
    def of(cls, told: dict[str, Any], **known: Any) -> Self:
        """From a worker's answer and what the launcher knows."""
        return cls.model_validate({**told, **known})

    @property
    def gpu_copy_gbs(self) -> float:
        """Copy rate of one GPU over all its ranks, read plus write, in GB/s."""
        return self.copy_bytes_per_s * self.ranks_per_gpu / 1e9


_POINTS = TypeAdapter(list[RatePoint])


def read(folder: Path) -> list[RatePoint]:
    """Points of a run, none where it measured none; ResultsError for a file that is not whole."""
    path = folder / _FILE
    with as_results_error(path, "reading", "check that the file can be read"):
        if not path.exists():
            return []
        content = path.read_bytes()
    try:
        return _POINTS.validate_json(content)
    except ValidationError as error:
        raise ResultsError(
            f"{path}: {first_problem(error)}; delete it, and --resume measures it again"
        ) from error


def write(folder: Path, points: list[RatePoint]) -> None:
    """Replace the file, atomically; raises ResultsError when it cannot be written."""
    ordered = sorted(points, key=lambda point: point.ranks)
    with as_results_error(folder / _FILE, "storing rates", "the rows are safe; free some space"):
        replace_file(folder / _FILE, _POINTS.dump_json(ordered, indent=1))
